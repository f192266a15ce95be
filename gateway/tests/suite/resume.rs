//! The state machine that carries a request from router to router, told as scenarios in `testdata/resume.txt`.

use std::fmt::Write as _;
use std::time::Duration;

use expect_test::expect_file;
use gateway::resume::{Action, Event, Resume};
use proto::{
    Attempt, Error, FinishReason, Generation, Priority, Reason, SamplingParams, StopConditions, Token,
};

/// Runs the commands of a scenario file and writes what each of them answers behind its arrow.
fn run(scenarios: &str) -> String {
    let mut written = String::new();
    let mut resume = None;
    for line in scenarios.lines() {
        if line.is_empty() || line.starts_with('#') {
            writeln!(written, "{line}").unwrap();
            continue;
        }
        let command = line.split("=>").next().unwrap().trim();
        if let Some(settings) = command.strip_prefix("request ") {
            resume = Some(request(settings));
            writeln!(written, "{command}").unwrap();
            continue;
        }
        let (now, event) = command.split_once(' ').expect("a time and an event");
        let answer = resume.as_mut().expect("a request first").on(event_of(event.trim()), time(now));
        writeln!(written, "{command:<24} => {}", shown(&answer)).unwrap();
    }
    written
}

fn time(text: &str) -> Duration {
    Duration::from_millis(text.strip_suffix("ms").expect("a time in ms").parse().expect("a number"))
}

fn setting(settings: &str, name: &str) -> String {
    let found = settings.split(' ').find_map(|word| word.strip_prefix(&format!("{name}=")));
    found.unwrap_or_else(|| panic!("{name} is missing in {settings}")).to_owned()
}

fn request(settings: &str) -> Resume {
    let count = |name| setting(settings, name).parse::<usize>().expect("a count");
    let generated = count("generated");
    let generation = Generation {
        request: "r".into(),
        attempt: Attempt::default(),
        model: "m".into(),
        tokens: vec![1; count("prompt") + generated],
        generated,
        sampling: SamplingParams::default(),
        stop: StopConditions { max_tokens: 9, ..StopConditions::default() },
        time_left: time(&setting(settings, "deadline")),
        probe: false,
        beside: None,
        session: None,
        priority: Priority::default(),
    };
    Resume::new(generation, Duration::ZERO, time(&setting(settings, "window")))
}

fn event_of(text: &str) -> Event {
    let words: Vec<&str> = text.split(' ').collect();
    match words[..] {
        ["start"] => Event::Start,
        ["tick"] => Event::Tick,
        ["no", "router"] => Event::NoRouter,
        ["lost"] => Event::Lost(Error::new(Reason::WorkerLost, "connection refused")),
        ["refused", reason] => Event::Refused(Error::new(Reason::from_name(reason).expect("a reason"), "no")),
        ["token", index] => Event::Token(token(index, None)),
        ["last", index] => Event::Token(token(index, Some(FinishReason::Length))),
        _ => panic!("no such event: {text}"),
    }
}

fn token(index: &str, finish: Option<FinishReason>) -> Token {
    let index = index.parse().expect("an index");
    Token {
        index,
        id: 70,
        logprob: -1.0,
        batch_size: 1,
        queue_wait: Duration::ZERO,
        finish,
        ..Token::default()
    }
}

fn shown(action: &Action) -> String {
    match action {
        Action::Route(generation) => format!(
            "route attempt={} prompt={} generated={} left={}ms",
            generation.attempt.0,
            generation.prompt_len(),
            generation.generated,
            generation.time_left.as_millis()
        ),
        Action::WaitUntil(until) => format!("wait until {}ms", until.as_millis()),
        Action::Emit(token) if token.finish.is_some() => format!("emit {}, the last", token.index),
        Action::Emit(token) => format!("emit {}", token.index),
        Action::Skip => "skip".to_owned(),
        Action::Fail(error) => format!("fail {error}"),
    }
}

#[test]
fn scenarios() {
    let file = expect_file!["../../testdata/resume.txt"];
    file.assert_eq(&run(&std::fs::read_to_string("testdata/resume.txt").unwrap()));
}

#[test]
fn the_tokens_so_far_go_to_the_next_router() {
    let mut resume = request("prompt=2 generated=0 deadline=1000ms window=100ms");
    for (index, id) in [(0, 70), (1, 71)] {
        let token = Token { id, ..token(&index.to_string(), None) };
        resume.on(Event::Token(token), Duration::ZERO);
    }
    let lost = Event::Lost(Error::new(Reason::WorkerLost, "gone"));
    let Action::Route(generation) = resume.on(lost, Duration::from_millis(10)) else {
        panic!("expected a route");
    };
    assert_eq!(generation.tokens, [1, 1, 70, 71]);
    assert_eq!((generation.generated, generation.attempt), (2, Attempt(Attempt::PER_ROUTER)));
}
