//! Messages, in the form that templates read.

use super::*;

fn said(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn messages(place: &Place, list: Value) -> Result<Vec<Value>, String> {
    place.read(&json!({"messages": list})).map(|request| chat(&request).messages.clone())
}

#[test]
fn a_chat_is_messages_of_strings_or_text_parts() {
    let request = Place::plain()
        .read(&json!({"model": "m", "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "ann"},
            {"role": "assistant", "content": null},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "refusal": "Never."},
        ]}))
        .unwrap();
    assert_eq!(request.model.as_deref(), Some("m"));
    let mut named = said("user", "Hello");
    named["name"] = json!("ann");
    let messages = vec![
        said("system", "Be brief."),
        named,
        said("assistant", ""),
        said("assistant", "No."),
        said("assistant", "Never."),
    ];
    assert_eq!(request.prompt, Prompt::Chat(Box::new(Chat { messages, ..Chat::default() })));
}

fn history() -> Value {
    json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"location\": \"Bonn\"}"}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    ])
}

#[test]
fn calls_and_their_results_are_given_back() {
    let place = Place::templated(HERMES, &[]);
    assert_eq!(
        messages(&place, history()).unwrap(),
        [
            said("user", "Weather?"),
            json!({"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "get_weather", "arguments": {"location": "Bonn"}}, "id": "call_1"},
                {"type": "function", "function": {"name": "now", "arguments": {}}, "id": "call_2"},
            ]}),
            json!({"role": "tool", "content": "sunny", "tool_call_id": "call_1"}),
            json!({"role": "tool", "content": "noon", "tool_call_id": "call_2"}),
        ]
    );
    // The older form of the same.
    let older = json!([
        {"role": "assistant", "content": "Hm.", "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
        {"role": "assistant", "content": "x", "reasoning_content": "thought"},
    ]);
    assert_eq!(
        messages(&place, older).unwrap(),
        [
            json!({"role": "assistant", "content": "Hm.", "tool_calls": [
                {"type": "function", "function": {"name": "now", "arguments": {}}},
            ]}),
            json!({"role": "tool", "content": "noon", "name": "now"}),
            json!({"role": "assistant", "content": "x", "reasoning_content": "thought"}),
        ]
    );
}

#[test]
fn a_template_without_tools_is_told_of_them_in_words_that_it_knows() {
    let told = messages(&Place::plain(), history()).unwrap();
    assert_eq!(
        told,
        [
            said("user", "Weather?"),
            said(
                "assistant",
                "<tool_call>\n{\"name\":\"get_weather\",\"arguments\":{\"location\":\"Bonn\"}}\n</tool_call>\n\
                 <tool_call>\n{\"name\":\"now\",\"arguments\":{}}\n</tool_call>",
            ),
            said("user", "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>",),
        ]
    );
}

#[test]
fn mistral_takes_ids_of_nine_letters_and_digits() {
    let place = Place::templated("{% if tools %}[TOOL_CALLS]{% endif %}{{ messages|length }}", &[]);
    let short = messages(&place, history()).unwrap();
    let call = short[1]["tool_calls"][0]["id"].as_str().unwrap();
    assert_eq!(short[2]["tool_call_id"], call);
    assert_ne!(short[3]["tool_call_id"], call);
    assert!(call.len() == 9 && call.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{call}");
    let kept = json!([{"role": "tool", "tool_call_id": "abcDEF123", "content": "x"}]);
    assert_eq!(messages(&place, kept).unwrap()[0]["tool_call_id"], "abcDEF123");
}

#[test]
fn a_fault_names_its_message() {
    let message = |message: Value| json!({"messages": [message]});
    let call = |call: Value| message(json!({"role": "assistant", "tool_calls": [call]}));
    let place = Place::plain();
    for (body, start) in [
        (json!({}), "messages: is required"),
        (json!({"messages": []}), "messages: expected at least 1 message"),
        (json!({"messages": "hi"}), "messages: expected a list of messages"),
        (message(json!("hi")), "messages[0]: expected an object"),
        (message(json!({"content": "x"})), "messages[0].role: is required"),
        (message(json!({"role": "robot", "content": "x"})), "messages[0].role: expected one of"),
        (message(json!({"role": "user"})), "messages[0].content: is required"),
        (message(json!({"role": "user", "content": 5})), "messages[0].content: expected a string or"),
        (
            message(json!({"role": "user", "content": [
                {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]})),
            "messages[0].content[1].type: this model takes text only, got a part of type \"image_url\"",
        ),
        (
            message(json!({"role": "user", "content": [{"type": "input_audio"}]})),
            "messages[0].content[0].type: this model takes text only",
        ),
        (
            message(json!({"role": "assistant", "audio": {"id": "x"}})),
            "messages[0].audio: this model takes text only",
        ),
        (
            message(json!({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]})),
            "messages[0].tool_calls: is allowed in assistant messages alone",
        ),
        (
            message(json!({"role": "user", "content": "x", "tool_call_id": "x"})),
            "messages[0].tool_call_id: is allowed in tool messages alone",
        ),
        (
            message(json!({"role": "tool", "content": "x", "tool_call_id": ""})),
            "messages[0].tool_call_id: expected 1 to 512 characters, got 0",
        ),
        (message(json!({"role": "user", "content": "x", "name": 5})), "messages[0].name: expected a string"),
        (
            message(json!({"role": "assistant", "reasoning_content": 5})),
            "messages[0].reasoning_content: expected a string",
        ),
        (message(json!({"role": "assistant", "refusal": 5})), "messages[0].refusal: expected a string"),
        (
            message(json!({"role": "assistant", "function_call": {"arguments": "{}"}})),
            "messages[0].function_call.name: is required",
        ),
        (message(json!({"role": "assistant", "tool_calls": {}})), "messages[0].tool_calls: expected a list"),
        (call(json!({})), "messages[0].tool_calls[0].function: is required"),
        (call(json!({"function": {}})), "messages[0].tool_calls[0].function.name: is required"),
        (
            call(json!({"type": "custom"})),
            "messages[0].tool_calls[0].type: expected \"function\", got \"custom\"",
        ),
        (
            call(json!({"function": {"name": "f", "arguments": 5}})),
            "messages[0].tool_calls[0].function.arguments: expected a string",
        ),
        (
            call(json!({"function": {"name": "a b"}})),
            "messages[0].tool_calls[0].function.name: expected 1 to 64 of",
        ),
        (
            call(json!({"id": "", "function": {"name": "f"}})),
            "messages[0].tool_calls[0].id: expected 1 to 512",
        ),
    ] {
        let fault = place.read(&body).unwrap_err();
        assert!(fault.starts_with(start), "{body}: {fault}");
    }
    let late = json!({"messages": [said("user", "x"), said("system", "y")]});
    assert!(place.read(&late).is_ok());
    let fault = Place::mlc().read(&late).unwrap_err();
    assert!(
        fault.starts_with("messages[1].role: expected a system message at the beginning alone"),
        "{fault}"
    );
}
