//! Files that lie: tens of thousands of damaged headers, read to the end under a limit on memory.

#![expect(clippy::unwrap_used, reason = "a test's panic is its report")]

use checkpoint::testing::GgufWriter;
use checkpoint::{Checkpoint, Encode, TensorType, TokenizerBundle};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// One of everything a reader can meet.
fn small_model() -> GgufWriter {
    GgufWriter::new()
        .alignment(32)
        .string("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 128)
        .u32("llama.embedding_length", 32)
        .u32("llama.feed_forward_length", 32)
        .u32("llama.attention.head_count", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .string("llama.rope.scaling.type", "linear")
        .f32("llama.rope.scaling.factor", 2.0)
        .string("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
        .bool("tokenizer.ggml.add_bos_token", true)
        .u32("tokenizer.ggml.bos_token_id", 4)
        .u32("tokenizer.ggml.eos_token_id", 4)
        .u32("tokenizer.ggml.unknown_token_id", 3)
        .i32s("tokenizer.ggml.token_type", &[1, 1, 1, 4, 3, 6])
        .strings("tokenizer.ggml.tokens", &["a", "b", "ab", "u", "<s>", "<0x41>"])
        // First, as a type whose size is not known cannot show that its own end is missing.
        .raw_tensor("blk.0.odd", 14, &[256], vec![0; 210])
        .tensor("token_embd.weight", TensorType::Q8_0, &[32, 3], vec![1; 102])
        .tensor("blk.0.attn_q.weight", TensorType::Q4_0, &[32, 2], vec![2; 36])
        .tensor("blk.0.attn_norm.weight", TensorType::F32, &[32], vec![3; 128])
}

fn byte_level() -> Vec<u8> {
    small_model()
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "smollm")
        .strings("tokenizer.ggml.merges", &["a b"])
        .to_bytes()
}

fn sentence_piece() -> Vec<u8> {
    small_model()
        .string("tokenizer.ggml.model", "llama")
        .f32s("tokenizer.ggml.scores", &[-1.0, -2.0, -3.0, 0.0, 0.0, 0.0])
        .to_bytes()
}

/// One way to damage a file; positions are folded into its length.
#[derive(Clone, Debug)]
enum Damage {
    Byte(usize, u8),
    Word(usize, u64),
    Cut(usize),
    Remove(usize, usize),
    Repeat(usize, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<usize>;
    let word = prop_oneof![
        any::<u64>(),
        0..64_u64,
        (0..64_u32).prop_map(|bit| 1 << bit),
        (0..64_u64).prop_map(|below| u64::MAX - below),
    ];
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        4 => (at(), word).prop_map(|(at, word)| Damage::Word(at, word)),
        1 => at().prop_map(Damage::Cut),
        1 => (at(), 1..40_usize).prop_map(|(at, len)| Damage::Remove(at, len)),
        1 => (at(), 1..40_usize).prop_map(|(at, len)| Damage::Repeat(at, len)),
    ]
}

fn apply(damage: &Damage, file: &mut Vec<u8>) {
    let fold = |at: &usize| at % file.len().max(1);
    match damage {
        _ if file.is_empty() => {}
        Damage::Byte(at, byte) => {
            let at = fold(at);
            file[at] = *byte;
        }
        Damage::Word(at, word) => {
            let at = fold(at);
            let len = (file.len() - at).min(8);
            file[at..at + len].copy_from_slice(&word.to_le_bytes()[..len]);
        }
        Damage::Cut(at) => file.truncate(fold(at)),
        Damage::Remove(at, len) => {
            let at = fold(at);
            file.drain(at..(at + len).min(file.len()));
        }
        Damage::Repeat(at, len) => {
            let at = fold(at);
            let again = file[at..(at + len).min(file.len())].to_vec();
            file.splice(at..at, again);
        }
    }
}

/// Reads all there is to read. Errors are fine; panics, endless loops and great allocations are not.
/// True when the header was sound.
fn read_everything(path: &std::path::Path) -> bool {
    let Ok(checkpoint) = Checkpoint::open(path) else { return false };
    for name in ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight", "blk.0.odd"] {
        if let Ok(tensor) = checkpoint.tensor(name) {
            assert_eq!(tensor.to_f32().len(), tensor.rows * tensor.cols);
            assert!(!tensor.row_bytes(tensor.rows - 1).is_empty());
        }
    }
    if let Ok(config) = checkpoint.config() {
        assert!(config.heads % config.kv_heads == 0 && config.layers > 0);
    }
    if let Ok(bundle) = checkpoint.bundle() {
        let arrived = TokenizerBundle::from_bytes(&bundle.to_bytes()).expect("what was checked arrives");
        if let Ok(text) = arrived.open() {
            let ids = text.encode("ab <s> u é", Encode { add_bos: true, parse_special: true }).unwrap();
            text.decode(&ids, false);
            let messages = serde_json::json!([{"role": "user", "content": "ab"}]);
            let _ = text.render_chat(&messages, &serde_json::Value::Null);
        }
    }
    true
}

/// What this process may map from now on, on top of what it has: far above what reading a few kilobytes needs, far
/// below a length that was believed.
fn limit_memory(more: u64) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    let mut limit = getrlimit(Resource::As);
    limit.current = Some(pages * 4096 + more);
    setrlimit(Resource::As, limit).unwrap();
    assert!(Vec::<u8>::new().try_reserve_exact(more as usize).is_err(), "the limit is in force");
}

#[test]
fn damaged_files_give_errors_and_nothing_worse() {
    limit_memory(256 << 20);
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = dir.path().join("damaged.gguf");
    for whole in [byte_level(), sentence_piece()] {
        std::fs::write(&path, &whole).unwrap();
        assert!(read_everything(&path), "the file is sound before it is damaged");
        // Every place it can be cut at, and every byte turned over.
        for at in 0..whole.len() {
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(!read_everything(&path), "cut at {at} of {}", whole.len());
            let mut flipped = whole.clone();
            flipped[at] ^= 0xff;
            std::fs::write(&path, &flipped).unwrap();
            read_everything(&path);
        }
        let config = Config { cases: 12_000, failure_persistence: None, ..Config::default() };
        TestRunner::new(config)
            .run(&prop::collection::vec(damage(), 1..4), |damages| {
                let mut file = whole.clone();
                for damage in &damages {
                    apply(damage, &mut file);
                }
                std::fs::write(&path, &file).unwrap();
                read_everything(&path);
                Ok(())
            })
            .unwrap();
    }
}
