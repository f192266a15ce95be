//! The `baton` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    baton::run(std::env::args_os())
}
