//! Whatever text an answer has, its stream parses event by event and says what the answer in one piece says.

use arbitrary::{Result, Unstructured};
use gateway::domain::Piece;
use gateway::fuzzing::{Front, Script, Taken, take};
use serde_json::Value;

use crate::sse::{Told, nul_framed, server_sent};
use crate::{model, pieces};

/// Most different answers of one script.
const ANSWERS_MAX: usize = 3;

/// Bodies that shape a stream in every way there is.
const CALLS: [(Front, &str); 7] = [
    (Front::Triton { stream: true, recompute: false }, r#"{"text_input":"x"}"#),
    (
        Front::Triton { stream: true, recompute: false },
        r#"{"id":"a","text_input":"x","parameters":{"details":true}}"#,
    ),
    (
        Front::Triton { stream: true, recompute: true },
        r#"{"text_input":"1,1,2,3","parameters":{"details":true,"firstTokenCost":5,"decodeTime":[1]}}"#,
    ),
    (Front::Vllm, r#"{"prompt":"x","stream":true}"#),
    (Front::Vllm, r#"{"prompt":"x","stream":true,"n":3,"temperature":1.0}"#),
    (Front::Chat, r#"{"messages":[{"role":"user","content":"x"}],"stream":true}"#),
    (
        Front::Chat,
        r#"{"messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":true}}"#,
    ),
];

/// Any pieces, written by any writer.
pub fn streams(data: &[u8]) {
    // Too few bytes for a script are no script.
    let _ = any_script(&mut Unstructured::new(data));
}

fn any_script(source: &mut Unstructured<'_>) -> Result<()> {
    let (front, body) = *source.choose(&CALLS)?;
    let fails = source.ratio(1, 8)?;
    let count = source.int_in_range(1..=ANSWERS_MAX)?;
    let says = (0..count).map(|_| pieces::pieces(source)).collect::<Result<Vec<_>>>()?;
    let fails_at = if fails { Some(source.choose_index(says[0].len())?) } else { None };
    let script = Script { model: model::model().clone(), says, fails_at };
    let taken = take(front, body.as_bytes(), &script).expect("a sound body");
    agree(front, &taken, &script);
    Ok(())
}

/// Checks that the stream and the whole say what the script has.
pub(crate) fn agree(front: Front, taken: &Taken, script: &Script) {
    let told = if front == Front::Vllm { nul_framed(&taken.events) } else { server_sent(&taken.events) };
    let whole: Value = serde_json::from_slice(&taken.whole).expect("an answer is JSON");
    let choices: usize = taken.requests.iter().map(|request| request.n).sum();
    for choice in 0..choices {
        let shown = text_of_whole(front, &whole, choice).expect("a text for each choice");
        assert!(shown.ends_with(&text(script.says(choice))), "{whole}");
    }
    assert_eq!(text_of_whole(front, &whole, choices), None, "{whole}");

    let streamed: usize = taken.requests.iter().map(|request| request.best_of).sum();
    let Some(fails_at) = script.fails_at else {
        assert!(told.objects.iter().all(|object| object.get("error").is_none()), "{told:?}");
        for choice in 0..streamed {
            let said = text_of(front, &told.objects, choice);
            // An echo comes first.
            assert!(said.ends_with(&text(script.says(choice))), "choice {choice}: {said:?}");
            if front == Front::Chat {
                assert_eq!(Some(said.as_str()), text_of_whole(front, &whole, choice), "choice {choice}");
            }
        }
        assert_eq!(told.done, front == Front::Chat, "{told:?}");
        let says: Vec<&[Piece]> = (0..streamed).map(|choice| script.says(choice)).collect();
        ends(front, &told, &whole, &says);
        return;
    };
    // A stream that fails ends in one error and says nothing that is not so.
    assert!(!told.done, "{told:?}");
    let (error, before) = told.objects.split_last().expect("an error at least");
    assert!(error.get("error").is_some(), "{told:?}");
    assert!(before.iter().all(|object| object.get("error").is_none()), "{told:?}");
    for choice in 0..streamed {
        let pieces = script.says(choice);
        let (said, came) = (text_of(front, before, choice), text(&pieces[..fails_at.min(pieces.len())]));
        // A writer that waits for every choice, or for what may be a call, may still have some of it.
        let all = streamed == 1 && front != Front::Chat;
        assert!(if all { said == came } else { came.starts_with(&said) }, "{said:?}, {came:?}");
    }
}

fn text(pieces: &[Piece]) -> String {
    pieces.iter().map(|piece| piece.text.as_str()).collect()
}

/// Reason and counts at the end of the stream are those of the whole.
fn ends(front: Front, told: &Told, whole: &Value, says: &[&[Piece]]) {
    let last = told.objects.last().expect("an answer has an event");
    let pieces = says[0];
    match front {
        Front::Triton { .. } => {
            assert_eq!(told.objects.len(), pieces.len(), "an event for each token");
            for field in ["finish_reason", "generated_tokens", "first_token_cost", "decode_cost"] {
                assert_eq!(last["details"][field], whole["details"][field], "{field}");
            }
            let all_but_last = &told.objects[..told.objects.len() - 1];
            assert!(all_but_last.iter().all(|object| object["details"].get("finish_reason").is_none()));
        }
        Front::Vllm => {}
        Front::Chat => {
            let choices =
                told.objects.iter().flat_map(|object| object["choices"].as_array().into_iter().flatten());
            for index in 0..says.len() {
                let of_choice = choices.clone().filter(|choice| choice["index"] == index);
                let reasons =
                    of_choice.map(|choice| &choice["finish_reason"]).filter(|reason| !reason.is_null());
                assert!(reasons.eq([&whole["choices"][index]["finish_reason"]]), "{told:?}");
            }
            assert_eq!(told.objects[0]["choices"][0]["delta"]["role"], "assistant");
            if let Some(usage) = last.get("usage").filter(|usage| !usage.is_null()) {
                assert_eq!(usage, &whole["usage"]);
                assert_eq!(usage["completion_tokens"], says.iter().map(|pieces| pieces.len()).sum::<usize>());
            }
        }
    }
}

/// What the objects say of a choice, in a row.
fn text_of(front: Front, objects: &[Value], choice: usize) -> String {
    let of = |object: &Value| -> Option<String> {
        let text = match front {
            Front::Triton { .. } => object.get("text_output").filter(|_| choice == 0)?,
            Front::Vllm => object.get("text")?.get(choice)?,
            Front::Chat => {
                let choices = object.get("choices")?.as_array()?;
                choices.iter().find(|told| told["index"] == choice)?.get("delta")?.get("content")?
            }
        };
        text.as_str().map(ToOwned::to_owned)
    };
    objects.iter().filter_map(of).collect()
}

fn text_of_whole(front: Front, whole: &Value, choice: usize) -> Option<&str> {
    let text = match front {
        Front::Triton { .. } => whole.get("text_output").filter(|_| choice == 0)?,
        Front::Vllm => whole.get("text")?.get(choice)?,
        Front::Chat => whole.get("choices")?.get(choice)?.get("message")?.get("content")?,
    };
    text.as_str()
}
