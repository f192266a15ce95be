//! Sampling against hand-computed values, sets of filters, and frequencies.

use proto::{SamplingParams, TokenId};

use super::*;

fn history(tokens: &[TokenId], generated: usize) -> History<'_> {
    History { tokens, generated, position: tokens.len() }
}

fn warm() -> SamplingParams {
    SamplingParams { temperature: 1.0, seed: 11, ..SamplingParams::default() }
}

fn logits_of(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

/// How often each token comes in 20,000 draws at different positions.
fn frequencies(logits: &[f32], sampling: &SamplingParams) -> Vec<f64> {
    let mut sampler = Sampler::new(logits.len());
    let mut counts = vec![0.0; logits.len()];
    for position in 0..20_000 {
        let history = History { tokens: &[0], generated: 0, position };
        counts[sampler.choose(logits, history, sampling).unwrap().token as usize] += 1.0;
    }
    counts
}

#[track_caller]
fn check_frequencies(logits: &[f32], sampling: &SamplingParams, probabilities: &[f64]) {
    let counts = frequencies(logits, sampling);
    let mut chi_square = 0.0;
    for (count, p) in counts.iter().zip(probabilities) {
        if *p == 0.0 {
            assert_eq!(*count, 0.0, "a filtered token came");
        } else {
            chi_square += (count - 20_000.0 * p).powi(2) / (20_000.0 * p);
        }
    }
    // 99.9 % of 3 degrees of freedom; fewer have a lower bound.
    assert!(chi_square < 16.3, "chi square {chi_square} of {counts:?}");
}

/// The ids that the filters leave.
fn kept(logits: &[f32], sampling: &SamplingParams) -> Vec<TokenId> {
    let mut sampler = Sampler::new(logits.len());
    sampler.scores = logits.iter().map(|&logit| f64::from(logit)).collect();
    sampler.filter(sampling);
    sampler.kept
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let mut sampler = Sampler::new(5);
    let choice = sampler.choose(&[1.0, 3.0, -2.0, 3.0, 3.0], history(&[0], 0), &SamplingParams::default());
    assert_eq!(choice.unwrap().token, 1);
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let logits = logits_of(&[0.5, 0.25, 0.125, 0.125]);
    let sampling = SamplingParams { repetition_penalty: 100.0, top_k: Some(1), ..warm() };
    let mut sampler = Sampler::new(4);
    // Logits are negative here, so the penalty makes the seen token 0 the least likely.
    let choice = sampler.choose(&logits, history(&[0], 0), &sampling).unwrap();
    assert_eq!(choice.token, 1);
    assert!((choice.logprob - 0.25f32.ln()).abs() < 1e-6);
}

#[test]
fn draws_follow_the_probabilities() {
    let probabilities = [0.5, 0.3, 0.15, 0.05];
    let logits = logits_of(&[0.5, 0.3, 0.15, 0.05]);
    check_frequencies(&logits, &warm(), &probabilities);
    // At temperature 0.5 probabilities are squared and scaled.
    let squares = probabilities.map(|p: f64| p * p / 0.365);
    check_frequencies(&logits, &SamplingParams { temperature: 0.5, ..warm() }, &squares);
    check_frequencies(&logits, &SamplingParams { top_k: Some(2), ..warm() }, &[0.625, 0.375, 0.0, 0.0]);
    check_frequencies(&logits, &SamplingParams { top_p: 0.7, ..warm() }, &[0.625, 0.375, 0.0, 0.0]);
}

#[test]
fn top_k_keeps_the_likeliest_and_the_lowest_of_equals() {
    let logits = [1.0, 2.0, 5.0, 2.0, 2.0];
    let of = |k| kept(&logits, &SamplingParams { top_k: Some(k), ..warm() });
    assert_eq!(of(1), [2]);
    assert_eq!(of(2), [1, 2]);
    assert_eq!(of(3), [1, 2, 3]);
    assert_eq!(of(5), [0, 1, 2, 3, 4]);
    assert_eq!(of(9), [0, 1, 2, 3, 4]);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_it() {
    let logits = logits_of(&[0.1, 0.4, 0.3, 0.2]);
    let of = |p| kept(&logits, &SamplingParams { top_p: p, ..warm() });
    assert_eq!(of(1e-9), [1]);
    assert_eq!(of(0.39), [1]);
    assert_eq!(of(0.41), [1, 2]);
    assert_eq!(of(0.69), [1, 2]);
    assert_eq!(of(0.71), [1, 2, 3]);
    assert_eq!(of(0.91), [0, 1, 2, 3]);
    // After top-k, shares are of what top-k left: 0.4 and 0.3 of 0.7.
    assert_eq!(kept(&logits, &SamplingParams { top_k: Some(2), top_p: 0.5, ..warm() }), [1]);
}

#[test]
fn top_p_over_a_flat_vocabulary_keeps_the_lowest_ids() {
    let logits = vec![0.0; 5000];
    for (p, len) in [(0.01, 50), (0.3, 1500), (0.9, 4500)] {
        // Half a token off, so that rounding cannot decide.
        let sampling = SamplingParams { top_p: p - 0.0001, ..warm() };
        let expected: Vec<_> = (0..len).collect();
        assert_eq!(kept(&logits, &sampling), expected);
    }
}

#[test]
fn penalties_are_those_computed_by_hand() {
    let mut sampler = Sampler::new(5);
    let sampling = SamplingParams {
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..SamplingParams::default()
    };
    // Prompt 0 1 1, output 2 1 2: token 1 once in the output, token 2 twice.
    for _ in 0..2 {
        sampler.scores = vec![4.0, -4.0, 4.0, 4.0, -4.0];
        sampler.penalise(history(&[0, 1, 1, 2, 1, 2], 3), &sampling);
        assert_eq!(sampler.scores, [2.0, -8.0 - 0.75, 2.0 - 1.0, 4.0, -4.0]);
        assert!(sampler.seen.iter().all(|seen| !seen.anywhere && seen.in_output == 0), "ready for the next");
    }
}

#[test]
fn choices_depend_on_seed_and_position_alone() {
    let logits: Vec<f32> = (0..100).map(|i| ((i * 37) % 100) as f32 / 30.0).collect();
    let choose = |sampler: &mut Sampler, seed, position| {
        let history = History { tokens: &[0], generated: 0, position };
        sampler.choose(&logits, history, &SamplingParams { seed, ..warm() }).unwrap().token
    };
    let (mut used, mut seeds_differ, mut positions_differ) = (Sampler::new(100), 0, 0);
    for position in 0..50 {
        let token = choose(&mut used, 1, position);
        assert_eq!(token, choose(&mut Sampler::new(100), 1, position));
        seeds_differ += u32::from(token != choose(&mut used, 2, position));
        positions_differ += u32::from(token != choose(&mut used, 1, position + 1));
    }
    assert!(seeds_differ > 30 && positions_differ > 30);
}

#[test]
fn extreme_parameters_still_choose() {
    let mut sampler = Sampler::new(3);
    let logits = [f32::MAX, f32::MIN, 1.0];
    for temperature in [1e-45, 1.0, f32::MAX] {
        for repetition_penalty in [f32::MIN_POSITIVE, f32::MAX] {
            for top_p in [f32::MIN_POSITIVE, 0.5, 1.0] {
                let sampling =
                    SamplingParams { temperature, repetition_penalty, top_p, top_k: Some(3), ..warm() };
                let choice = sampler.choose(&logits, history(&[0, 1, 2], 1), &sampling).unwrap();
                assert!(choice.token < 3);
            }
        }
    }
}

#[test]
fn logits_that_are_not_finite_are_named() {
    let mut sampler = Sampler::new(3);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = sampler.choose(&[0.0, bad, 1.0], history(&[0], 0), &warm()).unwrap_err();
        assert_eq!(error.to_string(), format!("the logit of token 1 is {bad}"));
    }
}
