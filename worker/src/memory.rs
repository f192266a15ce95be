//! How much memory this process may still take.

use std::fs;

/// Bytes that can be had without swapping: what the kernel says is available, or what the control group leaves,
/// whichever is less. `None` when neither can be read.
pub(crate) fn available_bytes() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    [machine, group_available()].into_iter().flatten().min()
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What the control group of a container (version 2) leaves; `None` without a limit.
fn group_available() -> Option<u64> {
    let read =
        |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    // Without a limit the file says "max", which is no number.
    Some(read("memory.max")?.saturating_sub(read("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_prints() {
        let text = "MemTotal:       24607916 kB\nMemFree:  1 kB\nMemAvailable:   20123456 kB\n";
        assert_eq!(meminfo_available(text), Some(20_123_456 * 1024));
        assert_eq!(meminfo_available("MemTotal: 1 kB\n"), None);
    }
}
