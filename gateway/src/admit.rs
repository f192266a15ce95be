//! Fits a request to a model: text into tokens, lengths against the context.

use std::sync::Arc;

use checkpoint::{Encode, Text};
use proto::{Attempt, Generation, RequestId, SamplingParams, StopConditions, TokenId};
use serde_json::Value;

use crate::Config;
use crate::answers::Prepared;
use crate::domain::{Chat, FieldNames, MaxTokens, Prompt, Request, Stop, Tail, Truncate};
use crate::fault::Fault;
use crate::models::Model;
use crate::service::draw_seed;

/// Most stop strings.
pub(crate) const STOP_STRINGS_MAX: usize = 1024;
/// Most characters of all stop strings together.
const STOP_CHARS_MAX: usize = 32 << 10;
/// Most stop token ids.
const STOP_TOKENS_MAX: usize = 1024;

/// Most tokens of a bad word, and most bad words.
const BAD_WORD_TOKENS_MAX: usize = 64;
const BAD_WORDS_MAX: usize = 1024;

/// Tokenises and checks. Takes time in proportion to the prompt, so it has no place on a thread of the runtime.
pub(crate) fn admit(
    request: Request,
    model: &Arc<Model>,
    config: &Config,
    id: RequestId,
) -> Result<Prepared, Fault> {
    let names = &request.names;
    check_stop(&request.stop, names)?;
    let encoded = encode(&request, model)?;
    let vocab = model.description.vocab_size;
    check_ids(&encoded.tokens, vocab, names.prompt)?;
    check_ids(&request.sampling.allowed_token_ids, vocab, names.allowed_token_ids)?;
    let biased: Vec<TokenId> = request.sampling.logit_bias.iter().map(|(id, _)| *id).collect();
    check_ids(&biased, vocab, names.logit_bias)?;
    check_grammar(&request, model)?;
    let prompt_text = request.echo.then(|| match &request.prompt {
        Prompt::Text(text) if request.truncate.is_none() => text.clone(),
        _ => model.text.decode(&encoded.tokens, request.skip_special_tokens),
    });
    let max_tokens = fit(&encoded, request.max_tokens, &Limits::new(model, config), names)?;
    let min_tokens = request.stop.min_tokens;
    if min_tokens > max_tokens {
        let message = format!("expected at most the {max_tokens} tokens that there may be, got {min_tokens}");
        return Err(Fault::field(names.min_tokens, message));
    }
    let eos_ids = if request.stop.ignore_eos { Vec::new() } else { model.text.eos_ids().to_vec() };
    let mut sampling =
        SamplingParams { seed: request.seed.unwrap_or_else(draw_seed), ..request.sampling.clone() };
    sampling.bad_words.extend(bad_words(&request.bad_words, model, names)?);
    let generation = Generation {
        request: id,
        attempt: Attempt::default(),
        model: model.description.name.clone(),
        generated: encoded.generated,
        tokens: encoded.tokens,
        sampling,
        stop: StopConditions {
            max_tokens: max_tokens.max(1),
            eos_ids,
            stop_token_ids: request.stop.token_ids.clone(),
            min_tokens,
        },
        time_left: std::time::Duration::ZERO,
        probe: false,
        beside: None,
        session: request.session.clone(),
        priority: request.priority,
    };
    let model = model.clone();
    Ok(Prepared { request, model, generation, prompt_text, discard: max_tokens == 0 })
}

/// Refuses a grammar that the engines would refuse, in their words.
fn check_grammar(request: &Request, model: &Model) -> Result<(), Fault> {
    let Some(grammar) = &request.sampling.grammar else { return Ok(()) };
    let fault = |message: String| Fault::field(request.names.grammar, message);
    let Some(grammars) = &model.grammars else {
        return Err(fault("this model's outputs cannot be held to a grammar".to_owned()));
    };
    grammars.compile(grammar).map(drop).map_err(|error| fault(error.to_string()))
}

/// The tokens of texts that must not appear: as the beginning of a word, and within one.
fn bad_words(texts: &[String], model: &Model, names: &FieldNames) -> Result<Vec<Vec<TokenId>>, Fault> {
    if texts.len() > BAD_WORDS_MAX {
        let message = format!("expected at most {BAD_WORDS_MAX} texts, got {}", texts.len());
        return Err(Fault::field(names.bad_words, message));
    }
    let mut words: Vec<Vec<TokenId>> = Vec::new();
    for text in texts {
        if text.trim().is_empty() {
            return Err(Fault::field(
                names.bad_words,
                "expected texts of at least 1 character, got a blank one",
            ));
        }
        for form in [text.trim_start().to_owned(), format!(" {}", text.trim_start())] {
            let word = model
                .text
                .encode(&form, Encode::default())
                .map_err(|error| Fault::field(names.bad_words, error.to_string()))?;
            if word.len() > BAD_WORD_TOKENS_MAX {
                let message =
                    format!("expected texts of at most {BAD_WORD_TOKENS_MAX} tokens, got {}", word.len());
                return Err(Fault::field(names.bad_words, message));
            }
            if !word.is_empty() && !words.contains(&word) {
                words.push(word);
            }
        }
    }
    Ok(words)
}

/// The limits that every API has, since what finds a stop string grows with all of them together.
fn check_stop(stop: &Stop, names: &FieldNames) -> Result<(), Fault> {
    let count = stop.strings.len();
    if count > STOP_STRINGS_MAX {
        let message = format!("expected at most {STOP_STRINGS_MAX} strings, got {count}");
        return Err(Fault::field(names.stop, message));
    }
    if stop.strings.iter().any(String::is_empty) {
        return Err(Fault::field(names.stop, "expected strings of at least 1 character, got an empty one"));
    }
    let chars: usize = stop.strings.iter().map(|string| string.chars().count()).sum();
    if chars > STOP_CHARS_MAX {
        let message = format!("expected at most {STOP_CHARS_MAX} characters in all, got {chars}");
        return Err(Fault::field(names.stop, message));
    }
    let count = stop.token_ids.len();
    if count > STOP_TOKENS_MAX {
        let message = format!("expected at most {STOP_TOKENS_MAX} token ids, got {count}");
        return Err(Fault::field(names.stop_token_ids, message));
    }
    Ok(())
}

struct Encoded {
    tokens: Vec<TokenId>,
    /// How many at the end were generated before.
    generated: usize,
}

fn encode(request: &Request, model: &Model) -> Result<Encoded, Fault> {
    let (text, names) = (&model.text, &request.names);
    let fault = |error: checkpoint::Error| Fault::field(names.prompt, error.to_string());
    let may_be_long = request.truncate.is_some();
    let encode = |prompt: &str, add_bos: bool| {
        if !may_be_long {
            check_bytes(prompt, model, names)?;
        }
        text.encode(prompt, Encode { add_bos, parse_special: true }).map_err(fault)
    };
    let (mut tokens, generated) = match &request.prompt {
        Prompt::Tokens(tokens) => (tokens.clone(), 0),
        Prompt::Resumed { tokens, generated } => (tokens.clone(), *generated),
        Prompt::Text(prompt) => (encode(prompt, true)?, 0),
        // A template writes the beginning-of-sequence token itself where the model wants one.
        Prompt::Chat(chat) => (encode(&render(chat, text).map_err(fault)?, false)?, 0),
    };
    if let Some(truncate) = request.truncate {
        cut(&mut tokens, truncate);
    }
    tokens.shrink_to_fit();
    if tokens.len() <= generated {
        return Err(Fault::field(names.prompt, "expected at least 1 token, got none"));
    }
    Ok(Encoded { tokens, generated })
}

/// Keeps the tokens that are asked for.
fn cut(tokens: &mut Vec<TokenId>, truncate: Truncate) {
    match truncate {
        Truncate::First(count) => tokens.truncate(count),
        Truncate::Last(count) => drop(tokens.drain(..tokens.len().saturating_sub(count))),
    }
}

/// The text of a chat.
pub(crate) fn render(chat: &Chat, text: &Text) -> Result<String, checkpoint::Error> {
    let mut variables = chat.variables.clone();
    variables.insert("add_generation_prompt".to_owned(), Value::Bool(chat.tail == Tail::Assistant));
    if let Some(tools) = &chat.tools {
        variables.insert("tools".to_owned(), tools.clone());
    }
    let (messages, variables) = (Value::Array(chat.messages.clone()), Value::Object(variables));
    let mut rendered = match &chat.template {
        Some(template) => text.render_chat_by(template, &messages, &variables)?,
        None => text.render_chat(&messages, &variables)?,
    };
    if chat.tail == Tail::Continue {
        // What the template writes after the last message's own words ends the message, which is to go on.
        let last =
            chat.messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default().trim();
        if let Some(at) = rendered.rfind(last) {
            rendered.truncate(at + last.len());
        }
    }
    Ok(rendered)
}

/// Refuses a text that cannot fit, however it is tokenised, before time is spent on that.
fn check_bytes(text: &str, model: &Model, names: &FieldNames) -> Result<(), Fault> {
    let context = model.description.context_len;
    let bytes_max = context.saturating_mul(model.token_bytes_max);
    if text.len() <= bytes_max {
        return Ok(());
    }
    let message = format!(
        "the prompt has {} bytes, and the model's context of {context} tokens never holds more than {bytes_max}",
        text.len()
    );
    Err(Fault::Context { field: names.prompt.to_owned(), message })
}

fn check_ids(tokens: &[TokenId], vocab: usize, field: &str) -> Result<(), Fault> {
    match tokens.iter().find(|id| **id as usize >= vocab) {
        None => Ok(()),
        Some(id) => Err(Fault::field(field, format!("expected token ids below {vocab}, got {id}"))),
    }
}

/// How long a sequence may be.
struct Limits {
    /// Prompt and output together.
    context: usize,
    /// The prompt.
    input: usize,
    /// The output.
    output: usize,
}

impl Limits {
    fn new(model: &Model, config: &Config) -> Self {
        let context = config.max_seq_len.unwrap_or(usize::MAX).min(model.description.context_len);
        Self {
            context,
            input: config.input_tokens_max().unwrap_or(usize::MAX).min(context.saturating_sub(1)),
            output: config.max_iter_times.unwrap_or(usize::MAX),
        }
    }
}

/// Generated tokens in all, those from before included.
fn fit(encoded: &Encoded, asked: MaxTokens, limits: &Limits, names: &FieldNames) -> Result<usize, Fault> {
    let Encoded { tokens, generated } = encoded;
    let (context, prompt) = (limits.context, tokens.len() - generated);
    if tokens.len() >= context {
        let message = format!(
            "the prompt has {} tokens, and the model's context of {context} tokens must leave room for 1 more",
            tokens.len()
        );
        return Err(Fault::Context { field: names.prompt.to_owned(), message });
    }
    if prompt > limits.input {
        let message = format!("the prompt has {prompt} tokens, and the most is {}", limits.input);
        return Err(Fault::Context { field: names.prompt.to_owned(), message });
    }
    let room = context - prompt;
    let max_tokens = match asked {
        MaxTokens::Fill => room,
        MaxTokens::Clamp(asked) => asked.min(room),
        MaxTokens::Exact(asked) if asked <= room => asked,
        MaxTokens::Exact(asked) => {
            let message = format!(
                "the prompt has {prompt} tokens and {asked} are asked for, {} in all, \
                 more than the model's context of {context} tokens",
                prompt.saturating_add(asked)
            );
            return Err(Fault::Context { field: names.max_tokens.to_owned(), message });
        }
    };
    let max_tokens = max_tokens.min(limits.output);
    if *generated > 0 && max_tokens <= *generated {
        let message = format!("expected more than the {generated} tokens generated before, got {max_tokens}");
        return Err(Fault::field(names.max_tokens, message));
    }
    Ok(max_tokens)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::Grammar;
    use serde_json::json;

    use super::*;

    const NAMES: FieldNames = FieldNames { stop: "the_stop", stop_token_ids: "the_ids", ..FieldNames::PLAIN };

    fn admitted(request: &Request) -> Result<Prepared, Fault> {
        admitted_by(request, &Config::default())
    }

    fn admitted_by(request: &Request, config: &Config) -> Result<Prepared, Fault> {
        let started = crate::dialect::tests::started("m", 1, None);
        admit(request.clone(), &started.model, config, RequestId("r".into()))
    }

    fn of(request: impl FnOnce(&mut Request)) -> Request {
        let mut changed = Request::new(Prompt::Text("xyz".into()), NAMES);
        request(&mut changed);
        changed
    }

    #[test]
    fn configured_limits_bound_prompt_and_output() {
        let config = |max_seq_len, max_input_token_len, max_iter_times| Config {
            max_seq_len,
            max_input_token_len,
            max_iter_times,
            ..Config::default()
        };
        let tokens = |config: &Config, max_tokens| {
            let admitted = admitted_by(&of(|r| r.max_tokens = max_tokens), config);
            admitted.map(|prepared| prepared.generation.stop.max_tokens).map_err(|fault| fault.to_string())
        };
        assert_eq!(tokens(&config(Some(10), None, None), MaxTokens::Fill), Ok(7));
        assert_eq!(tokens(&config(Some(10), None, Some(5)), MaxTokens::Clamp(20)), Ok(5));
        assert_eq!(tokens(&config(None, None, Some(5)), MaxTokens::Exact(6)), Ok(5));
        let error = tokens(&config(Some(10), None, None), MaxTokens::Exact(8)).unwrap_err();
        assert!(error.starts_with("max_tokens: ") && error.contains("context of 10 tokens"), "{error}");
        let error = tokens(&config(None, Some(2), None), MaxTokens::Fill).unwrap_err();
        assert_eq!(error, "prompt: the prompt has 3 tokens, and the most is 2");
        let error = tokens(&config(Some(3), None, None), MaxTokens::Fill).unwrap_err();
        assert!(error.starts_with("prompt: "), "{error}");
    }

    #[test]
    fn what_the_model_must_know_is_held_against_it() {
        let fault = |request: &Request| admitted(request).err().expect("a fault").to_string();
        let vocab = admitted(&of(|_| {})).unwrap().model.description.vocab_size as u32;
        for (request, start) in [
            (of(|r| r.sampling.logit_bias = vec![(vocab, 1.0)]), "logit_bias: expected token ids below"),
            (
                of(|r| r.sampling.allowed_token_ids = vec![vocab]),
                "allowed_token_ids: expected token ids below",
            ),
            (
                of(|r| (r.stop.min_tokens, r.max_tokens) = (5, MaxTokens::Clamp(4))),
                "min_tokens: expected at most the 4",
            ),
            (of(|r| r.bad_words = vec![" ".into()]), "bad_words: expected texts of at least 1"),
            (
                of(|r| r.bad_words = vec!["x".repeat(65)]),
                "bad_words: expected texts of at most 64 tokens, got 65",
            ),
        ] {
            assert!(fault(&request).starts_with(start), "{}", fault(&request));
        }
        let words = admitted(&of(|r| r.bad_words = vec!["ab".into()])).unwrap().generation.sampling.bad_words;
        assert_eq!(words, [b"ab".map(u32::from).to_vec(), b" ab".map(u32::from).to_vec()]);
    }

    #[test]
    fn an_end_of_the_models_own_may_be_ignored() {
        let eos_ids = |ignore| admitted(&of(|r| r.stop.ignore_eos = ignore)).unwrap().generation.stop.eos_ids;
        assert!(!eos_ids(false).is_empty());
        assert_eq!(eos_ids(true), Vec::<TokenId>::new());
    }

    #[test]
    fn a_grammar_is_compiled_before_the_answer_begins() {
        let with = |grammar: Grammar| of(|r| r.sampling.grammar = Some(grammar));
        assert!(admitted(&with(Grammar::Regex("a+".into()))).is_ok());
        for grammar in [Grammar::Regex("(".into()), Grammar::JsonSchema("{\"type\":\"no\"}".into())] {
            let fault = admitted(&with(grammar)).err().expect("a fault").to_string();
            assert!(fault.starts_with("grammar: "), "{fault}");
        }
    }

    #[test]
    fn a_long_prompt_is_cut_where_asked() {
        for (truncate, kept) in
            [(Truncate::First(2), "xy"), (Truncate::Last(2), "yz"), (Truncate::Last(9), "xyz")]
        {
            let prepared = admitted(&of(|r| (r.truncate, r.echo) = (Some(truncate), true))).unwrap();
            assert_eq!(prepared.prompt_text.as_deref(), Some(kept));
            assert_eq!(prepared.generation.tokens.len(), kept.len());
        }
    }

    #[test]
    fn no_tokens_at_all_are_one_that_is_discarded() {
        let prepared = admitted(&of(|r| r.max_tokens = MaxTokens::Exact(0))).unwrap();
        assert_eq!((prepared.discard, prepared.generation.stop.max_tokens), (true, 1));
    }

    #[test]
    fn a_chat_may_end_within_its_last_message() {
        let started = crate::dialect::tests::started("m", 1, None);
        let text = &started.model.text;
        let chat = |tail| Chat {
            messages: vec![
                json!({"role": "user", "content": "Hi"}),
                json!({"role": "assistant", "content": "Hi the "}),
            ],
            tail,
            ..Chat::default()
        };
        let rendered = |chat: &Chat| render(chat, text).unwrap();
        assert!(rendered(&chat(Tail::Continue)).ends_with("Hi the"));
        let (nothing, assistant) = (rendered(&chat(Tail::Nothing)), rendered(&chat(Tail::Assistant)));
        assert!(assistant.starts_with(&nothing) && assistant.len() > nothing.len());
        let template = Some("{{ messages|length }}{{ bos_token }}{{ word }}".to_owned());
        let mut by_own = Chat { template, ..chat(Tail::Nothing) };
        by_own.variables.insert("word".into(), json!("!"));
        assert!(rendered(&by_own).starts_with('2') && rendered(&by_own).ends_with('!'));
    }

    #[test]
    fn stops_are_bounded_and_named_as_the_client_wrote_them() {
        let text = |strings: Vec<String>| Stop { strings, ..Stop::default() };
        let ids = |count: usize| Stop { token_ids: vec![7; count], ..Stop::default() };
        let request = |stop: Stop| Request { stop, ..Request::new(Prompt::Text("x".into()), NAMES) };
        for (stop, start) in [
            (text(vec!["a".into(), String::new()]), "the_stop: expected strings of at least 1 character"),
            (
                text(vec!["\u{e9}".repeat(32_768), "b".into()]),
                "the_stop: expected at most 32768 characters in all, got 32769",
            ),
            (text(vec!["a".into(); 1025]), "the_stop: expected at most 1024 strings, got 1025"),
            (ids(1025), "the_ids: expected at most 1024 token ids, got 1025"),
        ] {
            let fault = admitted(&request(stop)).err().expect("a fault").to_string();
            assert!(fault.starts_with(start), "{fault}");
        }
        for stop in [text(vec!["\u{e9}".repeat(32_768)]), text(vec!["a".into(); 1024]), ids(1024)] {
            assert_eq!(
                admitted(&request(stop.clone())).unwrap().generation.stop.stop_token_ids,
                stop.token_ids
            );
        }
    }

    #[test]
    fn a_text_that_cannot_fit_is_refused_before_it_is_tokenised() {
        // The longest token of the test's vocabulary is <|im_start|>.
        let most = 64 * "<|im_start|>".len();
        let chat = |text: String| Chat {
            messages: vec![json!({"role": "user", "content": text})],
            ..Chat::default()
        };
        for prompt in [Prompt::Text("x".repeat(most + 1)), Prompt::Chat(Box::new(chat("x".repeat(most))))] {
            let fault = admitted(&Request::new(prompt, NAMES)).err().expect("a fault");
            assert!(matches!(fault, Fault::Context { .. }), "{fault}");
            let fault = fault.to_string();
            assert!(fault.starts_with("prompt: the prompt has ") && fault.contains(" bytes, "), "{fault}");
        }
        // As many bytes as could fit, and they do not: told after tokenising.
        let fault = admitted(&Request::new(Prompt::Text("x".repeat(most)), NAMES)).err().expect("a fault");
        assert!(fault.to_string().starts_with("prompt: the prompt has 768 tokens"), "{fault}");
        let fits = "<|im_start|>".repeat(63);
        assert_eq!(admitted(&Request::new(Prompt::Text(fits), NAMES)).unwrap().generation.tokens.len(), 63);
    }

    #[test]
    fn a_deadline_is_never_longer_than_a_month() {
        let mut request = Request::new(Prompt::Text("x".into()), NAMES);
        let (second, month) = (Duration::from_secs(1), Duration::from_hours(30 * 24));
        for (timeout, default, expected) in [
            (None, second, second),
            (None, Duration::MAX, month),
            (Some(second), month, second),
            (Some(Duration::from_micros(1 << 63)), second, month),
            (Some(Duration::from_micros(u64::MAX)), second, month),
        ] {
            request.timeout = timeout;
            assert_eq!(request.deadline(default), expected);
        }
    }

    fn fitted(prompt: usize, generated: usize, asked: MaxTokens) -> Result<usize, String> {
        let encoded = Encoded { tokens: vec![0; prompt + generated], generated };
        let limits = Limits { context: 10, input: 9, output: usize::MAX };
        fit(&encoded, asked, &limits, &NAMES).map_err(|fault| fault.to_string())
    }

    #[test]
    fn lengths_are_held_against_the_context() {
        assert_eq!(fitted(4, 0, MaxTokens::Fill), Ok(6));
        assert_eq!(fitted(4, 0, MaxTokens::Clamp(20)), Ok(6));
        assert_eq!(fitted(4, 0, MaxTokens::Clamp(2)), Ok(2));
        assert_eq!(fitted(4, 0, MaxTokens::Exact(6)), Ok(6));
        let error = fitted(4, 0, MaxTokens::Exact(7)).unwrap_err();
        assert!(error.starts_with("max_tokens: ") && error.contains("4 tokens and 7"), "{error}");
        assert!(error.contains("context of 10 tokens"), "{error}");
        assert_eq!(fitted(9, 0, MaxTokens::Clamp(5)), Ok(1));
        let error = fitted(10, 0, MaxTokens::Clamp(5)).unwrap_err();
        assert!(error.starts_with("prompt: ") && error.contains("10 tokens"), "{error}");
    }

    #[test]
    fn tokens_generated_before_count_towards_the_most() {
        assert_eq!(fitted(3, 2, MaxTokens::Clamp(5)), Ok(5));
        assert!(fitted(3, 2, MaxTokens::Clamp(2)).unwrap_err().contains("more than the 2 tokens"));
    }
}
