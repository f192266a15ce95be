//! The `baton` command.

use std::process::ExitCode;

/// A token of a stream is a dozen small allocations that live for microseconds, which is what this allocator is made for.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    baton::run(std::env::args_os())
}
