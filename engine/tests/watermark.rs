//! The watermark in 200 tokens of a real model: found with its key, and neither with another key nor without a
//! watermark.
//!
//! Needs the default model: `cargo xtask fetch-model`.

use std::collections::BTreeMap;
use std::path::Path;

use checkpoint::Checkpoint;
use engine::backend::cpu::{self, CpuOptions};
use engine::watermark::detect;
use engine::{Engine, EngineConfig, EngineEvent, SequenceSpec, Until};
use proto::{SamplingParams, StopConditions, TokenId, Watermark};

const KEY: u64 = 15_485_863;
const GAMMA: f32 = 0.25;

#[test]
fn two_hundred_tokens_of_a_real_model_tell() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models/SmolLM2-135M-Instruct.gguf");
    let checkpoint =
        Checkpoint::open(&path).expect("the default model, which `cargo xtask fetch-model` puts there");
    let model = cpu::load(&checkpoint, CpuOptions { threads: 2, on_thread_start: None }).unwrap();
    let mut engine = Engine::new(model, EngineConfig::default()).unwrap();
    // "Once upon a time, there was", and its last token.
    let prompt: Vec<TokenId> = vec![6403, 2816, 253, 655, 28, 665, 436];
    let mark = |delta| Some(Watermark { key: KEY, gamma: GAMMA, delta });
    let cases = [(mark(2.0), 1.0), (None, 1.0), (mark(4.0), 0.0)];
    let ids: Vec<_> = cases
        .iter()
        .map(|&(watermark, temperature)| {
            let sampling = SamplingParams { temperature, seed: 7, watermark, ..SamplingParams::default() };
            let stop = StopConditions { max_tokens: 200, ..StopConditions::default() };
            let spec =
                SequenceSpec { tokens: prompt.clone(), generated: 0, sampling, stop, until: Until::Finished };
            engine.submit(spec).unwrap()
        })
        .collect();
    let mut texts: BTreeMap<_, Vec<TokenId>> = BTreeMap::new();
    while engine.has_work() {
        for event in engine.step().events {
            if let EngineEvent::Token { id, token, .. } = event {
                texts.entry(id).or_insert_with(|| vec![*prompt.last().unwrap()]).push(token);
            }
        }
    }
    let z = |case: usize, key| detect(key, GAMMA, &texts[&ids[case]]).z;
    let [sampled, plain, greedy] = [0, 1, 2].map(|case| z(case, KEY));
    println!("sampled {sampled:.1}, plain {plain:.1}, greedy {greedy:.1}");
    assert_eq!(texts[&ids[0]].len(), 201);
    assert!(sampled > 4.0 && greedy > 4.0);
    assert!(plain.abs() < 3.0);
    for other in [KEY + 1, 0, 42] {
        assert!((0..3).all(|case| z(case, other).abs() < 3.0), "key {other}");
    }
}
