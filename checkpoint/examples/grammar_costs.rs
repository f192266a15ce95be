//! What grammars cost: `cargo run --release -p checkpoint --example grammar_costs -- MODEL.gguf SCHEMAS.json`.
//!
//! Builds the model's vocabulary, compiles every schema of the file (an array of objects with a `schema` each), and
//! follows outputs of each that chance chooses, with the time of one core for every part.

use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use checkpoint::grammar::{GrammarEnv, Mask};
use proto::Grammar;
use serde_json::Value;

/// Outputs followed of each schema, and most tokens of one.
const WALKS: usize = 8;
const TOKENS_MAX: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, schemas] = &arguments[..] else { return Err("MODEL.gguf SCHEMAS.json expected".into()) };
    let bundle = Checkpoint::open(model.as_ref())?.bundle()?;
    let start = Instant::now();
    let env = GrammarEnv::of_bundle(&bundle)?;
    println!("vocabulary of {} tokens  {:>10.1?}", env.vocab_size(), start.elapsed());

    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(schemas)?)?;
    let (mut compiles, mut clones, mut masks) = (Vec::new(), Vec::new(), Vec::new());
    let mut random = 1_u64;
    for case in &cases {
        let grammar = Grammar::JsonSchema(case["schema"].to_string().into());
        let start = Instant::now();
        let compiled = env.compile(&grammar)?;
        compiles.push(start.elapsed());
        for _ in 0..WALKS {
            let start = Instant::now();
            let mut matcher = compiled.matcher();
            clones.push(start.elapsed());
            let mut mask = Mask::default();
            for _ in 0..TOKENS_MAX {
                let start = Instant::now();
                matcher.allowed(&mut mask)?;
                masks.push(start.elapsed());
                random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
                let allowed: Vec<_> = mask.iter().collect();
                matcher.accept(allowed[(random >> 33) as usize % allowed.len()])?;
                if matcher.is_stopped() {
                    break;
                }
            }
        }
    }
    println!("{} schemas                   p50         p99        most", cases.len());
    print("compile", &mut compiles);
    print("begin to follow", &mut clones);
    print("mask of a token", &mut masks);
    Ok(())
}

fn print(what: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100];
    println!("{what:<20} {:>11.1?} {:>11.1?} {:>11.1?}", at(50), at(99), at(100));
}
