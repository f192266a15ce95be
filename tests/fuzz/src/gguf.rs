//! Any file is a model or an error that says what is wrong with it; what opens can be read to the end.

use arbitrary::{Result, Unstructured};
use checkpoint::testing::GgufWriter;
use checkpoint::{Checkpoint, Encode, TensorType, TokenizerBundle};

use crate::model;

/// Tensors that a file is asked for: those of the corpus, and those that the configuration looks at.
const TENSORS: [&str; 6] = [
    "token_embd.weight",
    "output.weight",
    "blk.0.odd",
    "blk.0.attn_q.weight",
    "blk.0.attn_norm.weight",
    "rope_freqs.weight",
];

/// Texts that every tokenizer must take.
const TEXTS: [&str; 5] = ["", " ", "a  b\r\n", "<s>ab<|im_end|>123'll", "é\u{301}🦜\u{2581}\0"];

/// A model file: the bytes as they are, or, unless they begin as one, a sound file made of them.
pub fn gguf(data: &[u8]) {
    if data.starts_with(b"GG") {
        if let Ok(checkpoint) = model::open(data) {
            read(&checkpoint);
        }
        return;
    }
    let _ = sound_file(&mut Unstructured::new(data));
}

/// The byte form of a tokenizer bundle, which a gateway takes from a worker.
pub fn bundle(data: &[u8]) {
    if let Ok(bundle) = TokenizerBundle::from_bytes(data) {
        read_bundle(&bundle);
    }
}

fn read(checkpoint: &Checkpoint) {
    if let Ok(config) = checkpoint.config() {
        assert!(config.heads.is_multiple_of(config.kv_heads) && config.rope_dim <= config.head_dim);
    }
    for name in TENSORS {
        let Ok(tensor) = checkpoint.tensor(name) else { continue };
        let row = tensor.cols / tensor.dtype.block_len() * tensor.dtype.block_bytes();
        assert_eq!(tensor.bytes.len(), tensor.rows * row, "{name}");
        assert_eq!(tensor.to_f32().len(), tensor.rows * tensor.cols, "{name}");
        assert!(checkpoint.has_tensor(name));
    }
    if let Ok(bundle) = checkpoint.bundle() {
        read_bundle(&bundle);
    }
}

fn read_bundle(bundle: &TokenizerBundle) {
    let bytes = bundle.to_bytes();
    let again = TokenizerBundle::from_bytes(&bytes).expect("a bundle survives its byte form");
    assert_eq!(&again, bundle);
    assert_eq!(again.to_bytes(), bytes, "equal bundles are equal bytes");
    let Ok(text) = bundle.open() else { return };
    assert_eq!(text.vocab_size(), bundle.vocab_size());
    assert!(text.eos_ids().iter().all(|id| (*id as usize) < text.vocab_size()));
    for prompt in TEXTS {
        for options in [false, true].map(|flag| Encode { add_bos: flag, parse_special: flag }) {
            let Ok(ids) = text.encode(prompt, options) else { continue };
            assert!(ids.iter().all(|id| (*id as usize) < text.vocab_size()), "{ids:?}");
            let mut decoder = text.decoder(false);
            let mut pieces: String = ids.iter().map(|id| decoder.push(*id)).collect();
            pieces.push_str(&decoder.finish());
            assert_eq!(pieces, text.decode(&ids, false));
        }
    }
    let chat = serde_json::json!([{"role": "user", "content": "é"}, {"role": "assistant", "content": ""}]);
    // A template may well be wrong; it says so.
    let _ = text.render_chat(&chat, &serde_json::json!({"add_generation_prompt": true}));
}

/// A file as a writer lays it out opens, and its tensors are what was written.
fn sound_file(source: &mut Unstructured<'_>) -> Result<()> {
    let mut file = GgufWriter::new();
    if source.arbitrary()? {
        file = file.alignment(1 << source.int_in_range(0..=12)?);
    }
    for index in 0..source.int_in_range(0..=6)? {
        let key = format!("k{index}.{}", source.arbitrary::<char>()?);
        file = match source.int_in_range(0..=6)? {
            0 => file.u32(&key, source.arbitrary()?),
            1 => file.f32(&key, source.arbitrary()?),
            2 => file.bool(&key, source.arbitrary()?),
            3 => file.string(&key, source.arbitrary()?),
            4 => file.strings(&key, &source.arbitrary::<Vec<String>>()?),
            5 => file.i32s(&key, &source.arbitrary::<Vec<i32>>()?),
            _ => file.f32s(&key, &source.arbitrary::<Vec<f32>>()?),
        };
    }
    let mut written = Vec::new();
    for index in 0..source.int_in_range(0..=4)? {
        let dtype = *source.choose(&[
            TensorType::F32,
            TensorType::F16,
            TensorType::BF16,
            TensorType::Q4_0,
            TensorType::Q4_1,
            TensorType::Q8_0,
        ])?;
        let (blocks, rows) = (source.int_in_range(1..=3)?, source.int_in_range(1..=3)?);
        let bytes: Vec<u8> =
            (0..blocks * rows * dtype.block_bytes()).map(|at| at as u8 ^ index as u8).collect();
        let name = format!("t{index}");
        file = file.tensor(&name, dtype, &[(blocks * dtype.block_len()) as u64, rows as u64], bytes.clone());
        written.push((name, dtype, rows, bytes));
    }
    let checkpoint = model::open(&file.to_bytes()).expect("a sound file opens");
    for (name, dtype, rows, bytes) in written {
        let tensor = checkpoint.tensor(&name).expect("a tensor that was written");
        assert_eq!((tensor.dtype, tensor.rows, tensor.bytes), (dtype, rows, bytes.as_slice()));
        assert_eq!(tensor.to_f32().len(), tensor.rows * tensor.cols);
    }
    Ok(())
}
