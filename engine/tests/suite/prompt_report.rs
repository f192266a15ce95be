//! What the first token tells of the prompt.

use engine::batch::Logits;
use engine::model::conformance::{Rows, Sequence, batch};
use engine::model::{Interrupt, Model};
use engine::sim::{SimConfig, SimModel};
use engine::{EngineConfig, EngineEvent, SequenceSpec, Until};
use proto::{PromptReport, TokenId};

use crate::drive::{config, engine, hand_over, prompt, reference, run, seeded, spec};
use crate::faulty::{Fault, faulty};

fn with_report(mut spec: SequenceSpec, count: u32) -> SequenceSpec {
    spec.sampling.prompt_logprobs = Some(count);
    spec
}

/// Log-probabilities of all tokens after each position, by the textbook, from logits of one pass.
fn distributions(tokens: &[TokenId]) -> Vec<Vec<f64>> {
    let mut model = SimModel::new(SimConfig::default());
    let mut kv = model.new_kv(1, tokens.len()).unwrap();
    let part = Sequence { tokens, table: &[0] }.part(0, tokens.len(), Rows::All);
    let mut logits = Logits::default();
    model.forward(&batch(&[part], tokens.len()), &mut kv, &Interrupt::default(), &mut logits).unwrap();
    (0..tokens.len())
        .map(|row| {
            let row: Vec<f64> = logits.row(row).iter().map(|&logit| f64::from(logit)).collect();
            let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
            row.iter().map(|logit| logit - sum.ln()).collect()
        })
        .collect()
}

/// The report is that of the prompt `tokens`, with `count` alternatives.
#[track_caller]
fn check(report: &PromptReport, tokens: &[TokenId], count: usize) {
    assert_eq!(report.logprobs.len(), tokens.len() - 1);
    for ((of, token), expected) in report.logprobs.iter().zip(&tokens[1..]).zip(distributions(tokens)) {
        assert_eq!(of.token.id, *token);
        assert!((f64::from(of.token.logprob) - expected[*token as usize]).abs() < 1e-5);
        let mut ids: Vec<_> = (0..expected.len()).collect();
        ids.sort_by(|&a, &b| expected[b].total_cmp(&expected[a]).then(a.cmp(&b)));
        assert_eq!(of.top.len(), count);
        for (entry, id) in of.top.iter().zip(ids) {
            assert_eq!(entry.id as usize, id);
            assert!((f64::from(entry.logprob) - expected[id]).abs() < 1e-5);
        }
    }
}

#[test]
fn every_token_of_the_prompt_is_reported_however_it_is_cut() {
    for (step_tokens, len, count) in [(1, 9, 2), (4, 1, 2), (5, 2, 0), (16, 40, 5), (512, 200, 20)] {
        let mut engine = engine(EngineConfig { step_tokens, ..config() });
        let spec = with_report(seeded(prompt(1, len), 5, 3), count);
        let id = engine.submit(spec.clone()).unwrap();
        // Others in the same steps have rows of their own.
        let other = engine.submit(with_report(crate::drive::spec(prompt(2, 30), 4), 1)).unwrap();
        let outcome = run(&mut engine);
        check(&outcome.prompts[&id], &spec.tokens, count as usize);
        check(&outcome.prompts[&other], &prompt(2, 30), 1);
        assert_eq!(outcome.tokens[&id], reference(&spec));
    }
}

#[test]
fn logits_of_a_step_are_bounded() {
    let mut engine = engine(EngineConfig { step_tokens: 512, ..config() });
    engine.submit(with_report(spec(prompt(1, 150), 1), 1)).unwrap();
    engine.submit(with_report(spec(prompt(2, 20), 1), 1)).unwrap();
    engine.submit(spec(prompt(3, 60), 1)).unwrap();
    let sizes: Vec<_> =
        std::iter::from_fn(|| engine.has_work().then(|| engine.step().batch_tokens)).collect();
    // 64 rows of prompts in a step; the last token's logits are wanted anyway.
    assert_eq!(sizes, [64 + 60, 64, 22 + 20]);
}

#[test]
fn nothing_is_taken_over_that_has_to_be_told() {
    let mut engine = engine(config());
    let spec = spec(prompt(1, 30), 4);
    for asks in [false, true, true, false] {
        let spec = if asks { with_report(spec.clone(), 2) } else { spec.clone() };
        let known = engine.cached_tokens(&spec.tokens);
        let id = engine.submit(spec.clone()).unwrap();
        let outcome = run(&mut engine);
        let report = &outcome.prompts[&id];
        if asks {
            check(report, &spec.tokens, 2);
            assert_eq!((report.cached_tokens, outcome.cached[&id]), (0, 0));
        } else {
            assert!(report.logprobs.is_empty());
            assert_eq!((report.cached_tokens, outcome.cached[&id]), (known, known));
        }
    }
}

#[test]
fn a_report_outlives_preemption_and_comes_once() {
    let mut engine = engine(EngineConfig { kv_blocks: 12, step_tokens: 6, ..config() });
    let specs: Vec<_> = (0..6).map(|i| with_report(seeded(prompt(i, 14), 25, 3), 3)).collect();
    let ids: Vec<_> = specs.iter().map(|spec| engine.submit(spec.clone()).unwrap()).collect();
    let outcome = run(&mut engine);
    assert!(outcome.preempted_max > 0);
    for (id, spec) in ids.iter().zip(&specs) {
        check(&outcome.prompts[id], &spec.tokens, 3);
        assert_eq!(outcome.tokens[id], reference(spec));
    }
}

#[test]
fn the_report_is_of_the_prompt_alone_when_tokens_were_generated_before() {
    let whole = with_report(seeded(prompt(3, 10), 12, 7), 2);
    let expected = reference(&whole);
    for generated in [1, 5, 9] {
        let tokens = [&whole.tokens[..], &expected[..generated]].concat();
        let mut engine = engine(EngineConfig { step_tokens: 3, ..config() });
        let id = engine.submit(SequenceSpec { tokens, generated, ..whole.clone() }).unwrap();
        let outcome = run(&mut engine);
        check(&outcome.prompts[&id], &whole.tokens, 2);
        assert_eq!(outcome.tokens[&id], expected[generated..]);
    }
}

#[test]
fn the_prefill_side_reports_and_the_decode_side_does_not() {
    let (mut from, mut to) = (engine(config()), engine(config()));
    let spec = with_report(seeded(prompt(3, 18), 6, 7), 2);
    to.submit(SequenceSpec { stop: crate::drive::spec(vec![], 1).stop, ..spec.clone() }).unwrap();
    run(&mut to);
    let held = from.submit(SequenceSpec { until: Until::FirstToken, ..spec.clone() }).unwrap();
    let outcome = run(&mut from);
    check(&outcome.prompts[&held], &spec.tokens, 2);
    let reservation = to.reserve(spec.clone()).unwrap();
    assert_eq!(reservation.skip, 16, "what is told elsewhere can be taken over here");
    hand_over((&from, held), (&mut to, reservation), &spec.tokens, outcome.tokens[&held][0]).unwrap();
    let outcome = run(&mut to);
    assert!(outcome.prompts.is_empty());
    assert_eq!(outcome.tokens[&reservation.id], reference(&spec)[1..]);
}

#[test]
fn logits_that_are_no_numbers_are_no_log_probabilities() {
    let mut engine = faulty(Fault::NotANumber, 0);
    let id = engine.submit(with_report(spec(prompt(1, 40), 4), 2)).unwrap();
    let outcome = run(&mut engine);
    assert_eq!(
        outcome.failed[&id].to_string(),
        "sampling position 16: the logit of token 255 is NaN (INTERNAL)"
    );
    assert_eq!(engine.kv_counts().used, 0);
}

#[test]
fn rules_that_leave_no_token_fail_their_sequence_and_no_other() {
    let mut engine = engine(config());
    let other = spec(prompt(1, 10), 6);
    let good = engine.submit(other.clone()).unwrap();
    let mut strict = spec(prompt(0, 10), 6);
    strict.sampling.allowed_token_ids = vec![7, 8];
    strict.sampling.bad_words = vec![vec![7, 8], vec![7, 7], vec![8]];
    let bad = engine.submit(strict).unwrap();
    let outcome = run(&mut engine);
    assert_eq!(outcome.tokens[&bad], [7]);
    expect_test::expect![[
        r"sampling: token 1 of the output: allowed_token_ids, bad_words, min_tokens and grammar together leave no token to choose (INVALID_ARGUMENT)"
    ]]
    .assert_eq(&outcome.failed[&bad].to_string());
    assert_eq!(outcome.tokens[&good], reference(&other));
    assert_eq!(engine.cached_tokens(&prompt(0, 10)), 8, "what it computed is right all the same");
}

#[test]
fn alternatives_come_with_every_token_in_both_placements() {
    let mut spec = seeded(prompt(3, 18), 6, 7);
    spec.sampling.logprobs = Some(3);
    let mut fused = engine(config());
    fused.submit(spec.clone()).unwrap();
    let collect = |engine: &mut engine::Engine<SimModel>| {
        let mut tops = Vec::new();
        while engine.has_work() {
            for event in engine.step().events {
                if let EngineEvent::Token { token, logprob, top, .. } = event {
                    assert!(top.len() == 3 && top[0].logprob >= logprob);
                    assert!(top.iter().all(|entry| entry.id != token || entry.logprob == logprob));
                    tops.push((token, top));
                }
            }
        }
        tops
    };
    let expected = collect(&mut fused);
    assert_eq!(expected.len(), 6);
    let (mut from, mut to) = (engine(config()), engine(config()));
    let held = from.submit(SequenceSpec { until: Until::FirstToken, ..spec.clone() }).unwrap();
    let mut split = collect(&mut from);
    let reservation = to.reserve(spec.clone()).unwrap();
    hand_over((&from, held), (&mut to, reservation), &spec.tokens, split[0].0).unwrap();
    split.extend(collect(&mut to));
    assert_eq!(split, expected);
}
