//! A headless Chromium that a test drives over the DevTools protocol, through a pipe: no port, no second program.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest wait for the browser's answer to a command.
const ANSWER_MAX: Duration = Duration::from_mins(1);

/// Messages of the browser that may wait for the test to read them.
const MESSAGES_MAX: usize = 1 << 16;

/// A browser with one page.
pub struct Browser {
    child: Child,
    commands: ChildStdin,
    messages: Receiver<Value>,
    last_id: u64,
    session: Option<String>,
    /// What the page did: requests, messages of its console, faults.
    events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts the browser, with an empty page of that size in CSS pixels.
    ///
    /// # Panics
    /// When there is none, or it does not start.
    pub fn start(width: u32, height: u32) -> Self {
        let program = chromium();
        let profile = tempfile::tempdir().expect("a temporary folder");
        // The protocol's pipe is descriptors 3 and 4.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1", "sh"])
            .arg(&program)
            .args(["--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
            .args(["--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg(format!("--window-size={width},{height}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        let commands = child.stdin.take().expect("a pipe to the browser");
        let mut output = BufReader::new(child.stdout.take().expect("a pipe from the browser"));
        let (sender, messages) = sync_channel(MESSAGES_MAX);
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|read| read > 0) {
                if message.last() == Some(&0) {
                    message.pop();
                }
                if let Ok(value) = serde_json::from_slice(&message)
                    && sender.send(value).is_err()
                {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Self {
            child,
            commands,
            messages,
            last_id: 0,
            session: None,
            events: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached =
            browser.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}));
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Sends a command of the protocol and waits for its answer.
    ///
    /// # Panics
    /// When the browser answers with a fault, or not at all.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut command = json!({"id": self.last_id, "method": method, "params": params});
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        self.commands.write_all(&bytes).expect("the browser listens");
        let until = Instant::now() + ANSWER_MAX;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let message = self.messages.recv_timeout(left);
            let mut message = message.unwrap_or_else(|fault| panic!("an answer to {method}: {fault}"));
            if message["id"] != json!(self.last_id) {
                self.events.push(message);
                continue;
            }
            assert!(message["error"].is_null(), "{method}: {}", message["error"]);
            return message["result"].take();
        }
    }

    /// Opens a page.
    pub fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", json!({"url": url}));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
    }

    /// The value of an expression of the page.
    ///
    /// # Panics
    /// When it throws.
    pub fn value(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call("Runtime.evaluate", params);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    /// Waits until an expression is true.
    ///
    /// # Panics
    /// When it is not in time; the message carries the page's text.
    pub async fn wait(&mut self, expression: &str, patience: Duration) {
        let until = Instant::now() + patience;
        while self.value(&format!("Boolean({expression})")) != json!(true) {
            if Instant::now() > until {
                let text = self.value("document.body.innerText");
                panic!(
                    "{expression} within {patience:?}; the page reads:\n{}",
                    text.as_str().unwrap_or_default()
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// What the page complained of: faults of its scripts, and its console's warnings and errors.
    pub fn complaints(&self) -> Vec<String> {
        let is_complaint = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => {
                matches!(event["params"]["type"].as_str(), Some("error" | "warning" | "assert"))
            }
            Some("Log.entryAdded") => {
                matches!(event["params"]["entry"]["level"].as_str(), Some("error" | "warning"))
            }
            _ => false,
        };
        self.events.iter().filter(is_complaint).map(|event| event["params"].to_string()).collect()
    }

    /// The addresses that the page asked for.
    pub fn requests(&self) -> Vec<String> {
        let of = |event: &Value| Some(event["params"]["request"]["url"].as_str()?.to_owned());
        let requests = self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        requests.filter_map(of).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The browser that `cargo xtask fetch-browser` unpacked.
fn chromium() -> PathBuf {
    cached("chromium-headless-shell/run", "fetch-browser")
}

/// The checker of Prometheus's rules that `cargo xtask fetch-promtool` unpacked.
pub fn promtool() -> PathBuf {
    cached("prometheus/usr/bin/promtool", "fetch-promtool")
}

fn cached(path: &str, task: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the repository");
    let path = root.join(".cache/debian").join(path);
    assert!(
        fs::exists(&path).is_ok_and(|there| there),
        "no {}: `cargo xtask test` fetches it (`cargo xtask {task}` alone)",
        path.display()
    );
    path
}
