//! Whatever text an answer has, its stream parses event by event and says what the answer in one piece says.

use arbitrary::{Result, Unstructured};
use gateway::domain::{Piece, Prompt};
use gateway::fuzzing::{Front, Script, Taken, take};
use serde_json::Value;

use crate::said::{Choice, choices, streamed};
use crate::sse::{Told, nul_framed, server_sent};
use crate::{model, pieces};

/// Most different answers of one script.
const ANSWERS_MAX: usize = 3;

const TRITON: Front = Front::Triton { stream: true, recompute: false };
const RESUMED: Front = Front::Triton { stream: true, recompute: true };
const TGI: Front = Front::Tgi { stream: true };
const CHAT: Front = Front::Chat { mlc: false };
const MLC: Front = Front::Chat { mlc: true };

/// Bodies that shape a stream in every way there is.
const CALLS: [(Front, &str); 16] = [
    (TRITON, r#"{"text_input":"x"}"#),
    (TRITON, r#"{"id":"a","text_input":"x","parameters":{"details":true}}"#),
    (
        RESUMED,
        r#"{"text_input":"1,1,2,3","parameters":{"details":true,"firstTokenCost":5,"decodeTime":[1]}}"#,
    ),
    (Front::Vllm, r#"{"prompt":"x","stream":true}"#),
    (Front::Vllm, r#"{"prompt":"x","stream":true,"n":3,"temperature":1.0}"#),
    (TGI, r#"{"inputs":"x"}"#),
    (TGI, r#"{"inputs":"x","parameters":{"details":true,"top_n_tokens":2}}"#),
    (TGI, r#"{"inputs":"x","parameters":{"details":true,"return_full_text":true,"seed":7}}"#),
    (CHAT, r#"{"messages":[{"role":"user","content":"x"}],"stream":true}"#),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"x"}],"stream":true,"n":2,"stream_options":{"include_usage":true},
            "logprobs":true,"top_logprobs":2}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":true},
            "tools":[{"type":"function","function":{"name":"f"}}]}"#,
    ),
    (
        CHAT,
        r#"{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}],"stream":true,"echo":true,
            "add_generation_prompt":false,"continue_final_message":true}"#,
    ),
    (MLC, r#"{"messages":[{"role":"user","content":"x"}],"stream":true,"n":2}"#),
    (Front::Completions, r#"{"prompt":"x","stream":true}"#),
    (Front::Completions, r#"{"prompt":["x","y"],"stream":true,"n":2,"echo":true,"suffix":"!","logprobs":2}"#),
    (Front::Completions, r#"{"prompt":[1,2],"stream":true,"stream_options":{"include_usage":true}}"#),
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
    let wholes = choices(front, &whole);
    let expected: usize = taken.requests.iter().map(|request| request.n).sum();
    // TGI tells of further sequences among the details alone.
    let hidden = matches!(front, Front::Tgi { .. }) && whole["details"].is_null();
    assert_eq!(wholes.len(), if hidden { 1 } else { expected }, "{whole}");
    let is_plain = taken.requests.iter().all(|request| match &request.prompt {
        Prompt::Chat(chat) => chat.tools.is_none() && chat.template.is_none(),
        _ => true,
    });
    if is_plain {
        for (index, choice) in wholes.iter().enumerate() {
            assert!(choice.text.contains(&text(script.says(index))), "{whole}");
        }
    }

    let count: usize = taken.requests.iter().map(|request| request.best_of).sum();
    if count > expected {
        assert!(!taken.stream, "what is chosen in the end cannot be streamed");
        return;
    }
    if matches!(front, Front::Tgi { .. }) && count > 1 {
        // It streams one sequence and refuses more.
        return;
    }
    if let Some(fails_at) = script.fails_at {
        return fails(front, &told, count, (script, fails_at));
    }
    assert!(told.objects.iter().all(|object| object.get("error").is_none()), "{told:?}");
    assert_eq!(told.done, matches!(front, Front::Chat { .. } | Front::Completions), "{told:?}");
    let said = streamed(front, &told.objects, count);
    if count == wholes.len() {
        for (index, (said, whole)) in said.iter().zip(&wholes).enumerate() {
            same(front, said, whole, index);
        }
    }
    ends(front, &told, &whole, script);
}

fn same(front: Front, said: &Choice, whole: &Choice, index: usize) {
    if front == Front::Vllm {
        // In one piece the prompt comes first.
        assert!(whole.text.ends_with(&said.text), "choice {index}: {said:?}, {whole:?}");
    } else if front == MLC && said.ended == ["tool_calls"] {
        // MLC streams calls as the text that they are; whether they are calls it says in one piece alone.
        let has_calls = !whole.calls.is_empty();
        assert_eq!(whole.ended, [if has_calls { "tool_calls" } else { "error" }], "choice {index}");
        assert!(said.calls.is_empty(), "choice {index}: {said:?}");
        assert!(has_calls || said.text == whole.text, "choice {index}: {said:?}, {whole:?}");
    } else {
        assert_eq!(said, whole, "choice {index}");
    }
}

/// A stream that fails ends in one error and says nothing that is not so.
fn fails(front: Front, told: &Told, count: usize, (script, fails_at): (&Script, usize)) {
    assert!(!told.done, "{told:?}");
    let (error, before) = told.objects.split_last().expect("an error at least");
    assert!(error.get("error").is_some(), "{told:?}");
    assert!(before.iter().all(|object| object.get("error").is_none()), "{told:?}");
    for (index, said) in streamed(front, before, count).iter().enumerate() {
        let pieces = script.says(index);
        let came = text(&pieces[..fails_at.min(pieces.len())]);
        // A writer may hold some of it back, and put a prompt before it.
        let is_beginning = (0..=said.text.len()).filter(|at| said.text.is_char_boundary(*at)).any(|at| {
            came.starts_with(&said.text[at..]) && (at == 0 || front == Front::Completions || front == CHAT)
        });
        assert!(is_beginning, "{said:?}, {came:?}");
    }
}

fn text(pieces: &[Piece]) -> String {
    pieces.iter().map(|piece| piece.text.as_str()).collect()
}

/// Counts at the end of the stream are those of the whole.
fn ends(front: Front, told: &Told, whole: &Value, script: &Script) {
    let last = told.objects.last().expect("an answer has an event");
    match front {
        Front::Triton { .. } => {
            assert_eq!(told.objects.len(), script.says(0).len(), "an event for each token");
            for field in ["generated_tokens", "first_token_cost", "decode_cost"] {
                assert_eq!(last["details"][field], whole["details"][field], "{field}");
            }
        }
        Front::Vllm => {}
        Front::Tgi { .. } => {
            assert_eq!(told.objects.len(), script.says(0).len(), "an event for each token");
            if !last["details"].is_null() {
                for field in ["generated_tokens", "seed"] {
                    assert_eq!(last["details"][field], whole["details"][field], "{field}");
                }
            }
        }
        Front::Chat { .. } | Front::Completions => {
            if let Some(usage) = last.get("usage").filter(|usage| !usage.is_null()) {
                assert_eq!(usage, &whole["usage"]);
            }
        }
    }
}
