//! A tokenizer whose token ids are bytes, so that a test can say "tokens" and mean text.

use checkpoint::testing::GgufWriter;
use checkpoint::{Checkpoint, TokenizerBundle};

/// Ends a turn of a chat, and the generation.
pub(crate) const END: u32 = 257;
/// Tokens in all.
pub(crate) const VOCAB: usize = 261;

/// A template that knows of roles and contents alone.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Ids 0 to 255 are bytes.
pub(crate) fn byte_bundle() -> TokenizerBundle {
    byte_bundle_with(TEMPLATE, &[])
}

/// The same with another chat template, and with special tokens after all others.
pub(crate) fn byte_bundle_with(template: &str, special: &[&str]) -> TokenizerBundle {
    let mut tokens: Vec<String> = printable_bytes().into_iter().map(String::from).collect();
    tokens.extend(["<|im_start|>", "<|im_end|>", "ABC", "DEF", "GH"].map(ToOwned::to_owned));
    let mut kinds = vec![1; VOCAB];
    kinds[256..=END as usize].fill(3);
    tokens.extend(special.iter().map(ToString::to_string));
    kinds.resize(tokens.len(), 3);
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    GgufWriter::new()
        .string("general.architecture", "llama")
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "gpt-2")
        .strings("tokenizer.ggml.tokens", &tokens)
        .strings::<&str>("tokenizer.ggml.merges", &[])
        .i32s("tokenizer.ggml.token_type", &kinds)
        .u32("tokenizer.ggml.eos_token_id", END)
        .string("tokenizer.chat_template", template)
        .write(file.path());
    Checkpoint::open(file.path()).and_then(|checkpoint| checkpoint.bundle()).expect("a well-formed file")
}

/// The character that stands for each byte in a byte-level vocabulary.
fn printable_bytes() -> Vec<char> {
    let shown = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = (256..).filter_map(char::from_u32);
    (0..=255)
        .map(|byte| if shown(byte) { char::from(byte) } else { others.next().expect("a character") })
        .collect()
}
