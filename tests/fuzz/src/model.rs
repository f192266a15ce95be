//! Small models whose token ids are mostly bytes, so that any ids are some text.

use std::sync::{Arc, OnceLock};

use checkpoint::testing::GgufWriter;
use checkpoint::{Checkpoint, TokenizerBundle};
use gateway::models::{Model, token_bytes_max};
use proto::{Digest, ModelDescription};

/// Tokens that a context holds.
pub(crate) const CONTEXT_LEN: usize = 256;

/// Tokens beyond the 256 bytes: two special, the rest text, with borders in the middle of characters.
const MORE: [&str; 8] = ["<|im_start|>", "<|im_end|>", "ABC", "DEF", "GH", "ðŁ", "ł©", "Ġthe"];

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The model that serves in every target.
pub(crate) fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let bundle = byte_level();
        let text = Arc::new(bundle.open().expect("a sound bundle"));
        let description = ModelDescription {
            name: "m".to_owned(),
            fingerprint: Digest([7; 32]),
            tokenizer: bundle.digest(),
            context_len: CONTEXT_LEN,
            vocab_size: bundle.vocab_size(),
            numerics: "fuzz".to_owned(),
        };
        let grammars = checkpoint::grammar::GrammarEnv::of_bundle(&bundle).ok().map(Arc::new);
        Arc::new(Model { description, token_bytes_max: token_bytes_max(&text), text, grammars })
    })
}

/// A tokenizer over bytes, as GPT-2's family has them.
pub(crate) fn byte_level() -> TokenizerBundle {
    let mut tokens: Vec<String> = printable_bytes().into_iter().map(String::from).collect();
    tokens.extend(MORE.map(ToOwned::to_owned));
    let mut kinds = vec![1; tokens.len()];
    kinds[256..258].fill(3);
    bundle(
        &GgufWriter::new()
            .string("general.architecture", "llama")
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", "gpt-2")
            .strings("tokenizer.ggml.tokens", &tokens)
            .strings::<&str>("tokenizer.ggml.merges", &[])
            .i32s("tokenizer.ggml.token_type", &kinds)
            .u32("tokenizer.ggml.eos_token_id", 257)
            .string("tokenizer.chat_template", TEMPLATE),
    )
}

/// A tokenizer over characters with a token for each byte, as SentencePiece makes them.
pub(crate) fn sentence_piece() -> TokenizerBundle {
    let mut tokens: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
    tokens.extend(
        ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "ab", "\u{2581}a", "é", "🦜"].map(ToOwned::to_owned),
    );
    let mut kinds = vec![1; tokens.len()];
    kinds[..256].fill(6);
    kinds[256] = 2;
    kinds[257..259].fill(3);
    let scores: Vec<f32> = (0..tokens.len()).map(|id| -(id as f32)).collect();
    bundle(
        &GgufWriter::new()
            .string("general.architecture", "llama")
            .string("tokenizer.ggml.model", "llama")
            .strings("tokenizer.ggml.tokens", &tokens)
            .f32s("tokenizer.ggml.scores", &scores)
            .i32s("tokenizer.ggml.token_type", &kinds)
            .u32("tokenizer.ggml.unknown_token_id", 256)
            .u32("tokenizer.ggml.bos_token_id", 257)
            .u32("tokenizer.ggml.eos_token_id", 258),
    )
}

fn bundle(file: &GgufWriter) -> TokenizerBundle {
    open(&file.to_bytes()).and_then(|checkpoint| checkpoint.bundle()).expect("a sound file")
}

/// Opens bytes as a model file, by way of a file that has no name and leaves nothing behind.
pub(crate) fn open(bytes: &[u8]) -> Result<Checkpoint, checkpoint::Error> {
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;

    let fd = rustix::fs::memfd_create("model", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    let mut file = std::fs::File::from(fd);
    file.write_all(bytes).expect("memory");
    Checkpoint::open(std::path::Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))
}

/// The character that stands for each byte in a byte-level vocabulary.
fn printable_bytes() -> Vec<char> {
    let shown = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = (256..).filter_map(char::from_u32);
    (0..=255)
        .map(|byte| if shown(byte) { char::from(byte) } else { others.next().expect("a character") })
        .collect()
}
