//! What tests that run themselves, rather than in Rust's harness, take from their command line.

/// True when nobody asked for other tests: `cargo test NAME` names what it wants to every test, and `--list` wants none.
pub fn is_asked_for(name: &str) -> bool {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut wanted = words.iter().filter(|word| !word.starts_with('-')).peekable();
    !words.iter().any(|word| word == "--list")
        && (wanted.peek().is_none() || wanted.any(|word| name.contains(word.as_str())))
}
