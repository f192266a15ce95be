//! The process itself in figures, under the names that Prometheus gives them for every program.

use std::fmt::Write as _;
use std::fs;
use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// Ticks of processor time per second, as Linux shows them to programs on every machine it runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// When the process started to count, seconds of Unix time.
static START: LazyLock<f64> =
    LazyLock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()));

/// Remembers when the process started.
pub(super) fn begin() {
    LazyLock::force(&START);
}

/// The figures now. What the system does not tell is left out.
pub(super) fn render() -> String {
    let mut text = String::new();
    let mut add = |name: &str, kind: &str, help: &str, labels: &str, value: Option<f64>| {
        if let Some(value) = value {
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{labels} {value}\n\n");
        }
    };
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let descriptors = fs::read_dir("/proc/self/fd").map(|entries| entries.count() as f64).ok();
    let build = format!("{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
    add("baton_build_info", "gauge", "Constant 1, of the version that runs.", &build, Some(1.0));
    add(
        "process_start_time_seconds",
        "gauge",
        "When the process started, in seconds of Unix time.",
        "",
        Some(*START),
    );
    add(
        "process_cpu_seconds_total",
        "counter",
        "Processor time of the process, in user and system mode.",
        "",
        cpu_seconds(&stat),
    );
    add(
        "process_resident_memory_bytes",
        "gauge",
        "Memory that the process has in RAM.",
        "",
        resident_bytes(&status),
    );
    add("process_open_fds", "gauge", "File descriptors that are open.", "", descriptors);
    text
}

/// From `/proc/self/stat`: fields 14 and 15, counted from 1. The second is a name in brackets, which may have spaces.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((ticks + system) as f64 / TICKS_PER_SECOND)
}

/// From `/proc/self/status`.
fn resident_bytes(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some((kib * 1024) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_as_the_kernel_writes_them() {
        let stat = "12 (a b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 4 0 99 1 2";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds(""), None);
        assert_eq!(resident_bytes("Name:\tx\nVmRSS:\t    2048 kB\n"), Some(2_097_152.0));
        assert_eq!(resident_bytes("Name:\tx\n"), None);
    }

    #[test]
    fn this_process_has_all_of_them() {
        begin();
        let text = render();
        assert_eq!(text.matches("# HELP ").count(), 5, "{text}");
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}"));
            line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
        };
        assert!(value("process_resident_memory_bytes") > 0.0 && value("process_open_fds") > 0.0, "{text}");
    }
}
