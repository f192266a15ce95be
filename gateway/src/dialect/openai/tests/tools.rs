//! Tools: how a model is told of them, and what it may then write.

use proto::Grammar;

use super::*;
use crate::config::ToolParser;

/// The grammar that is asked of the engine, and the field that asked.
fn lark(place: &Place, extra: Value) -> Option<(String, &'static str)> {
    let request = place.with(extra).unwrap();
    request.sampling.grammar.map(|grammar| match grammar {
        Grammar::Lark(text) => (text.to_string(), request.names.grammar),
        other => panic!("a grammar in Lark expected, got {other:?}"),
    })
}

#[test]
fn a_template_that_knows_of_tools_is_given_them() {
    let request = Place::templated(HERMES, &[]).with(json!({"tools": tools()})).unwrap();
    let list = chat(&request).tools.clone().unwrap();
    assert_eq!(list[0], tools()[0]);
    assert_eq!(
        list[1],
        json!({"type": "function", "function": {"name": "now", "parameters":
            {"type": "object", "properties": {}, "additionalProperties": false}}})
    );
    assert_eq!(chat(&request).messages.len(), 1);
    assert_eq!(request.sampling.grammar, None);
}

#[test]
fn others_are_told_in_a_system_message() {
    let place = Place::plain();
    let request = place.with(json!({"tools": tools()})).unwrap();
    let Chat { messages, tools: list, .. } = chat(&request);
    assert_eq!((list, messages.len()), (&None, 2));
    let told = messages[0]["content"].as_str().unwrap();
    assert!(
        messages[0]["role"] == "system"
            && told.contains("\"name\":\"get_weather\"")
            && told.contains("<tool_call>")
    );
    let body = json!({"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}], "tools": tools()});
    let request = place.read(&body).unwrap();
    let told = chat(&request).messages[0]["content"].as_str().unwrap();
    assert!(told.starts_with("Be kind.\n\nYou may call functions"), "{told}");
    // A template that refuses a system message has it in the user's.
    let refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}";
    let request = Place::templated(refuses, &[]).with(json!({"tools": tools()})).unwrap();
    let messages = &chat(&request).messages;
    assert_eq!((messages.len(), &messages[0]["role"]), (1, &json!("user")));
    let text = messages[0]["content"].as_str().unwrap();
    assert!(text.starts_with("You may call functions") && text.ends_with("\n\nHi"), "{text}");
}

#[test]
fn the_form_is_the_templates_or_the_configured_one() {
    let told = |place: &Place| {
        let request = place.with(json!({"tools": tools()})).unwrap();
        chat(&request).messages[0]["content"].as_str().unwrap().to_owned()
    };
    let mut place = Place::plain();
    for (parser, sign) in [
        (ToolParser::Auto, "<tool_call>"),
        (ToolParser::Llama3Json, "\"parameters\": <arguments"),
        (ToolParser::Pythonic, "[function_name(argument=value"),
        (ToolParser::Mistral, "[TOOL_CALLS]"),
    ] {
        place.config.tool_parser = parser;
        assert!(told(&place).contains(sign), "{parser:?}");
    }
    assert!(told(&Place::mlc()).contains("[function_name(argument=value"));
    // A template with a form of its own, and one with tools in a form that is not known.
    let mut place = Place::templated(HERMES, &[]);
    place.config.tool_parser = ToolParser::Llama3Json;
    let (grammar, _) = lark(&place, json!({"tools": tools(), "tool_choice": "required"})).unwrap();
    assert!(grammar.contains("\\\"parameters\\\": ") && !grammar.contains("<tool_call>"), "{grammar}");
    let unknown = Place::templated("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", &[]);
    assert!(told(&unknown).contains("<tool_call>"));
}

#[test]
fn a_choice_decides_what_may_be_called_and_whether_something_must() {
    let place = Place::templated(HERMES, &[]);
    let names = |extra: Value| {
        let request = place.with(extra).unwrap();
        let list = chat(&request).tools.clone().unwrap_or_default();
        let names: Vec<String> = list
            .as_array()
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .map(|tool| tool["function"]["name"].as_str().unwrap().to_owned())
            .collect();
        (names.join(" "), request.sampling.grammar.is_some())
    };
    let choice = |choice: Value| json!({"tools": tools(), "tool_choice": choice});
    let now = json!({"type": "function", "function": {"name": "now"}});
    let allowed =
        |mode: &str| json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [now]}});
    for (extra, expected) in [
        (json!({"tools": tools()}), ("get_weather now", false)),
        (choice(json!("auto")), ("get_weather now", false)),
        (choice(json!("none")), ("", false)),
        (choice(json!("required")), ("get_weather now", true)),
        (choice(now.clone()), ("now", true)),
        (choice(allowed("auto")), ("now", false)),
        (choice(allowed("required")), ("now", true)),
        (json!({"tools": tools(), "parallel_tool_calls": false}), ("get_weather now", true)),
        (json!({"functions": [{"name": "f"}], "function_call": "none"}), ("", false)),
        (json!({"functions": [{"name": "f"}], "function_call": {"name": "f"}}), ("f", true)),
        (json!({"tool_choice": "none"}), ("", false)),
        (json!({"tool_choice": "auto", "parallel_tool_calls": true}), ("", false)),
    ] {
        assert_eq!(names(extra.clone()), (expected.0.to_owned(), expected.1), "{extra}");
    }
}

#[test]
fn grammars_are_those_of_the_form() {
    let place = Place::templated(HERMES, &[]);
    let named = json!({"type": "function", "function": {"name": "now"}});
    let (grammar, field) = lark(&place, json!({"tools": tools(), "tool_choice": named})).unwrap();
    assert_eq!(field, "tools");
    assert_eq!(
        grammar,
        "start: calls\n\
         f0: \"{\\\"name\\\": \\\"now\\\", \\\"arguments\\\": \"  %json {\"type\":\"object\",\"properties\":{},\
         \"additionalProperties\":false,\"x-guidance\":{\"item_separator\":\", \",\"key_separator\":\": \",\
         \"whitespace_flexible\":false}} \"}\"\n\
         f: f0\n\
         call: \"<tool_call>\" \"\\n\" f \"\\n\" \"</tool_call>\"\n\
         calls:  call \n"
    );
    // Several calls, but for one who wants one; and an answer in a format in place of calls.
    let required = json!({"tools": tools(), "tool_choice": "required"});
    assert!(lark(&place, required.clone()).unwrap().0.contains("(\"\\n\" call){0,31}"));
    let mut single = required;
    single["parallel_tool_calls"] = json!(false);
    assert!(!lark(&place, single).unwrap().0.contains("{0,"));
    let format = json!({"tools": tools(), "response_format": {"type": "json_object"}});
    let (grammar, field) = lark(&place, format).unwrap();
    assert!(grammar.contains("body: content | calls") && field == "response_format", "{grammar}");
    // A strict tool is called properly or not at all.
    let strict = json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true}}]});
    let (grammar, _) = lark(&place, strict).unwrap();
    assert!(grammar.contains("lead[lazy]: ANYTHING \"<tool_call>\""), "{grammar}");
}

#[test]
fn marks_that_are_special_tokens_are_shown_and_asked_for_by_id() {
    let template = "{% if tools %}[TOOL_CALLS]{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}";
    let place = Place::templated(template, &["[TOOL_CALLS]"]);
    let request = place.with(json!({"tools": tools(), "tool_choice": "required"})).unwrap();
    assert!(!request.skip_special_tokens);
    let Some(Grammar::Lark(grammar)) = request.sampling.grammar else { panic!("a grammar expected") };
    assert!(grammar.contains("<[261]> \"[\""), "{grammar}");
    assert!(place.with(json!({})).unwrap().skip_special_tokens);
    let plain = Place::templated(template, &[]).with(json!({"tools": tools()})).unwrap();
    assert!(plain.skip_special_tokens);
}

#[test]
fn a_grammar_leaves_room_for_thoughts() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A: {% if on %}<think>\n\
                    {% elif off %}<think>\n\n</think>\n{% endif %}{% endif %}";
    let place = Place::templated(template, &[]);
    let format = |kwargs: Value| {
        let extra = json!({"response_format": {"type": "json_object"}, "chat_template_kwargs": kwargs});
        place.with(extra).unwrap().sampling.grammar.unwrap()
    };
    let Grammar::Lark(may) = format(json!({})) else { panic!("a grammar in Lark expected") };
    assert!(may.starts_with("start: thoughts? content\n"), "{may}");
    let Grammar::Lark(begun) = format(json!({"on": true})) else { panic!("a grammar in Lark expected") };
    assert!(begun.starts_with("start: thoughts content\n"), "{begun}");
    assert_eq!(format(json!({"off": true})), Grammar::JsonSchema("{\"type\":\"object\"}".into()));
    let special = Place::templated(template, &["<think>", "</think>"]);
    let request = special.with(json!({"response_format": {"type": "json_object"}})).unwrap();
    assert!(!request.skip_special_tokens);
    let Some(Grammar::Lark(grammar)) = request.sampling.grammar else { panic!("a grammar expected") };
    assert!(grammar.contains("thoughts: <[261]> THOUGHT <[262]>"), "{grammar}");
}

#[test]
fn mlc_answers_tools_with_calls_until_it_has_their_results() {
    let place = Place::mlc();
    assert!(lark(&place, json!({"tools": tools()})).unwrap().0.starts_with("start: calls\n"));
    let body = json!({"tools": tools(), "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]});
    assert_eq!(place.read(&body).unwrap().sampling.grammar, None);
}

#[test]
fn a_fault_names_its_tool() {
    let place = Place::plain();
    let tool = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let choice = |choice: Value| json!({"tools": tools(), "tool_choice": choice});
    let many: Vec<Value> =
        (0..129).map(|n| json!({"type": "function", "function": {"name": format!("f{n}")}})).collect();
    for (extra, start) in [
        (json!({"tools": {}}), "tools: expected a list"),
        (json!({"tools": [5]}), "tools[0]: expected an object"),
        (json!({"tools": [{}]}), "tools[0].function: is required"),
        (
            json!({"tools": [{"type": "web_search"}]}),
            "tools[0].type: expected \"function\", got \"web_search\"",
        ),
        (json!({"tools": many}), "tools: expected at most 128 functions, got 129"),
        (json!({"tools": [tools()[1], tools()[1]]}), "tools: expected each name once, got \"now\" twice"),
        (tool(json!({})), "tools[0].function.name: is required"),
        (tool(json!({"name": "a b"})), "tools[0].function.name: expected 1 to 64 of"),
        (tool(json!({"name": "a", "strict": 1})), "tools[0].function.strict: expected true or false"),
        (
            tool(json!({"name": "a", "parameters": 5})),
            "tools[0].function.parameters: expected a JSON schema of an object, got 5",
        ),
        (
            tool(json!({"name": "a", "parameters": {"type": "string"}})),
            "tools[0].function.parameters: expected a JSON schema of type \"object\"",
        ),
        (choice(json!("any")), "tool_choice: expected \"none\", \"auto\", \"required\" or"),
        (
            choice(json!({"type": "x"})),
            "tool_choice.type: expected \"function\" or \"allowed_tools\", got \"x\"",
        ),
        (choice(json!({"type": "function"})), "tool_choice.function: is required"),
        (
            choice(json!({"type": "function", "function": {"name": "x"}})),
            "tool_choice: expected a function of tools, got \"x\"",
        ),
        (
            choice(json!({"type": "allowed_tools", "allowed_tools": {"tools": []}})),
            "tool_choice.allowed_tools.tools: expected at least 1",
        ),
        (
            choice(json!({"type": "allowed_tools", "allowed_tools": {"mode": "x"}})),
            "tool_choice.allowed_tools.mode: expected \"auto\" or \"required\"",
        ),
        (json!({"tool_choice": "required"}), "tool_choice: needs tools, got none"),
        (json!({"tools": tools(), "functions": [{"name": "f"}]}), "functions: is the older form of tools"),
        (
            json!({"functions": [{"name": "f"}], "function_call": "x"}),
            "function_call: expected \"none\", \"auto\"",
        ),
        (
            json!({"functions": [{"name": "f"}], "function_call": {"name": "g"}}),
            "function_call: expected a function of functions",
        ),
    ] {
        let fault = place.with(extra.clone()).unwrap_err();
        assert!(fault.starts_with(start), "{extra}: {fault}");
    }
}
