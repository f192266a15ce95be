//! Whatever text an answer has, its stream parses event by event and says what the answer in one piece says.

use arbitrary::{Result, Unstructured};
use gateway::domain::Piece;
use gateway::fuzzing::{Front, Script, Taken, take};
use serde_json::Value;

use crate::sse::{Told, nul_framed, server_sent};
use crate::{model, pieces};

/// Bodies that shape a stream in every way there is.
const CALLS: [(Front, &str); 6] = [
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
    let pieces = pieces::pieces(source)?;
    let fails_at = if fails { Some(source.choose_index(pieces.len())?) } else { None };
    let script = Script { model: model::model().clone(), pieces, fails_at };
    let taken = take(front, body.as_bytes(), &script).expect("a sound body");
    agree(front, &taken, &script);
    Ok(())
}

/// Checks that the stream and the whole say what the script has.
pub(crate) fn agree(front: Front, taken: &Taken, script: &Script) {
    let told = if front == Front::Vllm { nul_framed(&taken.events) } else { server_sent(&taken.events) };
    let whole: Value = serde_json::from_slice(&taken.whole).expect("an answer is JSON");
    let text: String = script.pieces.iter().map(|piece| piece.text.as_str()).collect();
    assert!(text_of_whole(front, &whole).is_some_and(|shown| shown.ends_with(&text)), "{whole}");

    let Some(failed) = script.fails_at else {
        assert!(told.objects.iter().all(|object| object.get("error").is_none()), "{told:?}");
        assert_eq!(text_of(front, &told.objects), text);
        assert_eq!(told.done, front == Front::Chat, "{told:?}");
        ends(front, &told, &whole, &script.pieces);
        return;
    };
    // A stream that fails ends in one error and says nothing that is not so.
    assert!(!told.done, "{told:?}");
    let (error, before) = told.objects.split_last().expect("an error at least");
    assert!(error.get("error").is_some(), "{told:?}");
    assert!(before.iter().all(|object| object.get("error").is_none()), "{told:?}");
    let said: String = script.pieces[..failed].iter().map(|piece| piece.text.as_str()).collect();
    assert_eq!(text_of(front, before), said);
}

/// Reason and counts at the end of the stream are those of the whole.
fn ends(front: Front, told: &Told, whole: &Value, pieces: &[Piece]) {
    let last = told.objects.last().expect("an answer has an event");
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
            let reasons =
                told.objects.iter().flat_map(|object| object["choices"].as_array().into_iter().flatten());
            let reasons: Vec<&Value> =
                reasons.map(|choice| &choice["finish_reason"]).filter(|reason| !reason.is_null()).collect();
            assert_eq!(reasons, [&whole["choices"][0]["finish_reason"]]);
            assert_eq!(told.objects[0]["choices"][0]["delta"]["role"], "assistant");
            if let Some(usage) = last.get("usage").filter(|usage| !usage.is_null()) {
                assert_eq!(usage, &whole["usage"]);
                assert_eq!(usage["completion_tokens"], pieces.len());
            }
        }
    }
}

fn text_of(front: Front, objects: &[Value]) -> String {
    let pointer = match front {
        Front::Triton { .. } => "/text_output",
        Front::Vllm => "/text/0",
        Front::Chat => "/choices/0/delta/content",
    };
    objects.iter().filter_map(|object| object.pointer(pointer)?.as_str()).collect()
}

fn text_of_whole(front: Front, whole: &Value) -> Option<&str> {
    let pointer = match front {
        Front::Triton { .. } => "/text_output",
        Front::Vllm => "/text/0",
        Front::Chat => "/choices/0/message/content",
    };
    whole.pointer(pointer)?.as_str()
}
