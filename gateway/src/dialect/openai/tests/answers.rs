//! Answers: whole and streamed, of both dialects.

use proptest::prelude::*;
use proto::{PromptReport, TokenLogprob};

use super::*;
use crate::dialect::Writer;
use crate::dialect::tests::{pieces, started, streamed, whole};
use crate::domain::{Finish, Piece};
use crate::timing::{Part, Parts};

/// What a stream says, put together again as a client does.
#[derive(Debug, Default, PartialEq)]
struct Put {
    content: String,
    thought: String,
    /// Id, name, arguments.
    calls: Vec<(String, String, String)>,
    function_call: Option<(String, String)>,
    finish_reason: Option<String>,
    stop_reason: Value,
    logprobs: Vec<Value>,
    token_ids: Vec<Value>,
    usage: Value,
}

/// The JSON of every event but the last, which is the mark of the end.
fn chunks(events: &[String]) -> Vec<Value> {
    let (last, events) = events.split_last().unwrap();
    assert_eq!(last, "data: [DONE]\n\n");
    let json = |event: &String| {
        let line = event.strip_prefix("data: ").and_then(|event| event.strip_suffix("\n\n")).unwrap();
        serde_json::from_str(line).unwrap()
    };
    events.iter().map(json).collect()
}

fn put(chunks: &[Value], index: usize) -> Put {
    let mut put = Put::default();
    for chunk in chunks {
        if chunk["usage"].is_object() {
            put.usage = chunk["usage"].clone();
        }
        let mut choices = chunk["choices"].as_array().unwrap().iter();
        let Some(choice) = choices.find(|choice| choice["index"] == index) else { continue };
        assert!(put.finish_reason.is_none(), "a chunk after the last");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let delta = &choice["delta"];
        put.content.push_str(&text(&delta["content"]));
        put.thought.push_str(&text(&delta["reasoning_content"]));
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let at = call["index"].as_u64().unwrap() as usize;
            if at == put.calls.len() {
                assert_eq!((&call["type"], &call["function"]["arguments"]), (&json!("function"), &json!("")));
                put.calls.push((text(&call["id"]), text(&call["function"]["name"]), String::new()));
            } else {
                assert!(call.get("id").is_none() && call["function"].get("name").is_none());
                put.calls[at].2.push_str(&text(&call["function"]["arguments"]));
            }
        }
        if let Some(call) = delta.get("function_call").filter(|call| !call.is_null()) {
            let known = put.function_call.get_or_insert_with(|| (text(&call["name"]), String::new()));
            known.1.push_str(&text(&call["arguments"]));
        }
        put.logprobs.extend(choice["logprobs"]["content"].as_array().into_iter().flatten().cloned());
        put.token_ids.extend(choice["token_ids"].as_array().into_iter().flatten().cloned());
        put.finish_reason = choice["finish_reason"].as_str().map(ToOwned::to_owned);
        put.stop_reason = choice.get("stop_reason").cloned().unwrap_or_default();
    }
    put
}

/// The same of a choice of a whole answer.
fn put_whole(body: &Value, index: usize) -> Put {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let choice = &body["choices"][index];
    let message = &choice["message"];
    assert_eq!((&choice["index"], &message["role"]), (&json!(index), &json!("assistant")));
    let call = |call: &Value| {
        (text(&call["id"]), text(&call["function"]["name"]), text(&call["function"]["arguments"]))
    };
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let function_call = message.get("function_call");
    Put {
        content: text(&message["content"]),
        thought: text(&message["reasoning_content"]),
        calls: list(&message["tool_calls"]).iter().map(call).collect(),
        function_call: function_call.map(|call| (text(&call["name"]), text(&call["arguments"]))),
        finish_reason: Some(text(&choice["finish_reason"])),
        stop_reason: choice["stop_reason"].clone(),
        logprobs: list(&choice["logprobs"]["content"]),
        token_ids: list(&choice["token_ids"]),
        usage: body["usage"].clone(),
    }
}

fn body_of(place: &Place, body: &Value, pieces: &[Piece]) -> Value {
    let mut writer = place.call(body).unwrap().writer;
    serde_json::from_slice(&writer.whole(&[started("m", 3, None)], &[whole(pieces)])).unwrap()
}

fn events_of(place: &Place, body: &Value, pieces: &[Piece]) -> Vec<String> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    streamed(&mut place.call(&body).unwrap().writer, &started("m", 3, None), pieces)
}

/// What the answer says, which is the same whole and streamed.
fn answer(place: &Place, body: &Value, pieces: &[Piece]) -> Put {
    let mut streaming = body.clone();
    streaming["stream_options"] = json!({"include_usage": true});
    let mut of_stream = put(&chunks(&events_of(place, &streaming, pieces)), 0);
    let of_body = put_whole(&body_of(place, body, pieces), 0);
    // Each names its calls itself.
    for (a, b) in of_stream.calls.iter_mut().zip(&of_body.calls) {
        assert!(a.0.starts_with("call_") == b.0.starts_with("call_") && a.0.len() == b.0.len());
        a.0.clone_from(&b.0);
    }
    assert_eq!(of_stream, of_body);
    of_body
}

const CALL: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"location\": \"Bonn\"}}\n</tool_call>";

fn characters(text: &str) -> Vec<String> {
    text.chars().map(String::from).collect()
}

fn in_characters(text: &str, finish: Finish) -> Vec<Piece> {
    let texts = characters(text);
    pieces(&texts.iter().map(String::as_str).collect::<Vec<_>>(), finish)
}

#[test]
fn a_stream_is_role_contents_finish_and_done() {
    let events = events_of(&Place::plain(), &with(json!({})), &pieces(&["Hel", "", "lo"], Finish::Eos));
    let chunks = chunks(&events);
    let id = &chunks[0]["id"];
    assert!(id.as_str().unwrap().starts_with("chatcmpl-"));
    let expected = |delta: Value, finish: Value| {
        json!({"id": id, "object": "chat.completion.chunk", "created": chunks[0]["created"], "model": "m",
            "system_fingerprint": "fp_abababababab",
            "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]})
    };
    let expected = [
        expected(json!({"role": "assistant", "content": ""}), json!(null)),
        expected(json!({"content": "Hel"}), json!(null)),
        expected(json!({"content": "lo"}), json!(null)),
        expected(json!({}), json!("stop")),
    ];
    assert_eq!(chunks, expected);
}

#[test]
fn usage_comes_last_when_asked_for_or_always() {
    let mut pieces = pieces(&["Hel", "lo"], Finish::Length);
    pieces[0].token.prompt = Some(Box::new(PromptReport { cached_tokens: 2, logprobs: Vec::new() }));
    let usage = |generated: usize| {
        json!({"prompt_tokens": 3, "completion_tokens": generated, "total_tokens": 3 + generated,
            "prompt_tokens_details": {"cached_tokens": 2}})
    };
    let usages = |options: Value| {
        let events = events_of(&Place::plain(), &with(json!({"stream_options": options})), &pieces);
        chunks(&events).iter().map(|chunk| chunk.get("usage").cloned()).collect::<Vec<_>>()
    };
    let null = Some(Value::Null);
    assert_eq!(
        usages(json!({"include_usage": true, "include_obfuscation": false})),
        [null.clone(), null.clone(), null.clone(), null, Some(usage(2))]
    );
    assert_eq!(usages(json!({"include_usage": false})), [None, None, None, None]);
    let always = usages(json!({"include_usage": true, "continuous_usage_stats": true}));
    assert_eq!(always[1..], [1, 2, 2, 2].map(|generated| Some(usage(generated))));
}

#[test]
fn timings_are_shown_to_who_asks() {
    let ms = std::time::Duration::from_millis;
    let mut parts = Parts::new(ms(5));
    parts.mark(Part::Queue, ms(7));
    parts.mark(Part::Decode, ms(10));
    let pieces = pieces(&["Hel", "lo"], Finish::Length);
    let (started, place) = (started("m", 3, None), Place::plain());
    let timings = |extra: Value| {
        let mut call = place.call(&with(extra)).unwrap();
        if !call.stream {
            call.writer.take_timings(&parts);
            let body = call.writer.whole(std::slice::from_ref(&started), &[whole(&pieces)]);
            return serde_json::from_slice::<Value>(&body).unwrap()["usage"]["timings"].clone();
        }
        let mut events = Vec::new();
        call.writer.begin(std::slice::from_ref(&started), &mut events);
        pieces.iter().for_each(|piece| call.writer.piece(0, piece, &mut events));
        call.writer.take_timings(&parts);
        call.writer.end(&mut events);
        let events: Vec<String> =
            events.iter().map(|event| String::from_utf8(event.to_vec()).unwrap()).collect();
        chunks(&events).last().unwrap()["usage"]["timings"].clone()
    };
    let shown = json!({"total_ms": 5.0, "read_ms": 0.0, "tokenise_ms": 0.0, "queue_ms": 2.0, "placement_ms": 0.0,
        "prefill_queue_ms": 0.0, "prefill_ms": 0.0, "transfer_ms": 0.0, "decode_ms": 3.0, "replay_ms": 0.0,
        "write_ms": 0.0, "other_ms": 0.0});
    for (extra, expected) in [
        (json!({}), Value::Null),
        (json!({"include_timings": false}), Value::Null),
        (json!({"include_timings": true}), shown.clone()),
        (json!({"include_timings": true, "stream": true}), shown.clone()),
        (json!({"include_timings": true, "stream": true, "stream_options": {}}), shown),
        (json!({"stream": true, "stream_options": {"include_usage": true}}), Value::Null),
    ] {
        assert_eq!(timings(extra.clone()), expected, "{extra}");
    }
    let fault = place.with(json!({"include_timings": 1})).unwrap_err();
    assert!(fault.starts_with("include_timings: expected true or false"), "{fault}");
}

#[test]
fn a_whole_answer_prints_what_it_has_not_as_null() {
    let body =
        body_of(&Place::plain(), &with(json!({})), &pieces(&["Hel", "lo"], Finish::StopString("x".into())));
    assert_eq!(
        body,
        json!({"id": body["id"], "object": "chat.completion", "created": body["created"], "model": "m",
            "choices": [{"index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": null, "tool_calls": null, "name": null,
                    "tool_call_id": null},
                "logprobs": null, "finish_reason": "stop", "stop_reason": "x"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 0}},
            "system_fingerprint": "fp_abababababab"})
    );
}

#[test]
fn every_choice_has_one_role_and_one_finish() {
    let place = Place::plain();
    let started = started("m", 3, None);
    let body = with(json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}}));
    let mut writer = place.call(&body).unwrap().writer;
    let mut events = Vec::new();
    writer.begin(std::slice::from_ref(&started), &mut events);
    let says = [pieces(&["a", "b"], Finish::Eos), pieces(&["c"], Finish::Length)];
    for (choice, piece) in [(1, &says[1][0]), (0, &says[0][0]), (0, &says[0][1])] {
        writer.piece(choice, piece, &mut events);
    }
    writer.end(&mut events);
    let events: Vec<String> = events.iter().map(|event| String::from_utf8(event.to_vec()).unwrap()).collect();
    let chunks = chunks(&events);
    let (first, second) = (put(&chunks, 0), put(&chunks, 1));
    assert_eq!((first.content.as_str(), first.finish_reason.as_deref()), ("ab", Some("stop")));
    assert_eq!((second.content.as_str(), second.finish_reason.as_deref()), ("c", Some("length")));
    assert_eq!(first.usage["completion_tokens"], 3);
    let roles = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"]["role"] == "assistant").count();
    assert_eq!(roles, 2);
    let mut writer = place.call(&with(json!({"n": 2}))).unwrap().writer;
    let body: Value =
        serde_json::from_slice(&writer.whole(&[started], &says.each_ref().map(|pieces| whole(pieces))))
            .unwrap();
    for (index, streamed) in [first, second].into_iter().enumerate() {
        assert_eq!(put_whole(&body, index), streamed);
    }
}

#[test]
fn calls_are_streamed_and_whole_the_same() {
    let place = Place::templated(HERMES, &[]);
    let body = with(json!({"tools": tools()}));
    let says = answer(&place, &body, &in_characters(&format!("Let me see.\n{CALL}\n{CALL}"), Finish::Eos));
    assert_eq!(says.content, "Let me see.");
    let call = ("get_weather", "{\"location\": \"Bonn\"}");
    let calls: Vec<(&str, &str)> =
        says.calls.iter().map(|(_, name, arguments)| (&**name, &**arguments)).collect();
    assert_eq!(calls, [call, call]);
    assert_ne!(says.calls[0].0, says.calls[1].0);
    assert_eq!(says.finish_reason.as_deref(), Some("tool_calls"));
    // No calls; a call that the length has cut; one of another function.
    for (text, finish, reason) in [
        ("Sunny.", Finish::Eos, "stop"),
        (&CALL[..60], Finish::Length, "length"),
        ("<tool_call>\n{\"name\": \"x\", \"arguments\": {}}\n</tool_call>", Finish::Eos, "stop"),
    ] {
        let says = answer(&place, &body, &in_characters(text, finish));
        assert_eq!(
            (says.content.as_str(), says.calls.len(), says.finish_reason.as_deref()),
            (text, 0, Some(reason))
        );
    }
    // With calls alone the content is null.
    let body = body_of(&place, &body, &in_characters(CALL, Finish::Eos));
    assert_eq!(body["choices"][0]["message"]["content"], Value::Null);
    // Nobody who has no tools has calls.
    let says = answer(&place, &with(json!({})), &in_characters(CALL, Finish::Eos));
    assert_eq!((says.content.as_str(), says.finish_reason.as_deref()), (CALL, Some("stop")));
}

#[test]
fn forced_arguments_go_out_as_they_come() {
    let place = Place::templated(HERMES, &[]);
    let body = with(json!({"tools": tools(), "tool_choice": "required"}));
    let pieces = in_characters(CALL, Finish::Grammar);
    assert_eq!(answer(&place, &body, &pieces).finish_reason.as_deref(), Some("tool_calls"));
    let fragments = |body: &Value| {
        let chunks = chunks(&events_of(&place, body, &pieces));
        chunks.iter().filter(|chunk| chunk["choices"][0]["delta"].get("tool_calls").is_some()).count() - 1
    };
    assert_eq!(fragments(&body), "{\"location\": \"Bonn\"}".len());
    assert_eq!(fragments(&with(json!({"tools": tools()}))), 1);
    let cut = answer(&place, &body, &in_characters(&CALL[..60], Finish::Length));
    assert_eq!((cut.calls[0].2.as_str(), cut.finish_reason.as_deref()), ("{\"location\"", Some("length")));
}

#[test]
fn mistral_names_its_calls_shortly() {
    let place = Place::templated("{% if tools %}[TOOL_CALLS]{% endif %}{{ messages|length }}", &[]);
    let text = "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}]";
    let says = answer(&place, &with(json!({"tools": tools()})), &in_characters(text, Finish::Eos));
    assert_eq!((says.calls[0].0.len(), says.calls[0].1.as_str()), (9, "now"));
}

#[test]
fn the_older_form_has_one_call() {
    let place = Place::templated(HERMES, &[]);
    let body = with(json!({"functions": [tools()[0]["function"]]}));
    let says = answer(&place, &body, &in_characters(&format!("{CALL}{CALL}"), Finish::Eos));
    assert_eq!(says.function_call, Some(("get_weather".to_owned(), "{\"location\": \"Bonn\"}".to_owned())));
    assert_eq!((says.calls.len(), says.finish_reason.as_deref()), (0, Some("function_call")));
}

#[test]
fn thoughts_have_a_field_of_their_own() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}";
    let place = Place::templated(template, &[]);
    let text = "<think>\nHm. <tool_call>\n</think>\n\nSunny.";
    let says = answer(&place, &with(json!({})), &in_characters(text, Finish::Eos));
    assert_eq!((says.thought.as_str(), says.content.as_str()), ("Hm. <tool_call>", "Sunny."));
    let says = answer(&place, &with(json!({"include_reasoning": false})), &in_characters(text, Finish::Eos));
    assert_eq!((says.thought.as_str(), says.content.as_str()), ("", "Sunny."));
    // Who knows of no marks says them.
    let says = answer(&Place::plain(), &with(json!({})), &in_characters(text, Finish::Eos));
    assert_eq!((says.thought.as_str(), says.content.as_str()), ("", text));
}

#[test]
fn every_token_has_its_probability_once() {
    let place = Place::templated(HERMES, &[]);
    let body = with(json!({"logprobs": true, "top_logprobs": 1, "tools": tools(), "return_token_ids": true}));
    for text in ["Hello", "a\u{1f99c}b", CALL, &CALL[..50], ""] {
        let mut pieces = in_characters(text, Finish::Length);
        if pieces.is_empty() {
            pieces = crate::dialect::tests::pieces(&["", ""], Finish::StopToken);
        }
        for piece in &mut pieces {
            piece.token.id = 97 + piece.token.index as u32 % 26;
            piece.token.top =
                vec![TokenLogprob { id: 98, logprob: -0.5 }, TokenLogprob { id: 99, logprob: -0.75 }];
        }
        let says = answer(&place, &body, &pieces);
        assert_eq!((says.logprobs.len(), says.token_ids.len()), (pieces.len(), pieces.len()), "{text}");
        assert_eq!(
            says.logprobs[0],
            json!({"token": "a", "logprob": -1.0, "bytes": [97],
                "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}]})
        );
        assert_eq!(says.token_ids[0], 97);
    }
    let says = answer(
        &place,
        &with(json!({"logprobs": true, "return_tokens_as_token_ids": true})),
        &pieces(&["x"], Finish::Eos),
    );
    assert_eq!(
        (&says.logprobs[0]["token"], &says.logprobs[0]["top_logprobs"]),
        (&json!("token_id:0"), &json!([]))
    );
    // They do not wait for a call to be complete.
    let long = in_characters(&format!("{}{}", &CALL[..55], "x".repeat(200)), Finish::Length);
    let events = events_of(&place, &body, &long);
    let most = chunks(&events).iter().map(|chunk| put(std::slice::from_ref(chunk), 0).logprobs.len()).max();
    assert_eq!(most, Some(64));
}

#[test]
fn the_prompt_is_told_of_where_asked() {
    let body = with(json!({"prompt_logprobs": 1, "return_token_ids": true}));
    let said = body_of(&Place::plain(), &body, &pieces(&["x"], Finish::Eos));
    assert_eq!((&said["prompt_logprobs"], &said["prompt_token_ids"]), (&Value::Null, &json!([7, 7, 7])));
    let said = body_of(&Place::plain(), &with(json!({})), &pieces(&["x"], Finish::Eos));
    assert!(said.get("prompt_logprobs").is_none() && said.get("prompt_token_ids").is_none());
}

#[test]
fn an_echo_comes_before_the_answer() {
    let body = json!({"echo": true, "add_generation_prompt": false, "continue_final_message": true, "messages": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "Once "}]});
    assert_eq!(answer(&Place::plain(), &body, &pieces(&[" upon"], Finish::Eos)).content, "Once upon");
    let user = with(json!({"echo": true}));
    assert_eq!(answer(&Place::plain(), &user, &pieces(&["upon"], Finish::Eos)).content, "upon");
}

#[test]
fn mlc_names_the_role_in_every_chunk_and_streams_calls_as_text() {
    let place = Place::mlc();
    let text = "[get_weather(location='Bonn', unit='celsius')]";
    let body = with(json!({"model": "dist/any", "tools": tools()}));
    let pieces = in_characters(text, Finish::Length);
    let chunks = chunks(&events_of(&place, &body, &pieces));
    for chunk in &chunks {
        assert_eq!((&chunk["model"], &chunk["usage"]), (&json!("dist/any"), &Value::Null));
        let delta = &chunk["choices"][0]["delta"];
        assert_eq!(delta["role"], "assistant");
        assert!(
            delta["content"].is_string()
                && delta["tool_calls"].is_null()
                && delta.get("tool_call_id").is_some()
        );
    }
    let says = put(&chunks, 0);
    assert_eq!((says.content.as_str(), says.finish_reason.as_deref()), (text, Some("tool_calls")));
    let said = body_of(&place, &body, &pieces);
    let choice = &said["choices"][0];
    assert_eq!(
        (&choice["message"]["tool_calls"][0]["function"], &choice["finish_reason"]),
        (
            &json!({"name": "get_weather", "arguments": {"location": "Bonn", "unit": "celsius"}}),
            &json!("tool_calls")
        )
    );
    assert_eq!((&choice["message"]["content"], &said["usage"]["extra"]), (&Value::Null, &Value::Null));
    assert!(said["usage"].get("extra").is_some());
    // What is no call is a failure, in words.
    let said = body_of(&place, &body, &crate::dialect::tests::pieces(&["Sunny."], Finish::Eos));
    let choice = &said["choices"][0];
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!("Sunny."), &json!("error"))
    );
}

#[test]
fn a_late_fault_is_an_event_that_clients_raise() {
    let mut writer = Place::plain().call(&with(json!({}))).unwrap().writer;
    let event = writer.fault(&Fault::NotReady("gone".into()));
    assert_eq!(
        event,
        "data: {\"error\":{\"message\":\"gone\",\"type\":\"server_error\",\"param\":null,\"code\":\"overloaded\"}}\n\n"
    );
}

proptest! {
    #[test]
    fn whole_and_stream_say_the_same_however_the_text_is_cut(
        words in prop::collection::vec(prop::sample::select(&["<tool_call>", "</tool_call>", CALL, "<think>", "</think>", " ", "\n", "é🦜", "x"][..]), 0..8),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 1..8),
        forced: bool,
    ) {
        let template = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}";
        let place = Place::templated(template, &[]);
        let text = words.concat();
        let mut borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        borders.push(text.len());
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| borders[cut.index(borders.len())]).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let texts: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        let choice = if forced { "required" } else { "auto" };
        let body = with(json!({"tools": tools(), "tool_choice": choice, "logprobs": true}));
        answer(&place, &body, &pieces(&texts, Finish::Eos));
    }
}
