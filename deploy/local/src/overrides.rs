//! `--overrides "max_num_sequence=32;max_total_seq_length=4096"`: options of MLC-LLM's engine, and what each is here.
//!
//! A key that Baton has sets the field that means the same. One that Baton has not is refused where the model would
//! not run as asked, and noted where nothing depends on it; its neutral value is always welcome.

use toml::Table;

/// A key, and what it does here.
pub(crate) struct Key {
    /// As MLC-LLM spells it.
    pub(crate) name: &'static str,
    effect: Effect,
    /// The effect in words.
    pub(crate) meaning: &'static str,
}

enum Effect {
    /// Sets a field to a number of at least 1.
    Number(&'static str),
    /// Sets `prefix_cache` by the name of a mode.
    PrefixCacheMode,
    /// Turns the prefix cache off with 0.
    RecyclingSequences,
    /// hybrid, or chunked, which has no effect.
    PrefillMode,
    /// A number that only means what is there with one of these values.
    OnlyNumber(&'static [i64]),
    /// A number of at least the first, without effect; one of the others says nothing in particular.
    IgnoredNumber(i64, &'static [i64]),
    /// Sets a field to a number above 0 and up to 1.
    Share(&'static str),
    /// A text without effect.
    IgnoredText,
}

/// Every key.
pub(crate) const KEYS: [Key; 16] = [
    Key {
        name: "max_num_sequence",
        effect: Effect::Number("sequences_max"),
        meaning: "sets `sequences_max`",
    },
    Key { name: "max_total_seq_length", effect: Effect::Number("kv_tokens"), meaning: "sets `kv_tokens`" },
    Key { name: "prefill_chunk_size", effect: Effect::Number("step_tokens"), meaning: "sets `step_tokens`" },
    Key { name: "context_window_size", effect: Effect::Number("context_len"), meaning: "sets `context_len`" },
    Key {
        name: "prefix_cache_mode",
        effect: Effect::PrefixCacheMode,
        meaning: "`disable` or `radix`: sets `prefix_cache`",
    },
    Key {
        name: "prefix_cache_max_num_recycling_seqs",
        effect: Effect::RecyclingSequences,
        meaning: "0 unsets `prefix_cache`; other numbers have no effect, since KV blocks bound the cache",
    },
    Key {
        name: "prefill_mode",
        effect: Effect::PrefillMode,
        meaning: "`hybrid`; `chunked` has no effect, since steps always hold chunks of prefills beside decodes",
    },
    Key {
        name: "max_history_size",
        effect: Effect::OnlyNumber(&[0]),
        meaning: "must be 0, since models with a recurrent state come later",
    },
    Key {
        name: "sliding_window_size",
        effect: Effect::OnlyNumber(&[-1, 0]),
        meaning: "must be -1 or 0, since sliding windows come later",
    },
    Key {
        name: "attention_sink_size",
        effect: Effect::IgnoredNumber(-1, &[-1, 0]),
        meaning: "no effect without a sliding window",
    },
    Key {
        name: "tensor_parallel_shards",
        effect: Effect::OnlyNumber(&[1]),
        meaning: "must be 1, since tensor parallelism comes later",
    },
    Key {
        name: "pipeline_parallel_stages",
        effect: Effect::OnlyNumber(&[1]),
        meaning: "must be 1, since pipeline parallelism comes later",
    },
    Key {
        name: "spec_draft_length",
        effect: Effect::IgnoredNumber(0, &[0]),
        meaning: "no effect without speculative decoding, which comes later",
    },
    Key {
        name: "spec_tree_width",
        effect: Effect::IgnoredNumber(1, &[1]),
        meaning: "no effect without speculative decoding, which comes later",
    },
    Key {
        name: "gpu_memory_utilization",
        effect: Effect::Share("gpu_memory_utilization"),
        meaning: "sets `gpu_memory_utilization`; no effect on the CPU, where `kv_memory` bounds KV",
    },
    Key { name: "opt", effect: Effect::IgnoredText, meaning: "no effect, since models are not compiled" },
];

/// What overrides come to.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Fields {
    /// Fields of the worker's configuration.
    pub(crate) fields: Table,
    /// What has no effect, a line each.
    pub(crate) notes: Vec<String>,
}

/// Reads `KEY=VALUE;KEY=VALUE`. Of a key that comes twice the last value counts.
pub(crate) fn read(text: &str) -> Result<Fields, String> {
    let mut fields = Fields::default();
    for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
        let (name, value) =
            part.split_once('=').ok_or_else(|| format!("expected KEY=VALUE;KEY=VALUE, got {part:?}"))?;
        let (name, value) = (name.trim(), value.trim());
        let key = KEYS.iter().find(|key| key.name == name).ok_or_else(|| {
            let names = KEYS.map(|key| key.name).join(", ");
            format!("unknown key {name:?}, expected one of {names}")
        })?;
        key.apply(value, &mut fields).map_err(|message| format!("{name}: {message}"))?;
    }
    Ok(fields)
}

/// What a mode of the prefix cache is here.
pub(crate) fn prefix_cache_mode(value: &str) -> Result<Fields, String> {
    let on = match value {
        "disable" => false,
        "radix" => true,
        _ => return Err(format!("expected disable or radix, got {value:?}")),
    };
    Ok(Fields { fields: Table::from_iter([("prefix_cache".to_owned(), on.into())]), notes: Vec::new() })
}

/// What a mode of prefill is here: nothing to set.
pub(crate) fn prefill_mode(value: &str) -> Result<Fields, String> {
    match value {
        "hybrid" => Ok(Fields::default()),
        "chunked" => {
            let note = "chunked has no effect: steps always hold chunks of prefills beside decodes";
            Ok(Fields { notes: vec![note.to_owned()], ..Fields::default() })
        }
        _ => Err(format!("expected hybrid or chunked, got {value:?}")),
    }
}

impl Key {
    fn apply(&self, value: &str, out: &mut Fields) -> Result<(), String> {
        let is_neutral = match &self.effect {
            Effect::Number(field) => {
                out.fields.insert((*field).to_owned(), number(value, 1)?.into());
                true
            }
            Effect::PrefixCacheMode => {
                out.fields.extend(prefix_cache_mode(value)?.fields);
                true
            }
            Effect::RecyclingSequences => match number(value, -1)? {
                0 => {
                    out.fields.insert("prefix_cache".to_owned(), false.into());
                    true
                }
                sequences => sequences == -1,
            },
            Effect::PrefillMode => prefill_mode(value)?.notes.is_empty(),
            Effect::OnlyNumber(allowed) => {
                if !allowed.contains(&number(value, i64::MIN)?) {
                    return Err(format!("{}; got {value}", self.meaning));
                }
                true
            }
            Effect::IgnoredNumber(least, neutral) => neutral.contains(&number(value, *least)?),
            Effect::Share(field) => match value.parse::<f64>() {
                Ok(share) if share > 0.0 && share <= 1.0 => {
                    out.fields.insert((*field).to_owned(), share.into());
                    true
                }
                _ => return Err(format!("expected a number above 0 and up to 1, got {value:?}")),
            },
            Effect::IgnoredText => false,
        };
        if !is_neutral {
            out.notes.push(format!("{}={value}: {}", self.name, self.meaning));
        }
        Ok(())
    }
}

fn number(value: &str, least: i64) -> Result<i64, String> {
    match value.parse::<i64>() {
        Ok(number) if number >= least => Ok(number),
        _ if least == i64::MIN => Err(format!("expected a whole number, got {value:?}")),
        _ => Err(format!("expected a whole number of at least {least}, got {value:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields as TOML, a line each; then the notes.
    fn shown(text: &str) -> String {
        match read(text) {
            Ok(Fields { fields, notes }) => {
                let lines = fields.iter().map(|(field, value)| format!("{field} = {value}")).chain(notes);
                lines.collect::<Vec<_>>().join("\n")
            }
            Err(message) => format!("refused: {message}"),
        }
    }

    #[test]
    fn a_key_sets_the_field_that_means_the_same() {
        for (text, expected) in [
            ("", ""),
            (" ; ", ""),
            ("max_num_sequence=32;max_total_seq_length=4096", "kv_tokens = 4096\nsequences_max = 32"),
            ("max_num_sequence = 1 ; max_num_sequence=2;", "sequences_max = 2"),
            ("prefill_chunk_size=256", "step_tokens = 256"),
            ("context_window_size=768", "context_len = 768"),
            ("gpu_memory_utilization=0.5", "gpu_memory_utilization = 0.5"),
            ("prefix_cache_mode=disable", "prefix_cache = false"),
            ("prefix_cache_mode=radix", "prefix_cache = true"),
            ("prefix_cache_max_num_recycling_seqs=0", "prefix_cache = false"),
        ] {
            assert_eq!(shown(text), expected, "{text}");
        }
    }

    #[test]
    fn a_neutral_value_is_welcome() {
        let neutral = "max_history_size=0;sliding_window_size=-1;attention_sink_size=0;tensor_parallel_shards=1;\
                       pipeline_parallel_stages=1;spec_draft_length=0;spec_tree_width=1;\
                       prefix_cache_max_num_recycling_seqs=-1;prefill_mode=hybrid";
        assert_eq!(shown(neutral), "");
    }

    #[test]
    fn what_has_no_effect_is_noted() {
        for (text, expected) in [
            ("opt=O3", "opt=O3: no effect, since models are not compiled"),
            ("attention_sink_size=4", "attention_sink_size=4: no effect without a sliding window"),
        ] {
            assert_eq!(shown(text), expected);
        }
        for text in [
            "spec_draft_length=4",
            "spec_tree_width=2",
            "prefix_cache_max_num_recycling_seqs=8",
            "prefill_mode=chunked",
        ] {
            let note = shown(text);
            assert!(note.starts_with(&format!("{text}: ")) && note.contains("no effect"), "{note}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let two = "refused: tensor_parallel_shards: must be 1, since tensor parallelism comes later; got 2";
        assert_eq!(shown("tensor_parallel_shards=2"), two);
        for text in ["pipeline_parallel_stages=2", "sliding_window_size=4096"] {
            assert!(shown(text).contains("come later") || shown(text).contains("comes later"), "{text}");
        }
        assert!(shown("max_history_size=1").starts_with("refused: max_history_size: must be 0"));
        for (text, expected) in [
            ("max_num_sequences=1", "unknown key \"max_num_sequences\", expected one of max_num_sequence, "),
            ("max_num_sequence", "expected KEY=VALUE;KEY=VALUE, got \"max_num_sequence\""),
            ("max_num_sequence=0", "max_num_sequence: expected a whole number of at least 1, got \"0\""),
            ("max_total_seq_length=4k", "max_total_seq_length: expected a whole number"),
            ("prefill_chunk_size=", "prefill_chunk_size: expected a whole number"),
            ("context_window_size=-1", "context_window_size: expected a whole number of at least 1"),
            ("prefix_cache_mode=on", "prefix_cache_mode: expected disable or radix, got \"on\""),
            ("prefix_cache_max_num_recycling_seqs=-2", "expected a whole number of at least -1"),
            ("prefill_mode=fast", "prefill_mode: expected hybrid or chunked"),
            ("gpu_memory_utilization=0", "expected a number above 0 and up to 1"),
            ("gpu_memory_utilization=nan", "expected a number above 0 and up to 1"),
            ("spec_draft_length=-1", "spec_draft_length: expected a whole number of at least 0"),
            ("tensor_parallel_shards=two", "tensor_parallel_shards: expected a whole number, got \"two\""),
        ] {
            let refused = shown(text);
            assert!(refused.starts_with("refused: ") && refused.contains(expected), "{refused}");
        }
    }
}
