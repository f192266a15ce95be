//! The simulator by itself, as `cargo xtask sim` runs it: `baton sim` without the servers.

use std::process::ExitCode;

use clap::Parser;
use planner::cli::SimArgs;

#[derive(Parser)]
#[command(name = "cargo xtask sim", about = "Simulate a cluster: placements and pools side by side")]
struct Cli {
    #[command(flatten)]
    args: SimArgs,
}

fn main() -> ExitCode {
    match Cli::parse().args.run() {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("sim: {error}");
            ExitCode::from(2)
        }
    }
}
