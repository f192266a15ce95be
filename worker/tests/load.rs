//! From a model file to an engine, on a file of a few kilobytes.

use std::path::Path;

use checkpoint::TokenizerBundle;
use checkpoint::testing::GgufWriter;
use engine::{EngineEvent, SequenceSpec, Until};
use proto::{KvDtype, KvLayout, Reason, Role, SamplingParams, StopConditions};
use worker::load::{self, Loaded, LoadedEngine};
use worker::{Config, Source};

const VOCAB: usize = 12;
const HIDDEN: usize = 8;
const FFN: usize = 16;

/// A `llama` of one layer, two heads and one key/value head, with weights that differ from each other.
fn write_model(path: &Path) {
    let tokens: Vec<String> = (0..VOCAB).map(|id| format!("t{id}")).collect();
    let mut writer = GgufWriter::new()
        .string("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.embedding_length", HIDDEN as u32)
        .u32("llama.feed_forward_length", FFN as u32)
        .u32("llama.attention.head_count", 2)
        .u32("llama.attention.head_count_kv", 1)
        .u32("llama.context_length", 64)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "gpt-2")
        .strings("tokenizer.ggml.tokens", &tokens)
        .strings::<&str>("tokenizer.ggml.merges", &[])
        .i32s("tokenizer.ggml.token_type", &[1; VOCAB])
        .u32("tokenizer.ggml.eos_token_id", 1);
    let tensors = [
        ("token_embd.weight", HIDDEN, VOCAB),
        ("output_norm.weight", HIDDEN, 1),
        ("blk.0.attn_norm.weight", HIDDEN, 1),
        ("blk.0.attn_q.weight", HIDDEN, HIDDEN),
        ("blk.0.attn_k.weight", HIDDEN, HIDDEN / 2),
        ("blk.0.attn_v.weight", HIDDEN, HIDDEN / 2),
        ("blk.0.attn_output.weight", HIDDEN, HIDDEN),
        ("blk.0.ffn_norm.weight", HIDDEN, 1),
        ("blk.0.ffn_gate.weight", HIDDEN, FFN),
        ("blk.0.ffn_up.weight", HIDDEN, FFN),
        ("blk.0.ffn_down.weight", FFN, HIDDEN),
    ];
    for (name, cols, rows) in tensors {
        let values: Vec<f32> = (0..cols * rows).map(|i| ((i * 7 + name.len()) % 13) as f32 / 13.0).collect();
        let dims = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
        writer = writer.f32_tensor(name, &dims, &values);
    }
    writer.write(path);
}

fn config(path: &Path) -> Config {
    Config { model: Source::Gguf(path.to_owned()), threads: Some(1), ..Config::default() }
}

/// The first tokens of a sequence.
fn generate(loaded: Loaded) -> Vec<u32> {
    let LoadedEngine::Cpu(mut engine) = loaded.engine else { panic!("a file is for the CPU") };
    let stop = StopConditions { max_tokens: 6, ..StopConditions::default() };
    let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let tokens = vec![3, 5, 7];
    engine
        .submit(SequenceSpec { tokens, generated: 0, sampling, stop, until: Until::Finished })
        .expect("room for one");
    let mut generated = Vec::new();
    while engine.has_work() {
        generated.extend(engine.step().events.into_iter().filter_map(|event| match event {
            EngineEvent::Token { token, .. } => Some(token),
            _ => None,
        }));
    }
    generated
}

#[test]
fn two_workers_of_one_file_agree() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write_model(&path);
    let prefill = load::load(&config(&path), Role::Prefill).unwrap();
    let decode = load::load(&config(&path), Role::Decode).unwrap();
    assert_eq!(prefill.model, decode.model);
    assert_eq!(
        (prefill.model.name.as_str(), prefill.model.context_len, prefill.model.vocab_size),
        ("tiny", 64, VOCAB)
    );
    let layout = KvLayout { layers: 1, kv_heads: 1, head_dim: 4, dtype: KvDtype::F16, block_tokens: 16 };
    assert_eq!((prefill.engine.layout(), decode.engine.layout()), (layout, layout));
    let LoadedEngine::Cpu(engine) = &decode.engine else { panic!("a file is for the CPU") };
    assert_eq!(engine.kv_counts().total, 8 * 4, "eight sequences of the full context");
    let bundle = TokenizerBundle::from_bytes(&decode.tokenizer).unwrap();
    assert_eq!(bundle.digest(), decode.model.tokenizer);
    let tokens = generate(decode);
    assert_eq!(tokens.len(), 6);
    assert_eq!(generate(prefill), tokens);
}

#[test]
fn options_override_what_the_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write_model(&path);
    let config =
        Config { served_name: Some("public".into()), kv_blocks: Some(5), block_tokens: 8, ..config(&path) };
    let loaded = load::load(&config, Role::Decode).unwrap();
    assert_eq!(loaded.model.name, "public");
    let LoadedEngine::Cpu(engine) = &loaded.engine else { panic!("a file is for the CPU") };
    assert_eq!((engine.kv_counts().total, engine.layout().block_tokens), (5, 8));
}

#[test]
fn another_content_is_another_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write_model(&path);
    let before = load::load(&config(&path), Role::Decode).unwrap().model.fingerprint;
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_ne!(load::load(&config(&path), Role::Decode).unwrap().model.fingerprint, before);
}

#[test]
fn a_file_that_is_no_model_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| {
        let error = load::load(&config(path), Role::Decode).err().expect("no model");
        assert_eq!(error.reason, Reason::InvalidArgument);
        assert!(error.message.starts_with("model ") && error.message.contains("gguf"), "{error}");
    };
    refused(&folder.path().join("missing.gguf"));
    let cut = folder.path().join("cut.gguf");
    write_model(&cut);
    let bytes = std::fs::read(&cut).unwrap();
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    refused(&cut);
}
