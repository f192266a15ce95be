//! Named places where a test can stop a real process in the middle of a phase.
//!
//! Without the cargo feature `failpoints` they are nothing. With it, `NAME=return` in the environment variable
//! `FAILPOINTS`, or later in the file that `FAILPOINTS_FILE` names, arms one: a task that reaches it says so on stderr
//! and stands still for good, while the process goes on. `NAME=return(2000)` stands still for that many milliseconds,
//! `NAME=off` disarms it for those that come later.

use std::time::Duration;

/// Reads `FAILPOINTS` and starts to watch `FAILPOINTS_FILE`. Called once, when the process starts.
pub fn arm_fail_points() {
    #[cfg(feature = "failpoints")]
    armed::start();
}

/// Stands still here if the fail point is armed.
pub async fn fail_point(name: &'static str) {
    match reached(name) {
        None => {}
        Some(Stop::For(time)) => tokio::time::sleep(time).await,
        Some(Stop::Forever) => std::future::pending().await,
    }
}

/// Like [`fail_point`], for a thread outside of tokio.
pub fn fail_point_blocking(name: &'static str) {
    match reached(name) {
        None => {}
        Some(Stop::For(time)) => std::thread::sleep(time),
        Some(Stop::Forever) => loop {
            std::thread::park();
        },
    }
}

/// True when something is to go wrong here: the fail point is armed. `NAME=2*off->1*return->off` is the third time alone.
pub fn goes_wrong(name: &'static str) -> bool {
    reached(name).is_some()
}

/// How long to stand still.
#[cfg_attr(not(feature = "failpoints"), expect(dead_code, reason = "made with the feature"))]
enum Stop {
    For(Duration),
    Forever,
}

#[cfg(not(feature = "failpoints"))]
fn reached(_name: &'static str) -> Option<Stop> {
    None
}

#[cfg(feature = "failpoints")]
fn reached(name: &'static str) -> Option<Stop> {
    let argument = fail::eval(name, |argument| argument)?;
    eprintln!("fail point reached: {name}");
    let millis = argument.and_then(|argument| argument.parse().ok());
    Some(millis.map_or(Stop::Forever, |millis| Stop::For(Duration::from_millis(millis))))
}

#[cfg(feature = "failpoints")]
mod armed {
    use std::path::PathBuf;
    use std::time::Duration;

    use figment::providers::Env;

    const POLL_EVERY: Duration = Duration::from_millis(10);

    pub(super) fn start() {
        // The scenario disarms when it is dropped, and the process is to keep it.
        std::mem::forget(fail::FailScenario::setup());
        if let Some(path) = Env::var("FAILPOINTS_FILE") {
            std::thread::spawn(move || follow(PathBuf::from(path)));
        }
    }

    fn follow(path: PathBuf) {
        let mut last = String::new();
        loop {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            if text != last {
                text.lines().for_each(set);
                last = text;
            }
            std::thread::sleep(POLL_EVERY);
        }
    }

    fn set(line: &str) {
        let outcome = match line.split_once('=') {
            Some((name, action)) => fail::cfg(name, action),
            None if line.is_empty() => return,
            None => Err("expected NAME=ACTION".to_owned()),
        };
        match outcome {
            Ok(()) => eprintln!("fail point set: {line}"),
            Err(error) => eprintln!("fail point {line:?} not set: {error}"),
        }
    }
}
