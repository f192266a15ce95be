//! What no engine can compute is refused here, with the name of the field, before anything is queued.

use std::collections::BTreeSet;

use proto::{Error, LOGPROBS_MAX, SamplingParams, StopConditions, TokenId};

use super::{ModelLimits, SequenceSpec};

impl SequenceSpec {
    /// Refuses what no engine with these limits can compute, with the name of the field.
    pub fn validate(&self, limits: ModelLimits) -> Result<(), Error> {
        self.validate_tokens(limits)?;
        validate_stop(&self.stop, self.generated)?;
        validate_numbers(&self.sampling)?;
        validate_ids(&self.sampling, limits.vocab)?;
        validate_watermark(&self.sampling)
    }

    fn validate_tokens(&self, limits: ModelLimits) -> Result<(), Error> {
        let len = self.tokens.len();
        if len == 0 {
            return Err(Error::invalid("tokens", "at least one token expected, none came"));
        }
        if let Some(position) = self.tokens.iter().position(|&token| token as usize >= limits.vocab) {
            let token = self.tokens[position];
            return Err(Error::invalid(
                "tokens",
                format_args!("ids below {} expected, {token} came at position {position}", limits.vocab),
            ));
        }
        if self.generated >= len {
            return Err(Error::invalid(
                "generated",
                format_args!("less than the {len} tokens expected, {} came", self.generated),
            ));
        }
        if len >= limits.context_len {
            return Err(Error::invalid(
                "tokens",
                format_args!(
                    "less than the context length of {} tokens expected, {len} came",
                    limits.context_len
                ),
            ));
        }
        Ok(())
    }
}

fn validate_stop(stop: &StopConditions, generated: usize) -> Result<(), Error> {
    let StopConditions { max_tokens, min_tokens, .. } = *stop;
    if max_tokens <= generated {
        return Err(Error::invalid(
            "max_tokens",
            format_args!("more than the {generated} tokens already generated expected, {max_tokens} came"),
        ));
    }
    if min_tokens > max_tokens {
        return Err(Error::invalid(
            "min_tokens",
            format_args!("at most max_tokens, which is {max_tokens}, expected, {min_tokens} came"),
        ));
    }
    Ok(())
}

fn validate_numbers(sampling: &SamplingParams) -> Result<(), Error> {
    const PENALTY: &str = "a number from -2 to 2";
    let SamplingParams {
        temperature,
        top_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        min_p,
        typical_p,
        ..
    } = *sampling;
    let is_share = |value: f32| value > 0.0 && value <= 1.0;
    // A NaN is in no range.
    let checks = [
        ("temperature", temperature, (0.0..=f32::MAX).contains(&temperature), "a finite number from 0 on"),
        ("top_p", top_p, is_share(top_p), "a number above 0, at most 1"),
        ("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number from 0 to 1"),
        ("typical_p", typical_p, is_share(typical_p), "a number above 0, at most 1"),
        (
            "repetition_penalty",
            repetition_penalty,
            (f32::MIN_POSITIVE..=f32::MAX).contains(&repetition_penalty),
            "a finite number above 0",
        ),
        ("presence_penalty", presence_penalty, (-2.0..=2.0).contains(&presence_penalty), PENALTY),
        ("frequency_penalty", frequency_penalty, (-2.0..=2.0).contains(&frequency_penalty), PENALTY),
    ];
    if let Some((field, value, _, expected)) = checks.into_iter().find(|&(_, _, is_valid, _)| !is_valid) {
        return Err(Error::invalid(field, format_args!("{expected} expected, {value} came")));
    }
    if sampling.top_k == Some(0) {
        return Err(Error::invalid("top_k", "at least 1 expected, 0 came; leave it out to keep all tokens"));
    }
    for (field, count) in [("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)] {
        if let Some(count) = count.filter(|&count| count > LOGPROBS_MAX) {
            return Err(Error::invalid(field, format_args!("at most {LOGPROBS_MAX} expected, {count} came")));
        }
    }
    Ok(())
}

/// Checks the parameters that name tokens.
fn validate_ids(sampling: &SamplingParams, vocab: usize) -> Result<(), Error> {
    let is_unknown = |id: &TokenId| *id as usize >= vocab;
    let unknown = [
        ("logit_bias", sampling.logit_bias.iter().map(|(id, _)| *id).find(is_unknown)),
        ("bad_words", sampling.bad_words.iter().flatten().copied().find(is_unknown)),
        ("allowed_token_ids", sampling.allowed_token_ids.iter().copied().find(is_unknown)),
    ];
    if let Some((field, Some(id))) = unknown.into_iter().find(|(_, id)| id.is_some()) {
        return Err(Error::invalid(field, format_args!("ids below {vocab} expected, {id} came")));
    }
    let mut biased = BTreeSet::new();
    for &(id, bias) in &sampling.logit_bias {
        if !bias.is_finite() {
            let message = format_args!("a finite number expected, {bias} came for token {id}");
            return Err(Error::invalid("logit_bias", message));
        }
        if !biased.insert(id) {
            return Err(Error::invalid(
                "logit_bias",
                format_args!("each token once expected, {id} came twice"),
            ));
        }
    }
    if let Some(place) = sampling.bad_words.iter().position(Vec::is_empty) {
        let message = format_args!("at least one token in each expected, none came in word {place}");
        return Err(Error::invalid("bad_words", message));
    }
    Ok(())
}

fn validate_watermark(sampling: &SamplingParams) -> Result<(), Error> {
    let Some(watermark) = &sampling.watermark else { return Ok(()) };
    let (gamma, delta) = (watermark.gamma, watermark.delta);
    if !(gamma > 0.0 && gamma < 1.0) {
        let message = format_args!("a number between 0 and 1 expected, {gamma} came");
        return Err(Error::invalid("watermark.gamma", message));
    }
    if !(delta > 0.0 && delta.is_finite()) {
        let message = format_args!("a finite number above 0 expected, {delta} came");
        return Err(Error::invalid("watermark.delta", message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use proto::Watermark;

    use super::*;
    use crate::sequence::Until;

    fn spec() -> SequenceSpec {
        SequenceSpec {
            tokens: vec![1, 2, 3],
            generated: 1,
            sampling: SamplingParams::default(),
            stop: StopConditions { max_tokens: 4, ..StopConditions::default() },
            until: Until::Finished,
        }
    }

    fn check(change: impl FnOnce(&mut SequenceSpec), expected: Expect) {
        let mut spec = spec();
        change(&mut spec);
        let error = spec.validate(ModelLimits { vocab: 10, context_len: 8 }).unwrap_err();
        expected.assert_eq(&error.to_string());
    }

    #[test]
    fn refusals_name_the_field() {
        spec().validate(ModelLimits { vocab: 10, context_len: 8 }).unwrap();
        check(
            |s| s.tokens.clear(),
            expect!["tokens: at least one token expected, none came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.tokens[1] = 10,
            expect!["tokens: ids below 10 expected, 10 came at position 1 (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.generated = 3,
            expect!["generated: less than the 3 tokens expected, 3 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.stop.max_tokens = 1,
            expect![
                "max_tokens: more than the 1 tokens already generated expected, 1 came (INVALID_ARGUMENT)"
            ],
        );
        check(
            |s| s.stop.max_tokens = 0,
            expect![
                "max_tokens: more than the 1 tokens already generated expected, 0 came (INVALID_ARGUMENT)"
            ],
        );
        check(
            |s| s.tokens = vec![1; 8],
            expect!["tokens: less than the context length of 8 tokens expected, 8 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.temperature = f32::NAN,
            expect!["temperature: a finite number from 0 on expected, NaN came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.temperature = f32::INFINITY,
            expect!["temperature: a finite number from 0 on expected, inf came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.temperature = -0.5,
            expect!["temperature: a finite number from 0 on expected, -0.5 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.top_p = 0.0,
            expect!["top_p: a number above 0, at most 1 expected, 0 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.top_p = 1.5,
            expect!["top_p: a number above 0, at most 1 expected, 1.5 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.top_k = Some(0),
            expect!["top_k: at least 1 expected, 0 came; leave it out to keep all tokens (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.repetition_penalty = 0.0,
            expect!["repetition_penalty: a finite number above 0 expected, 0 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.presence_penalty = 2.5,
            expect!["presence_penalty: a number from -2 to 2 expected, 2.5 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.frequency_penalty = f32::NEG_INFINITY,
            expect!["frequency_penalty: a number from -2 to 2 expected, -inf came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.stop.min_tokens = 5,
            expect!["min_tokens: at most max_tokens, which is 4, expected, 5 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.min_p = -0.1,
            expect!["min_p: a number from 0 to 1 expected, -0.1 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.min_p = f32::NAN,
            expect!["min_p: a number from 0 to 1 expected, NaN came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.typical_p = 0.0,
            expect!["typical_p: a number above 0, at most 1 expected, 0 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.logprobs = Some(21),
            expect!["logprobs: at most 20 expected, 21 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.prompt_logprobs = Some(21),
            expect!["prompt_logprobs: at most 20 expected, 21 came (INVALID_ARGUMENT)"],
        );
    }

    #[test]
    fn refusals_name_the_parameter_that_names_tokens() {
        check(
            |s| s.sampling.logit_bias = vec![(9, 100.0), (10, -100.0)],
            expect!["logit_bias: ids below 10 expected, 10 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.logit_bias = vec![(9, f32::INFINITY)],
            expect!["logit_bias: a finite number expected, inf came for token 9 (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.logit_bias = vec![(9, 1.0), (2, 1.0), (9, 1.0)],
            expect!["logit_bias: each token once expected, 9 came twice (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.bad_words = vec![vec![1], vec![2, 11]],
            expect!["bad_words: ids below 10 expected, 11 came (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.bad_words = vec![vec![1], vec![]],
            expect!["bad_words: at least one token in each expected, none came in word 1 (INVALID_ARGUMENT)"],
        );
        check(
            |s| s.sampling.allowed_token_ids = vec![3, 12],
            expect!["allowed_token_ids: ids below 10 expected, 12 came (INVALID_ARGUMENT)"],
        );
    }

    #[test]
    fn refusals_name_the_part_of_the_watermark() {
        let marked = |gamma, delta| {
            move |s: &mut SequenceSpec| {
                s.sampling.watermark = Some(Watermark { key: 1, gamma, delta });
            }
        };
        check(
            marked(1.0, 2.0),
            expect!["watermark.gamma: a number between 0 and 1 expected, 1 came (INVALID_ARGUMENT)"],
        );
        check(
            marked(f32::NAN, 2.0),
            expect!["watermark.gamma: a number between 0 and 1 expected, NaN came (INVALID_ARGUMENT)"],
        );
        check(
            marked(0.5, 0.0),
            expect!["watermark.delta: a finite number above 0 expected, 0 came (INVALID_ARGUMENT)"],
        );
    }
}
