//! The request body of `/v1/chat/completions`.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::chat_plan::{Plan, plan};
use super::chat_response::Wanted;
use super::logprobs::Spelling;
use super::{ChatWriter, chat_format, chat_messages, chat_tools, parameters};
use crate::Config;
use crate::config::Dialect;
use crate::dialect::fields::{Fields, Integers, unexpected};
use crate::dialect::{Call, sampling};
use crate::domain::{Chat, FieldNames, MaxTokens, Prompt, Request, Tail};
use crate::fault::Fault;
use crate::models::Model;

const ROUTE: &str = "/v1/chat/completions";

/// Most characters of a template that a client sends.
const TEMPLATE_CHARS_MAX: usize = 64 << 10;

/// Where a call arrives.
pub(crate) struct Setting<'a> {
    pub(crate) config: &'a Config,
    /// The model of that name, or the only one.
    pub(crate) model: &'a FindModel<'a>,
}

type FindModel<'a> = dyn Fn(Option<&str>) -> Result<Arc<Model>, Fault> + 'a;

/// Reads a call.
pub(crate) fn parse(body: &[u8], setting: &Setting<'_>) -> Result<Call<ChatWriter>, Fault> {
    let config = setting.config;
    let mlc = config.dialect == Dialect::Mlc;
    let mut fields = Fields::parse(body, Integers::Whole)?;
    let messages = chat_messages::read(fields.require("messages")?, config)?;
    let (max_tokens, max_tokens_field) = max_tokens(&mut fields, mlc)?;
    let names = FieldNames { prompt: "messages", max_tokens: max_tokens_field, ..FieldNames::PLAIN };
    let mut request = Request::new(Prompt::Chat(Box::default()), names);
    request.max_tokens = max_tokens;
    parameters::read(&mut fields, &mut request)?;
    let count = parameters::choices(&mut fields)?;
    (request.n, request.best_of) = (count, count);
    let (stream, usage) = parameters::stream(&mut fields, ROUTE)?;
    let logprobs = logprobs(&mut fields)?;
    request.sampling.logprobs = logprobs;
    request.sampling.prompt_logprobs = parameters::prompt_logprobs(&mut fields, stream)?;
    let tools = chat_tools::read(&mut fields)?;
    let format = chat_format::read(&mut fields)?;
    check_modalities(&mut fields)?;
    debugged(&mut fields, &mut request, mlc)?;
    let effort = fields.string("reasoning_effort")?;
    let mut chat = chat(&mut fields, messages, config)?;
    let prefix = echo(&mut fields, &chat)?;
    let reasoning = fields.flag("include_reasoning")?.unwrap_or(true);
    let by_id = fields.flag("return_tokens_as_token_ids")?.unwrap_or(false);
    let token_ids = fields.flag("return_token_ids")?.unwrap_or(false);
    request.prompt_ids = token_ids;
    fields.finish(ROUTE);

    let model = (setting.model)(request.model.as_deref())?;
    let template = chat.template.as_deref().or(model.text.chat_template()).unwrap_or_default();
    think_hard(&mut chat.variables, effort.as_deref(), template);
    let plan = plan(&mut chat, &tools, format, &model.text, config);
    apply(&plan, &mut request);
    request.prompt = Prompt::Chat(Box::new(chat));
    let wanted = Wanted {
        dialect: config.dialect,
        count,
        usage,
        logprobs: logprobs.map(|top| top as usize),
        spelling: if by_id { Spelling::Id } else { Spelling::Text },
        prompt_logprobs: request.sampling.prompt_logprobs.is_some(),
        token_ids,
        reasoning,
        legacy: tools.legacy,
        prefix,
        model: request.model.clone().filter(|_| mlc),
        plan,
    };
    Ok(Call { requests: vec![request], writer: ChatWriter::new(wanted), stream })
}

/// What the plan asks of the engine.
fn apply(plan: &Plan, request: &mut Request) {
    if let Some((grammar, field)) = &plan.grammar {
        request.sampling.grammar = Some(grammar.clone());
        request.names.grammar = field;
    }
    request.skip_special_tokens &= !plan.shows_special;
}

/// The most tokens, and the field that said so: the newer name wins. MLC ends an answer where the context ends.
fn max_tokens(fields: &mut Fields, mlc: bool) -> Result<(MaxTokens, &'static str), Fault> {
    let old = fields.integer("max_tokens", parameters::COUNT)?;
    let new = fields.integer("max_completion_tokens", parameters::COUNT)?;
    let most =
        |count: u64| if mlc { MaxTokens::Clamp(count as usize) } else { MaxTokens::Exact(count as usize) };
    Ok(match (new, old) {
        (Some(count), _) => (most(count), "max_completion_tokens"),
        (None, Some(count)) => (most(count), "max_tokens"),
        (None, None) => (MaxTokens::Fill, "max_tokens"),
    })
}

/// How many alternatives to each token, where log-probabilities are asked for.
fn logprobs(fields: &mut Fields) -> Result<Option<u32>, Fault> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = sampling::logprobs(fields, "top_logprobs")?;
    if !wanted && top.is_some_and(|top| top > 0) {
        return Err(fields.fault("top_logprobs", "is allowed only when logprobs is true"));
    }
    Ok(wanted.then_some(top.unwrap_or(0)))
}

/// Text is what this model answers with.
fn check_modalities(fields: &mut Fields) -> Result<(), Fault> {
    let modalities = sampling::strings(fields, "modalities")?;
    if let Some(other) = modalities.iter().find(|modality| *modality != "text") {
        return Err(fields.fault("modalities", format!("this model answers in text only, got {other:?}")));
    }
    fields.take("audio");
    Ok(())
}

/// MLC's `debug_config`, of which `ignore_eos` has a meaning here: nothing but the length ends the text.
fn debugged(fields: &mut Fields, request: &mut Request, mlc: bool) -> Result<(), Fault> {
    let Some(mut debug) = fields.object("debug_config")? else { return Ok(()) };
    let ignore = debug.flag("ignore_eos")?.unwrap_or(false);
    debug.finish(ROUTE);
    if ignore && mlc {
        request.stop.ignore_eos = true;
        request.stop.strings.clear();
        request.stop.token_ids.clear();
    }
    Ok(())
}

/// The chat, with vLLM's fields on how to render it.
pub(super) fn chat(fields: &mut Fields, messages: Vec<Value>, config: &Config) -> Result<Chat, Fault> {
    let template = fields.string("chat_template")?;
    if let Some(template) = &template {
        if !config.request_chat_template {
            let message =
                "is not taken from requests here; the server's option request_chat_template allows it";
            return Err(fields.fault("chat_template", message));
        }
        let count = template.chars().count();
        if count > TEMPLATE_CHARS_MAX {
            let message = format!("expected at most {TEMPLATE_CHARS_MAX} characters, got {count}");
            return Err(fields.fault("chat_template", message));
        }
    }
    let mut variables = Map::new();
    if let Some(documents) = fields.list("documents")? {
        if let Some((index, other)) = documents.iter().enumerate().find(|(_, value)| !value.is_object()) {
            return Err(unexpected(&fields.path(&format!("documents[{index}]")), "an object", other));
        }
        variables.insert("documents".to_owned(), Value::Array(documents));
    }
    match fields.take("chat_template_kwargs") {
        None => {}
        Some(Value::Object(given)) => variables.extend(given),
        Some(other) => return Err(unexpected("chat_template_kwargs", "an object", &other)),
    }
    let prompts = fields.flag("add_generation_prompt")?;
    let continues = fields.flag("continue_final_message")?.unwrap_or(false);
    let tail = match (prompts, continues) {
        (Some(true), true) => {
            let message = "is not allowed when add_generation_prompt is true";
            return Err(fields.fault("continue_final_message", message));
        }
        (_, true) => Tail::Continue,
        (Some(false), false) => Tail::Nothing,
        _ => Tail::Assistant,
    };
    Ok(Chat { messages, tools: None, template, variables, tail })
}

/// What is to come before the answer: with `echo`, the last message if it is the assistant's.
fn echo(fields: &mut Fields, chat: &Chat) -> Result<String, Fault> {
    let wanted = fields.flag("echo")?.unwrap_or(false);
    let last = chat.messages.last().filter(|message| wanted && message["role"] == "assistant");
    let text = last.and_then(|message| message["content"].as_str()).unwrap_or_default();
    // A message that goes on does so from its last word.
    Ok(if chat.tail == Tail::Continue { text.trim_end() } else { text }.to_owned())
}

/// How hard to think, in the words of templates: the effort itself, and whether to think at all.
fn think_hard(variables: &mut Map<String, Value>, effort: Option<&str>, template: &str) {
    let Some(effort) = effort else { return };
    if template.contains("reasoning_effort") {
        variables.entry("reasoning_effort").or_insert_with(|| json!(effort));
    }
    if template.contains("enable_thinking") {
        variables.entry("enable_thinking").or_insert_with(|| json!(effort != "none"));
    }
}
