//! Two real models: their tokenizers against recorded ids, their shapes, their chat templates.

#![expect(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use checkpoint::{Checkpoint, Encode, Error, RopePairing, RopeScaling, TensorType, Text, TokenizerBundle};
use serde_json::{Value, json};

fn open(file: &str) -> Checkpoint {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models").join(file);
    Checkpoint::open(&path).unwrap_or_else(|error| panic!("run `cargo xtask fetch-model` first: {error}"))
}

struct Model {
    checkpoint: Checkpoint,
    bundle: TokenizerBundle,
    text: Text,
}

impl Model {
    fn new(file: &str) -> Self {
        let checkpoint = open(file);
        let bundle = checkpoint.bundle().unwrap();
        let text = bundle.open().unwrap();
        Self { checkpoint, bundle, text }
    }
}

static SMOLLM2: LazyLock<Model> = LazyLock::new(|| Model::new("SmolLM2-135M-Instruct.gguf"));
static GEMMA3: LazyLock<Model> = LazyLock::new(|| Model::new("gemma-3-270m-it-Q4_K_M.gguf"));

/// Recorded cases: a text, its ids as plain text, and its ids with special tokens parsed; none with BOS.
fn golden_cases(json: &str) -> Vec<(String, [Vec<u32>; 2])> {
    let cases: Vec<Value> = serde_json::from_str(json).unwrap();
    let ids = |value: &Value| serde_json::from_value(value.clone()).unwrap();
    let case = |case: &Value| {
        (case["text"].as_str().unwrap().to_owned(), [ids(&case["ids"]), ids(&case["ids_special"])])
    };
    cases.iter().map(case).collect()
}

fn check_golden(model: &Model, json: &str) {
    let cases = golden_cases(json);
    assert!(!cases.is_empty());
    for (text, expected) in cases {
        for (parse_special, expected) in [false, true].into_iter().zip(expected) {
            let options = Encode { add_bos: false, parse_special };
            assert_eq!(model.text.encode(&text, options).unwrap(), expected, "{text:?} {options:?}");
            assert_eq!(model.text.decode(&expected, false), text, "{options:?}");
            let mut decoder = model.text.decoder(false);
            let mut streamed: String = expected.iter().map(|id| decoder.push(*id)).collect();
            streamed.push_str(&decoder.finish());
            assert_eq!(streamed, text, "{options:?}");
        }
    }
}

#[test]
fn smollm2_tokenizes_as_recorded() {
    check_golden(&SMOLLM2, include_str!("../testdata/tok-smollm2-visible.json"));
}

#[test]
fn gemma3_tokenizes_as_recorded() {
    check_golden(&GEMMA3, include_str!("../testdata/tok-gemma3-visible.json"));
}

#[test]
fn a_bundle_travels() {
    for (model, special_id, special_text) in [(&SMOLLM2, 2, "<|im_end|>"), (&GEMMA3, 106, "<end_of_turn>")] {
        let bytes = model.bundle.to_bytes();
        let arrived = TokenizerBundle::from_bytes(&bytes).unwrap();
        assert_eq!(arrived.digest(), model.bundle.digest());
        assert_eq!(arrived.to_bytes(), model.checkpoint.bundle().unwrap().to_bytes(), "deterministic");
        assert_eq!(arrived.vocab_size(), model.text.vocab_size());
        assert_eq!(arrived.eos_ids(), model.text.eos_ids());
        assert!(model.text.eos_ids().contains(&special_id));
        assert!(model.text.is_special(special_id));
        assert_eq!(model.text.token_bytes(special_id), Some(special_text.as_bytes()));
    }
    let arrived = TokenizerBundle::from_bytes(&SMOLLM2.bundle.to_bytes()).unwrap().open().unwrap();
    let options = Encode { add_bos: true, parse_special: true };
    let ids = arrived.encode("<|im_start|>user\nHi 🦜", options).unwrap();
    assert_eq!(ids, SMOLLM2.text.encode("<|im_start|>user\nHi 🦜", options).unwrap());
}

#[test]
fn smollm2_is_described() {
    let config = SMOLLM2.checkpoint.config().unwrap();
    assert_eq!(
        (config.architecture.as_str(), config.layers, config.hidden, config.ffn),
        ("llama", 30, 576, 1536)
    );
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.vocab_size, config.context_len, config.rope_dim), (49152, 8192, 64));
    assert_eq!((config.rms_eps, config.rope_base), (1e-5, 100_000.0));
    assert_eq!((config.rope_pairing, config.rope_scaling), (RopePairing::Adjacent, RopeScaling::None));
    assert!(config.tied_embeddings && !config.attention_bias && !config.ffn_bias);

    let down = SMOLLM2.checkpoint.tensor("blk.0.ffn_down.weight").unwrap();
    assert_eq!((down.dtype, down.rows, down.cols), (TensorType::Q4_1, 576, 1536));
    assert_eq!(down.bytes.len(), 576 * 1536 / 32 * 20);
    let mut row = vec![0.0; 1536];
    down.dequantize_row(575, &mut row);
    assert_eq!(row, down.to_f32()[575 * 1536..]);
    assert!(row.iter().all(|value| value.abs() < 8.0) && row.iter().any(|value| *value != 0.0));
    let norm = SMOLLM2.checkpoint.tensor("blk.29.ffn_norm.weight").unwrap();
    assert_eq!((norm.dtype, norm.rows, norm.cols), (TensorType::F32, 1, 576));
    assert!(
        SMOLLM2.checkpoint.has_tensor("output_norm.weight")
            && !SMOLLM2.checkpoint.has_tensor("output.weight")
    );
}

#[test]
fn what_gemma3_needs_and_is_not_there_is_named() {
    let checkpoint = &GEMMA3.checkpoint;
    assert!(
        matches!(checkpoint.config(), Err(Error::UnsupportedArchitecture { found }) if found == "gemma3")
    );
    let error = checkpoint.tensor("blk.0.ffn_down.weight").unwrap_err().to_string();
    assert_eq!(
        error,
        "tensor blk.0.ffn_down.weight: type Q6_K is not supported, expected one of F32, F16, BF16, Q4_0, Q4_1, Q8_0"
    );
    assert!(checkpoint.has_tensor("blk.0.ffn_down.weight"));
    assert_eq!(checkpoint.tensor("nothing").unwrap_err().to_string(), "tensor nothing: missing");
    assert_eq!(checkpoint.tensor("token_embd.weight").unwrap().rows, 262_144);
}

#[test]
fn a_beginning_is_added_where_the_model_asks() {
    let options = Encode { add_bos: true, parse_special: false };
    let gemma = GEMMA3.text.encode("a", options).unwrap();
    assert_eq!((GEMMA3.text.bos_id(), gemma[0], gemma.len()), (Some(2), 2, 2));
    let smollm = SMOLLM2.text.encode("a", options).unwrap();
    assert_eq!((SMOLLM2.text.bos_id(), smollm.len()), (None, 1));
    assert!(SMOLLM2.text.encode("", options).unwrap().is_empty());
}

#[test]
fn a_character_over_three_tokens_comes_whole() {
    let parrot = [10813, 116, 246];
    let mut decoder = SMOLLM2.text.decoder(true);
    assert_eq!(parrot.map(|id| decoder.push(id)), ["", "", "🦜"]);
    assert_eq!(decoder.push(2), "", "a special token is skipped");
    assert_eq!(decoder.push(246), "\u{fffd}", "a lone continuation byte");
    assert_eq!(decoder.push(10813), "");
    assert_eq!(decoder.push(7042), "\u{fffd} Paris", "a character cut off by another");
    assert_eq!(decoder.push(10813), "");
    assert_eq!(decoder.finish(), "\u{fffd}");
    assert_eq!(SMOLLM2.text.token_bytes(246), Some(&[0x9c][..]));
    assert_eq!(SMOLLM2.text.token_bytes(49152), None);
}

#[test]
fn what_is_opened_can_be_shared_and_outlived() {
    fn shared<T: Send + Sync + 'static>(_: &T) {}
    shared(&SMOLLM2.checkpoint);
    shared(&SMOLLM2.bundle);
    shared(&SMOLLM2.text);
    let decoder = SMOLLM2.checkpoint.bundle().unwrap().open().unwrap().decoder(true);
    shared(&decoder);
    let mut decoder = decoder;
    assert_eq!(decoder.push(7042), " Paris");
}

#[test]
fn smollm2_chats() {
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]);
    let prompt = SMOLLM2.text.render_chat(&messages, &json!({"add_generation_prompt": true})).unwrap();
    assert_eq!(
        prompt,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>assistant\n"
    );
    assert!(SMOLLM2.text.has_chat_template() && !GEMMA3.text.has_chat_template());
    let error = GEMMA3.text.render_chat(&messages, &json!({})).unwrap_err();
    assert_eq!(error.to_string(), "chat template: the model has none");
}

#[test]
fn long_runs_are_encoded_in_reasonable_time() {
    let started = std::time::Instant::now();
    for unit in [" ", "a", "\n", "🦜", "1", "<|", "\u{300}"] {
        let text = unit.repeat(100_000 / unit.len());
        for model in [&SMOLLM2, &GEMMA3] {
            let ids = model.text.encode(&text, Encode::default()).unwrap();
            assert_eq!(model.text.decode(&ids, false), text, "{unit:?}");
        }
    }
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

mod streaming {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Any ids at all, half of them single bytes, so that characters break in every way.
        #[test]
        fn pieces_add_up_to_the_whole(
            ids in proptest::collection::vec(prop_oneof![0..300_u32, 0..49_200_u32], 0..40),
            skip_special: bool,
        ) {
            let text = &SMOLLM2.text;
            let mut decoder = text.decoder(skip_special);
            let mut streamed: String = ids.iter().map(|id| decoder.push(*id)).collect();
            streamed.push_str(&decoder.finish());
            prop_assert_eq!(streamed, text.decode(&ids, skip_special));
        }

        /// Whatever the text, its plain tokens spell it.
        #[test]
        fn encoding_loses_nothing(text in any::<String>()) {
            for model in [&SMOLLM2, &GEMMA3] {
                let ids = model.text.encode(&text, Encode::default()).unwrap();
                prop_assert_eq!(&model.text.decode(&ids, false), &text);
            }
        }
    }
}
