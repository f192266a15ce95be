//! Every tensor there is: what a request may bring, and what an answer may have.

use super::tensor::Datatype;

/// An input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Input {
    pub(crate) name: &'static str,
    pub(crate) datatype: Datatype,
    /// Dimensions; -1 for one of any size.
    pub(crate) dims: &'static [i64],
    pub(crate) meaning: Meaning,
}

/// What an input is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The text to continue.
    Text,
    /// The tokens to continue.
    Tokens,
    /// An option of one element, or a JSON object of several.
    Option,
    /// An option of any number of elements.
    List,
}

const fn input(name: &'static str, datatype: Datatype, dims: &'static [i64], meaning: Meaning) -> Input {
    Input { name, datatype, dims, meaning }
}

const fn option(name: &'static str, datatype: Datatype) -> Input {
    input(name, datatype, &[1], Meaning::Option)
}

/// The inputs: a prompt as text or as tokens, and options by the names that servers of language models have for them.
/// An option's type is a recommendation; what matters is its value.
pub(crate) const INPUTS: [Input; 43] = [
    input("text_input", Datatype::Bytes, &[1], Meaning::Text),
    input("input0", Datatype::Uint32, &[-1], Meaning::Tokens),
    input("input_ids", Datatype::Int32, &[-1], Meaning::Tokens),
    option("stream", Datatype::Bool),
    option("sampling_parameters", Datatype::Bytes),
    option("exclude_input_in_output", Datatype::Bool),
    option("max_tokens", Datatype::Int32),
    option("max_new_tokens", Datatype::Int32),
    option("min_tokens", Datatype::Int32),
    option("temperature", Datatype::Fp32),
    option("top_k", Datatype::Int32),
    option("top_p", Datatype::Fp32),
    option("min_p", Datatype::Fp32),
    option("typical_p", Datatype::Fp32),
    option("do_sample", Datatype::Bool),
    option("seed", Datatype::Uint64),
    option("repetition_penalty", Datatype::Fp32),
    option("presence_penalty", Datatype::Fp32),
    option("frequency_penalty", Datatype::Fp32),
    option("length_penalty", Datatype::Fp32),
    option("beam_width", Datatype::Int32),
    option("num_return_sequences", Datatype::Int32),
    option("n", Datatype::Int32),
    option("best_of", Datatype::Int32),
    input("stop_words", Datatype::Bytes, &[-1], Meaning::List),
    input("stop", Datatype::Bytes, &[-1], Meaning::List),
    input("bad_words", Datatype::Bytes, &[-1], Meaning::List),
    input("stop_token_ids", Datatype::Int32, &[-1], Meaning::List),
    option("end_id", Datatype::Int32),
    option("pad_id", Datatype::Int32),
    option("ignore_eos", Datatype::Bool),
    option("skip_special_tokens", Datatype::Bool),
    option("include_stop_str_in_output", Datatype::Bool),
    option("watermark", Datatype::Bool),
    option("logprobs", Datatype::Int32),
    option("return_finish_reason", Datatype::Bool),
    option("return_cumulative_logprob", Datatype::Bool),
    option("return_logprobs", Datatype::Bool),
    option("return_log_probs", Datatype::Bool),
    option("return_num_input_tokens", Datatype::Bool),
    option("return_num_output_tokens", Datatype::Bool),
    option("guided_decoding_guide_type", Datatype::Bytes),
    option("guided_decoding_guide", Datatype::Bytes),
];

/// The input of that name.
pub(crate) fn find_input(name: &str) -> Option<&'static Input> {
    INPUTS.iter().find(|input| input.name == name)
}

/// An output. Those of one dimension have an element for each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputName {
    /// The texts; in a stream what is new of each.
    TextOutput,
    /// The token ids, a row for each sequence, the shorter ones padded.
    Output0,
    /// The same, signed.
    OutputIds,
    /// How many ids of each row are the sequence's.
    SequenceLength,
    /// Why each sequence ended; `None` while it goes on.
    FinishReason,
    /// Natural logarithms of the probabilities of the sequences so far.
    CumulativeLogprob,
    /// The same, by another name.
    CumLogProbs,
    /// For each sequence JSON: of each new token, itself and the likeliest in its place.
    Logprobs,
    /// Natural logarithms of the probabilities of the new tokens, a row for each sequence, the shorter ones padded.
    OutputLogProbs,
    /// Tokens of the prompt.
    NumInputTokens,
    /// Tokens generated; in a stream those that are new.
    NumOutputTokens,
}

impl OutputName {
    /// Every output.
    pub(crate) const ALL: [Self; 11] = [
        Self::TextOutput,
        Self::Output0,
        Self::OutputIds,
        Self::SequenceLength,
        Self::FinishReason,
        Self::CumulativeLogprob,
        Self::CumLogProbs,
        Self::Logprobs,
        Self::OutputLogProbs,
        Self::NumInputTokens,
        Self::NumOutputTokens,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::TextOutput => "text_output",
            Self::Output0 => "output0",
            Self::OutputIds => "output_ids",
            Self::SequenceLength => "sequence_length",
            Self::FinishReason => "finish_reason",
            Self::CumulativeLogprob => "cumulative_logprob",
            Self::CumLogProbs => "cum_log_probs",
            Self::Logprobs => "logprobs",
            Self::OutputLogProbs => "output_log_probs",
            Self::NumInputTokens => "num_input_tokens",
            Self::NumOutputTokens => "num_output_tokens",
        }
    }

    /// The output of that name.
    pub(crate) fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|output| output.name() == name)
    }

    pub(crate) fn datatype(self) -> Datatype {
        match self {
            Self::TextOutput | Self::FinishReason | Self::Logprobs => Datatype::Bytes,
            Self::OutputIds | Self::SequenceLength => Datatype::Int32,
            Self::Output0 | Self::NumInputTokens | Self::NumOutputTokens => Datatype::Uint32,
            Self::CumulativeLogprob | Self::CumLogProbs | Self::OutputLogProbs => Datatype::Fp32,
        }
    }

    /// Dimensions; -1 for one of any size.
    pub(crate) fn dims(self) -> &'static [i64] {
        match self {
            Self::Output0 | Self::OutputIds | Self::OutputLogProbs => &[-1, -1],
            Self::NumInputTokens => &[1],
            _ => &[-1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_once() {
        for (index, input) in INPUTS.iter().enumerate() {
            assert!(INPUTS[..index].iter().all(|other| other.name != input.name), "{}", input.name);
        }
        for output in OutputName::ALL {
            assert_eq!(OutputName::find(output.name()), Some(output));
        }
    }
}
