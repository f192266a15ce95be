//! Sampling against hand-computed values, sets of filters, and frequencies.

use proto::Watermark;

use super::*;
use crate::watermark::GreenList;

static NO_STOP: StopConditions =
    StopConditions { max_tokens: 1000, eos_ids: Vec::new(), stop_token_ids: Vec::new(), min_tokens: 0 };

/// By sampling parameters alone.
fn by(sampling: &SamplingParams) -> Rules<'_> {
    Rules { sampling, stop: &NO_STOP, allowed: None }
}

fn greedy() -> SamplingParams {
    SamplingParams::default()
}

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
        counts[sampler.choose(logits, history, by(sampling)).unwrap().token as usize] += 1.0;
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
    sampler.adjust(logits, history(&[0], 0), by(sampling));
    sampler.filter(first_maximum(&sampler.scores), sampling);
    sampler.kept
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let mut sampler = Sampler::new(5);
    let choice = sampler.choose(&[1.0, 3.0, -2.0, 3.0, 3.0], history(&[0], 0), by(&greedy()));
    assert_eq!(choice.unwrap().token, 1);
    // Whatever the filters would keep: this one the others, which surprise as much as is expected.
    let filtered = SamplingParams { typical_p: 1e-6, top_k: Some(1), ..greedy() };
    let logits = logits_of(&[0.4, 0.3, 0.3]);
    assert_eq!(kept(&logits, &SamplingParams { typical_p: 1e-6, ..warm() }), [1]);
    assert_eq!(Sampler::new(3).choose(&logits, history(&[0], 0), by(&filtered)).unwrap().token, 0);
    // Over several vectors, the last of them partial.
    for at in [0, 15, 16, 31, 32, 36] {
        let mut logits = vec![-0.5; 37];
        logits[at] = 0.5;
        *logits.last_mut().unwrap() = 0.5;
        let choice = Sampler::new(37).choose(&logits, history(&[0], 0), by(&greedy()));
        assert_eq!(choice.unwrap().token, at as TokenId);
    }
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let logits = logits_of(&[0.5, 0.25, 0.125, 0.125]);
    let sampling = SamplingParams { repetition_penalty: 100.0, top_k: Some(1), ..warm() };
    let mut sampler = Sampler::new(4);
    // Logits are negative here, so the penalty makes the seen token 0 the least likely.
    let choice = sampler.choose(&logits, history(&[0], 0), by(&sampling)).unwrap();
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
        assert!(sampler.seen.iter().all(|seen| *seen == Seen::default()), "ready for the next");
    }
}

#[test]
fn choices_depend_on_seed_sequence_and_position_alone() {
    let logits: Vec<f32> = (0..100).map(|i| ((i * 37) % 100) as f32 / 30.0).collect();
    let choose = |sampler: &mut Sampler, (seed, sequence), position| {
        let history = History { tokens: &[0], generated: 0, position };
        let sampling = SamplingParams { seed, sequence, ..warm() };
        sampler.choose(&logits, history, by(&sampling)).unwrap().token
    };
    let (mut used, mut differ) = (Sampler::new(100), [0; 3]);
    for position in 0..50 {
        let token = choose(&mut used, (1, 0), position);
        assert_eq!(token, choose(&mut Sampler::new(100), (1, 0), position));
        let others = [((2, 0), position), ((1, 1), position), ((1, 0), position + 1)];
        for (count, (sequence, position)) in differ.iter_mut().zip(others) {
            *count += u32::from(token != choose(&mut used, sequence, position));
        }
    }
    assert!(differ.iter().all(|&count| count > 30), "{differ:?}");
}

#[test]
fn extreme_parameters_still_choose() {
    let mut sampler = Sampler::new(3);
    let logits = [f32::MAX, f32::MIN, 1.0];
    for temperature in [1e-45, 1.0, f32::MAX] {
        for repetition_penalty in [f32::MIN_POSITIVE, f32::MAX] {
            for share in [f32::MIN_POSITIVE, 0.5, 1.0] {
                let sampling = SamplingParams {
                    temperature,
                    repetition_penalty,
                    top_p: share,
                    typical_p: share,
                    min_p: share,
                    top_k: Some(3),
                    logit_bias: vec![(0, f32::MAX), (1, f32::MIN)],
                    ..warm()
                };
                let choice = sampler.choose(&logits, history(&[0, 1, 2], 1), by(&sampling)).unwrap();
                assert!(choice.token < 3);
            }
        }
    }
}

#[test]
fn logits_that_are_not_finite_are_named() {
    let mut sampler = Sampler::new(3);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = sampler.choose(&[0.0, bad, 1.0], history(&[0], 0), by(&warm())).unwrap_err();
        assert_eq!(error.to_string(), format!("the logit of token 1 is {bad}"));
    }
}

#[test]
fn min_p_keeps_what_is_likely_enough_beside_the_likeliest() {
    let logits = logits_of(&[0.1, 0.4, 0.3, 0.2]);
    let of = |min_p| kept(&logits, &SamplingParams { min_p, ..warm() });
    assert_eq!(of(0.0), [0, 1, 2, 3]);
    assert_eq!(of(0.24), [0, 1, 2, 3]);
    assert_eq!(of(0.26), [1, 2, 3]);
    assert_eq!(of(0.6), [1, 2]);
    assert_eq!(of(1.0), [1]);
    // Temperature comes first: at 2, 0.1 is half as likely as 0.4.
    assert_eq!(kept(&logits, &SamplingParams { min_p: 0.49, temperature: 2.0, ..warm() }), [0, 1, 2, 3]);
    check_frequencies(&logits, &SamplingParams { min_p: 0.6, ..warm() }, &[0.0, 4.0 / 7.0, 3.0 / 7.0, 0.0]);
}

#[test]
fn typical_p_keeps_what_surprises_as_expected() {
    // Entropy 1.2206 nat; surprises 0.5108 (0.60), 2.3026 (0.10), 1.8971 (0.15), twice 2.9957 (0.05), 2.9957.
    // Distances from the entropy: 0.7098, 1.0820, 0.6765, 1.7751.
    let logits = logits_of(&[0.6, 0.1, 0.15, 0.05, 0.05, 0.05]);
    let of = |typical_p| kept(&logits, &SamplingParams { typical_p, ..warm() });
    assert_eq!(of(0.14), [2], "the likeliest is not the most typical");
    assert_eq!(of(0.16), [0, 2]);
    assert_eq!(of(0.74), [0, 2]);
    assert_eq!(of(0.76), [0, 1, 2]);
    assert_eq!(of(0.89), [0, 1, 2, 3], "of equals the lowest id");
    assert_eq!(of(1.0), [0, 1, 2, 3, 4, 5]);
    let typical = SamplingParams { typical_p: 0.5, ..warm() };
    check_frequencies(&logits, &typical, &[0.8, 0.0, 0.2, 0.0, 0.0, 0.0]);
}

#[test]
fn each_filter_works_on_what_the_one_before_has_left() {
    let logits = logits_of(&[0.4, 0.3, 0.2, 0.1]);
    // Of the two that top-k leaves, shares are 4/7 and 3/7, and 4/7 is the nearer to the entropy of 0.683 nat.
    assert_eq!(kept(&logits, &SamplingParams { top_k: Some(2), typical_p: 0.5, ..warm() }), [0]);
    assert_eq!(kept(&logits, &SamplingParams { top_p: 0.65, min_p: 0.7, ..warm() }), [0, 1]);
    // Without top-k the most typical is 0.3, so the likeliest that is left for min-p is that.
    assert_eq!(kept(&logits, &SamplingParams { typical_p: 0.2, min_p: 1.0, ..warm() }), [1]);
}

/// What a greedy choice is among these six tokens.
fn chosen(history: History<'_>, rules: Rules<'_>) -> Result<TokenId, NoChoice> {
    let logits = [1.0, 5.0, 4.0, 3.0, 2.0, 0.0];
    Sampler::new(6).choose(&logits, history, rules).map(|choice| choice.token)
}

#[test]
fn bias_decides_like_a_logit() {
    let of = |logit_bias| chosen(history(&[0], 0), by(&SamplingParams { logit_bias, ..greedy() })).unwrap();
    assert_eq!(of(vec![(1, -100.0)]), 2);
    assert_eq!(of(vec![(5, 100.0)]), 5);
    assert_eq!(of(vec![(2, 0.9)]), 1);
    assert_eq!(of(vec![(2, 1.0)]), 1, "of equals the lowest id");
    assert_eq!(of(vec![(2, 1.1)]), 2);
    let sampling = SamplingParams { logit_bias: vec![(0, 100.0)], ..warm() };
    check_frequencies(&logits_of(&[0.001, 0.999]), &sampling, &[1.0, 0.0]);
    let sampling = SamplingParams { logit_bias: vec![(1, -100.0)], ..warm() };
    check_frequencies(&logits_of(&[0.001, 0.999]), &sampling, &[1.0, 0.0]);
    // Bias comes before the repetition penalty, which halves what is positive then.
    let sampling = SamplingParams { logit_bias: vec![(0, 5.0)], repetition_penalty: 2.0, ..greedy() };
    assert_eq!(chosen(history(&[0], 0), by(&sampling)), Ok(1));
}

#[test]
fn bad_words_are_not_completed_in_the_output() {
    let bad = |bad_words: &[&[TokenId]], tokens: &[TokenId], generated| {
        let bad_words = bad_words.iter().map(|word| word.to_vec()).collect();
        chosen(history(tokens, generated), by(&SamplingParams { bad_words, ..greedy() }))
    };
    assert_eq!(bad(&[&[1]], &[0], 0), Ok(2));
    assert_eq!(bad(&[&[1], &[2]], &[0], 0), Ok(3));
    assert_eq!(bad(&[&[4, 3, 1]], &[0, 4, 3], 2), Ok(2));
    assert_eq!(bad(&[&[4, 3, 1]], &[0, 4, 0, 3], 3), Ok(1));
    assert_eq!(bad(&[&[4, 3, 1]], &[0, 4, 3], 1), Ok(1), "the prompt's end is no beginning");
    assert_eq!(bad(&[&[3, 1], &[4, 3, 2]], &[0, 4, 3], 2), Ok(3));
    let all: Vec<&[TokenId]> = vec![&[0], &[1], &[2], &[3], &[4], &[5]];
    assert_eq!(bad(&all, &[0], 0), Err(NoChoice::NothingLeft));
}

#[test]
fn only_allowed_tokens_are_chosen() {
    let sampling = SamplingParams { allowed_token_ids: vec![4, 3, 4], ..greedy() };
    assert_eq!(chosen(history(&[0], 0), by(&sampling)), Ok(3));
    let sampling = SamplingParams { logit_bias: vec![(1, 100.0)], ..sampling };
    assert_eq!(chosen(history(&[0], 0), by(&sampling)), Ok(3), "a bias does not bring back what is excluded");
    let warm = SamplingParams { temperature: 1e30, ..sampling };
    for position in 0..200 {
        let history = History { tokens: &[0], generated: 0, position };
        assert!([3, 4].contains(&chosen(history, by(&warm)).unwrap()));
    }
}

#[test]
fn a_grammars_bits_are_the_lowest_first() {
    let of = |allowed: &[u32]| chosen(history(&[0], 0), Rules { allowed: Some(allowed), ..by(&greedy()) });
    assert_eq!(of(&[0b11_1100]), Ok(2));
    assert_eq!(of(&[0b10_0001]), Ok(0));
    assert_eq!(of(&[]), Err(NoChoice::NothingLeft));
    let logits: Vec<f32> = (0..70).map(|id| id as f32).collect();
    let of = |allowed: &[u32]| {
        let sampling = greedy();
        let rules = Rules { allowed: Some(allowed), ..by(&sampling) };
        Sampler::new(70).choose(&logits, history(&[0], 0), rules).map(|choice| choice.token)
    };
    assert_eq!(of(&[1, 1 << 31]), Ok(63));
    assert_eq!(of(&[1, 0, 1 << 31 | 1 << 5]), Ok(69), "bits past the vocabulary mean nothing");
}

#[test]
fn nothing_ends_before_min_tokens() {
    let stop =
        StopConditions { max_tokens: 9, eos_ids: vec![1], stop_token_ids: vec![2, 900], min_tokens: 2 };
    let of = |generated, sampling: &SamplingParams| {
        chosen(history(&[0, 0, 0], generated), Rules { sampling, stop: &stop, allowed: None })
    };
    assert_eq!(of(0, &greedy()), Ok(3));
    assert_eq!(of(1, &greedy()), Ok(3));
    assert_eq!(of(2, &greedy()), Ok(1));
    let sampling = SamplingParams { allowed_token_ids: vec![1, 2], ..greedy() };
    assert_eq!(of(1, &sampling), Err(NoChoice::NothingLeft));
    assert_eq!(of(2, &sampling), Ok(1));
}

#[test]
fn green_tokens_are_made_likelier() {
    let watermark = Watermark { key: 3, gamma: 0.5, delta: 2.0 };
    let sampling = SamplingParams { watermark: Some(watermark), ..greedy() };
    for previous in 0..50 {
        let logits = vec![0.0; 64];
        let list = GreenList::new(3, 0.5, previous);
        let choice = Sampler::new(64).choose(&logits, history(&[9, previous], 0), by(&sampling)).unwrap();
        assert_eq!(Some(choice.token), (0..64).find(|&id| list.has(id)));
        // It is not made likelier by more than delta.
        let mut logits = vec![0.0; 64];
        let red = (0..64).find(|&id| !list.has(id)).unwrap();
        logits[red as usize] = 2.01;
        let choice = Sampler::new(64).choose(&logits, history(&[9, previous], 0), by(&sampling)).unwrap();
        assert_eq!(choice.token, red);
    }
}

#[test]
fn the_likeliest_are_told_by_raw_logits() {
    let logits = [1.0, 2.0, 5.0, 2.0, -1.0, 5.0, 2.0];
    let top = |count, change: &dyn Fn(&mut SamplingParams)| {
        let mut sampling = SamplingParams { logprobs: count, ..greedy() };
        change(&mut sampling);
        let choice = Sampler::new(7).choose(&logits, history(&[0], 0), by(&sampling)).unwrap();
        choice.top.into_iter().map(|entry| (entry.id, entry.logprob)).collect::<Vec<_>>()
    };
    let exact: f64 = logits.iter().map(|logit: &f32| f64::from(*logit).exp()).sum::<f64>().ln();
    let ids = |top: Vec<(TokenId, f32)>| {
        for (id, logprob) in &top {
            let expected = f64::from(logits[*id as usize]) - exact;
            assert!((f64::from(*logprob) - expected).abs() < 1e-6, "{id}: {logprob}, {expected}");
        }
        top.into_iter().map(|(id, _)| id).collect::<Vec<_>>()
    };
    assert!(top(None, &|_| {}).is_empty());
    assert!(top(Some(0), &|_| {}).is_empty());
    assert_eq!(ids(top(Some(1), &|_| {})), [2]);
    assert_eq!(ids(top(Some(4), &|_| {})), [2, 5, 1, 3], "of equals the lowest id");
    assert_eq!(ids(top(Some(20), &|_| {})), [2, 5, 1, 3, 6, 0, 4]);
    let changed = top(Some(4), &|sampling| {
        (sampling.temperature, sampling.logit_bias, sampling.allowed_token_ids) =
            (0.5, vec![(4, 100.0)], vec![0, 4]);
    });
    assert_eq!(ids(changed), [2, 5, 1, 3]);
}

#[test]
fn log_probabilities_are_those_of_exact_sums() {
    // A large vocabulary of an odd size, with logits far apart.
    let logits: Vec<f32> =
        (0..49_157u32).map(|id| (id.wrapping_mul(2_654_435_761) >> 8) as f32 / 4e5 - 30.0).collect();
    let maximum = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - maximum).exp()).sum();
    let sampling = SamplingParams { logprobs: Some(20), ..greedy() };
    let choice = Sampler::new(logits.len()).choose(&logits, history(&[0], 0), by(&sampling)).unwrap();
    assert_eq!((choice.top.len(), choice.top[0].id), (20, choice.token));
    assert!(choice.top.is_sorted_by(|a, b| (b.logprob, a.id) < (a.logprob, b.id) && a.id != b.id));
    for entry in &choice.top {
        let expected = f64::from(logits[entry.id as usize]) - maximum - sum.ln();
        assert!((f64::from(entry.logprob) - expected).abs() < 2e-6, "{} {expected}", entry.logprob);
    }
    assert_eq!(choice.logprob, choice.top[0].logprob);
}

#[test]
fn all_instruction_sets_give_the_same_log_probabilities() {
    let logits: Vec<f32> = (0..5003).map(|id| ((id * 7919) % 5003) as f32 / 300.0).collect();
    let of = |set| {
        let mut sampler = Sampler::new(logits.len());
        sampler.set = set;
        let sampling = SamplingParams { logprobs: Some(3), ..greedy() };
        sampler.choose(&logits, history(&[0], 0), by(&sampling)).unwrap()
    };
    let sets = InstructionSet::available();
    assert!(sets.iter().all(|&set| of(set) == of(sets[0])));
}
