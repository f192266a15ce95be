//! Named places where a test can stop a real process in the middle of a phase.
//!
//! Without the cargo feature `failpoints` they are nothing. With it, the environment variable `FAILPOINTS` names those
//! that act: `FAILPOINTS='decode_fetching=return'`. A task that reaches one says so on stderr and stands still; the
//! process goes on, until the test kills it.

/// Reads `FAILPOINTS`. Called once, when the process starts.
pub fn arm_fail_points() {
    #[cfg(feature = "failpoints")]
    // The scenario disarms when it is dropped, and the process is to keep it.
    std::mem::forget(fail::FailScenario::setup());
}

/// Stands still here for ever if the fail point is armed.
pub async fn fail_point(name: &'static str) {
    if reached(name) {
        std::future::pending::<()>().await;
    }
}

/// Like [`fail_point`], for a thread outside of tokio.
pub fn fail_point_blocking(name: &'static str) {
    while reached(name) {
        std::thread::park();
    }
}

#[cfg(feature = "failpoints")]
fn reached(name: &'static str) -> bool {
    let reached = fail::eval(name, |_| ()).is_some();
    if reached {
        eprintln!("fail point {name} reached");
    }
    reached
}

#[cfg(not(feature = "failpoints"))]
fn reached(_name: &'static str) -> bool {
    false
}
