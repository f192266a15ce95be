//! Parameters that chat and text completions have in common, each with its range: `OpenAI`'s and vLLM's additions.

use std::ops::Bound::Included;
use std::ops::RangeInclusive;

use proto::SamplingParams;

use crate::dialect::fields::Fields;
use crate::dialect::sampling;
use crate::domain::{Priority, REPETITION_PENALTY_MIN, Request, Stop, Truncate};
use crate::fault::Fault;

/// Range of temperatures.
const TEMPERATURE: RangeInclusive<f32> = 0.0..=2.0;
/// Range of both penalties.
const PENALTY: RangeInclusive<f32> = -2.0..=2.0;
/// Range of `n`.
pub(super) const SEQUENCES: RangeInclusive<u64> = 1..=128;
/// Range of counts of tokens.
pub(super) const COUNT: RangeInclusive<u64> = 1..=i32::MAX as u64;
/// Range of priorities, the first of which goes before all others.
const PRIORITY: RangeInclusive<u64> = 1..=5;

/// Fields that are understood, and have no effect on an answer in text: what is kept or billed elsewhere, and how
/// other servers compute.
pub(crate) const WITHOUT_EFFECT: [&str; 24] = [
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
    "verbosity",
    "moderation",
    "web_search_options",
    "request_id",
    "cache_salt",
    "add_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "length_penalty",
    "early_stopping",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "logits_processors",
    "kv_transfer_params",
    "vllm_xargs",
    "repetition_detection",
];

/// How the tokens are chosen, when a text ends, and who goes first.
pub(super) fn read(fields: &mut Fields, request: &mut Request) -> Result<(), Fault> {
    request.model = fields.string("model")?;
    request.sampling = sampling(fields)?;
    request.seed = fields.signed("seed", i64::MIN..=i64::MAX)?.map(i64::cast_unsigned);
    request.stop = stop(fields)?;
    request.skip_special_tokens = fields.flag("skip_special_tokens")?.unwrap_or(true);
    request.bad_words = sampling::strings(fields, "bad_words")?;
    request.priority =
        fields.integer("priority", PRIORITY)?.map_or_else(Priority::default, |p| Priority(p as u8));
    request.truncate = truncate(fields)?;
    // Of another type it names nobody, and is no fault: it changes no answer.
    request.session = fields.take("user").and_then(|user| user.as_str().map(ToOwned::to_owned));
    if fields.flag("use_beam_search")?.unwrap_or(false) {
        return Err(fields.fault("use_beam_search", "true is not supported"));
    }
    for name in WITHOUT_EFFECT {
        fields.take(name);
    }
    Ok(())
}

fn sampling(fields: &mut Fields) -> Result<SamplingParams, Fault> {
    // Zero keeps the most likely token alone, and so does any number too small to tell from it.
    let top_p = fields.float("top_p", (Included(0.0), Included(1.0)))?.unwrap_or(1.0);
    let top_k = fields.signed("top_k", -1..=i64::from(i32::MAX))?;
    let mut sampling = SamplingParams {
        temperature: fields.float("temperature", TEMPERATURE)?.unwrap_or(1.0),
        top_k: top_k.filter(|k| *k > 0).map(|k| k as u32),
        top_p: top_p.max(f32::MIN_POSITIVE),
        repetition_penalty: fields.float("repetition_penalty", REPETITION_PENALTY_MIN..=2.0)?.unwrap_or(1.0),
        presence_penalty: fields.float("presence_penalty", PENALTY)?.unwrap_or(0.0),
        frequency_penalty: fields.float("frequency_penalty", PENALTY)?.unwrap_or(0.0),
        ..SamplingParams::default()
    };
    sampling::filters(fields, &mut sampling)?;
    Ok(sampling)
}

fn stop(fields: &mut Fields) -> Result<Stop, Fault> {
    let strings = sampling::texts(fields.take("stop"), "stop")?;
    let mut stop = Stop {
        strings,
        token_ids: sampling::token_ids(fields, "stop_token_ids")?,
        include: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        ..Stop::default()
    };
    sampling::min_tokens(fields, &mut stop)?;
    Ok(stop)
}

fn truncate(fields: &mut Fields) -> Result<Option<Truncate>, Fault> {
    Ok(fields.integer("truncate_prompt_tokens", COUNT)?.map(|count| Truncate::Last(count as usize)))
}

/// How many choices.
pub(super) fn choices(fields: &mut Fields) -> Result<usize, Fault> {
    Ok(fields.integer("n", SEQUENCES)?.unwrap_or(1) as usize)
}

/// What of usage a stream tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StreamUsage {
    /// In a last chunk of its own.
    pub(super) at_end: bool,
    /// In every chunk.
    pub(super) always: bool,
    /// With the parts of the request's time, in an answer in one piece too.
    pub(super) timings: bool,
}

/// `stream`, `include_timings`, and `stream_options`, which only a stream may have.
pub(super) fn stream(fields: &mut Fields, route: &str) -> Result<(bool, StreamUsage), Fault> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    let timings = fields.flag("include_timings")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else {
        // A stream has them in the chunk of its usage.
        return Ok((stream, StreamUsage { at_end: timings && stream, always: false, timings }));
    };
    if !stream {
        return Err(fields.fault("stream_options", "is allowed only when stream is true"));
    }
    let include = options.flag("include_usage")?.unwrap_or(false);
    let always = include && options.flag("continuous_usage_stats")?.unwrap_or(false);
    options.flag("include_obfuscation")?;
    options.finish(route);
    Ok((stream, StreamUsage { at_end: include || timings, always, timings }))
}

/// `prompt_logprobs`, which no stream has: how many alternatives of each token.
pub(super) fn prompt_logprobs(fields: &mut Fields, stream: bool) -> Result<Option<u32>, Fault> {
    let count = sampling::logprobs(fields, "prompt_logprobs")?;
    if stream && count.is_some_and(|count| count > 0) {
        return Err(fields.fault("prompt_logprobs", "is not allowed when stream is true"));
    }
    Ok(count)
}
