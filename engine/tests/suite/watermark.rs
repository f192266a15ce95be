//! The watermark in tokens of the simulated model.

use engine::watermark::detect;
use engine::{EngineConfig, SequenceSpec};
use proto::{SamplingParams, TokenId, Watermark};

use crate::drive::{config, engine, prompt, run, seeded};

fn text(watermark: Option<Watermark>, seed: u64) -> Vec<TokenId> {
    let plain = seeded(prompt(1, 5), 200, seed);
    let sampling = SamplingParams { watermark, top_k: None, top_p: 1.0, temperature: 1.0, ..plain.sampling };
    let spec = SequenceSpec { sampling, ..plain };
    let mut engine = engine(EngineConfig { kv_blocks: 128, ..config() });
    let id = engine.submit(spec.clone()).unwrap();
    [&spec.tokens[4..], &run(&mut engine).tokens[&id]].concat()
}

#[test]
fn two_hundred_tokens_tell_with_the_key_alone() {
    for (seed, gamma) in [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.1)] {
        let watermark = Watermark { key: 1_000_000_007 * seed, gamma, delta: 2.0 };
        let marked = text(Some(watermark), seed);
        assert_eq!(marked.len(), 201);
        let found = detect(watermark.key, gamma, &marked);
        assert!(found.z > 4.0, "{found:?}");
        let other_key = detect(watermark.key + 1, gamma, &marked);
        assert!(other_key.z.abs() < 3.0, "{other_key:?}");
        let plain = detect(watermark.key, gamma, &text(None, seed));
        assert!(plain.z.abs() < 3.0, "{plain:?}");
    }
}
