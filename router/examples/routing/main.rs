//! What a router costs: the time to choose workers where a thousand have a million blocks, and what an idle router takes
//! that a thousand workers talk to. `cargo xtask bench routing`.
//!
//! The second part runs as processes of its own: this program again, as the workers and as the router.

mod decisions;
mod idle;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        [] => {
            decisions::run();
            idle::run()
        }
        ["workers", count] => idle::workers(count),
        ["router", members] => idle::router(members),
        _ => Err("usage: routing [workers COUNT | router FILE]".to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
