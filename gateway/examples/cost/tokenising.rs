//! What of a request's cost is its prompt's way into tokens, measured in this process on one thread.

use std::hint::black_box;
use std::time::Duration;

use anyhow::Result;
use checkpoint::{Encode, TokenizerBundle};
use serde_json::json;

/// Times that each is done.
const ROUNDS: usize = 300;

/// CPU time of one prompt.
pub(crate) struct Tokenising {
    /// Tokens of the rendered chat.
    pub(crate) tokens: usize,
    /// The chat template.
    pub(crate) rendering: Duration,
    /// Text to tokens.
    pub(crate) encoding: Duration,
}

impl Tokenising {
    pub(crate) fn total(&self) -> Duration {
        self.rendering + self.encoding
    }
}

/// A prompt of so many tokens of the simulated model, for which a byte is a token. Each number has another.
pub(crate) fn prompt(tokens: usize, number: usize) -> String {
    let text =
        format!("{number}: ") + &"the quick brown fox jumps over the lazy dog; ".repeat(tokens / 45 + 1);
    text[..tokens].to_owned()
}

/// Does what admission does, many times.
pub(crate) fn measure(tokens: usize) -> Result<Tokenising> {
    let text = TokenizerBundle::simulated(4096).open()?;
    let chat = |number| json!([{"role": "user", "content": prompt(tokens, number)}]);
    let extra = json!({"add_generation_prompt": true});
    let chats: Vec<_> = (0..ROUNDS).map(chat).collect();

    let started = thread_cpu();
    let rendered =
        chats.iter().map(|chat| text.render_chat(chat, &extra)).collect::<Result<Vec<String>, _>>()?;
    let between = thread_cpu();
    let mut count = 0;
    for text_of_chat in &rendered {
        count = black_box(text.encode(text_of_chat, Encode { add_bos: false, parse_special: true })?).len();
    }
    let ended = thread_cpu();
    Ok(Tokenising {
        tokens: count,
        rendering: between.checked_sub(started).expect("CPU time only grows") / ROUNDS as u32,
        encoding: ended.checked_sub(between).expect("CPU time only grows") / ROUNDS as u32,
    })
}

fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
