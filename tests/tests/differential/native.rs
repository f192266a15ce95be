//! Baton's own gRPC.

use proto::SamplingParams;
use proto::wire::generate_request::Prompt;
use proto::wire::generation_service_client::GenerationServiceClient;
use proto::wire::{self, Chat, ChatMessage, FinishReason, GenerateRequest};
use serde_json::{Value, json};

use crate::answer::{Answer, Finish};
use crate::case::{Case, LOGPROBS, Sampling};
use crate::server::Server;

pub(crate) async fn text(server: &Server, case: &Case) -> Answer {
    ask(server, case, Prompt::Text(case.prompt.clone())).await
}

pub(crate) async fn chat(server: &Server, case: &Case) -> Answer {
    let messages = case.messages.as_ref().and_then(Value::as_array).expect("a chat");
    let word = |message: &Value, name: &str| message[name].as_str().expect("a text").to_owned();
    let message =
        |message| ChatMessage { role: word(message, "role"), content: word(message, "content"), name: None };
    let messages = messages.iter().map(message).collect();
    ask(
        server,
        case,
        Prompt::Chat(Chat { messages, tools_json: None, continue_final_message: case.continues }),
    )
    .await
}

fn sampling(case: &Case) -> wire::SamplingParams {
    let mut sampling = SamplingParams {
        repetition_penalty: case.sampling.repetition_penalty.unwrap_or(1.0),
        logprobs: Some(LOGPROBS),
        ..SamplingParams::default()
    };
    if let Some(seed) = case.sampling.seed {
        sampling.seed = seed;
        sampling.temperature = Sampling::TEMPERATURE;
        sampling.top_p = Sampling::TOP_P;
        sampling.top_k = Some(Sampling::TOP_K);
    }
    sampling.into()
}

async fn ask(server: &Server, case: &Case, prompt: Prompt) -> Answer {
    let request = GenerateRequest {
        prompt: Some(prompt),
        sampling: Some(sampling(case)),
        max_tokens: Some(case.max_tokens as u64),
        stop: case.stop.clone(),
        stop_token_ids: case.stop_token_ids.clone(),
        include_stop: case.include_stop,
        n: Some(case.n as u32),
        ..GenerateRequest::default()
    };
    let mut client = GenerationServiceClient::new(server.channel.clone());
    let mut items = client.generate(request).await.expect("a good request").into_inner();
    let mut answer = Answer::of(case.n);
    let mut completion_tokens = 0;
    while let Some(item) = items.message().await.expect("a whole stream") {
        let finish = item.finish.is_some().then(|| item.finish());
        let output = &mut answer.outputs[item.sequence as usize];
        output.text.push_str(&item.text);
        for token in item.tokens {
            output.ids_mut().push(token.id);
            output.logprobs_mut().push(token.logprob);
            output
                .alternatives
                .push(json!(token.top.iter().map(|top| (top.id, top.logprob)).collect::<Vec<_>>()));
        }
        answer.prompt_tokens = Some(item.prompt_tokens);
        let Some(finish) = finish else { continue };
        output.finished(match finish {
            FinishReason::Eos => Finish::Eos,
            FinishReason::Stop => Finish::Stop,
            FinishReason::Length => Finish::Length,
            other => panic!("not asked for: {other:?}"),
        });
        completion_tokens += item.generated_tokens;
    }
    answer.completion_tokens = Some(completion_tokens);
    answer
}
