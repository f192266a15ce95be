//! Kernels that are wrong on purpose: would the tests see it?
//!
//! For each fault a stand-in is built whose kernels have that one change, and the short case runs on it in every order of
//! fibers. What a missing barrier lets through depends on the order; all else must show in every one.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::cases::SHORT;
use crate::{ORDERS, Outcome, on_stand_in_at, root, succeeds};

/// A change to one file of kernels that makes it wrong.
pub(crate) struct Planted {
    /// What is wrong.
    pub(crate) name: &'static str,
    file: &'static str,
    /// What stands there, exactly once.
    from: &'static str,
    to: &'static str,
    shows: Shows,
}

/// In which orders of fibers a fault must show.
#[derive(Clone, Copy, PartialEq)]
enum Shows {
    Everywhere,
    /// In one at least: it lets threads race, and some orders happen to be the right one.
    Somewhere,
}

const fn wrong(name: &'static str, file: &'static str, from: &'static str, to: &'static str) -> Planted {
    Planted { name, file, from, to, shows: Shows::Everywhere }
}

const fn race(name: &'static str, file: &'static str, from: &'static str, to: &'static str) -> Planted {
    Planted { name, file, from, to, shows: Shows::Somewhere }
}

/// Every fault.
pub(crate) const PLANTED: [Planted; 34] = [
    wrong("a token does not see itself", "attention.cu", "positions[token] + 1", "positions[token]"),
    wrong("a token sees the next", "attention.cu", "positions[token] + 1", "positions[token] + 2"),
    wrong("another head's keys", "attention.cu", "head / (heads / kv_heads)", "head % kv_heads"),
    wrong(
        "keys for values",
        "attention.cu",
        "position % block_tokens, 1, kv_head",
        "position % block_tokens, 0, kv_head",
    ),
    wrong(
        "keys of the first block",
        "attention.cu",
        "table[position / block_tokens], position % block_tokens, 0",
        "table[0], position % block_tokens, 0",
    ),
    wrong("scores without their scale", "attention.cu", "warp_sum(score) * scale", "warp_sum(score)"),
    wrong(
        "old splits weigh too much",
        "attention.cu",
        "fmaf(split_sum, new_factor, sum * old_factor)",
        "fmaf(split_sum, new_factor, sum)",
    ),
    wrong(
        "old values keep their factor",
        "attention.cu",
        "fmaf(split, new_factor, total[i] * old_factor)",
        "fmaf(split, new_factor, total[i])",
    ),
    wrong(
        "the last split is as long as the others",
        "attention.cu",
        "keys - first < SPLIT ? keys - first : SPLIT",
        "keys < SPLIT ? keys : SPLIT",
    ),
    race(
        "no barrier after the query is read",
        "attention.cu",
        "  __syncthreads();\n\n  // Of the splits",
        "\n  // Of the splits",
    ),
    race(
        "no barrier before the next split's weights",
        "attention.cu",
        "    // Weights are read to the end before the next split's are written.\n    __syncthreads();\n",
        "",
    ),
    wrong("turned the other way", "rope.cu", "a * cosine - b * sine", "a * cosine + b * sine"),
    wrong("the wrong partner", "rope.cu", "halves ? i + pairs : 2 * i + 1", "halves ? i + pairs : i + 1"),
    wrong("the position within the batch", "rope.cu", "positions[token] * pairs * 2", "token * pairs * 2"),
    wrong(
        "always the first slot of a block",
        "rope.cu",
        "offset = slots[token] % block_tokens",
        "offset = 0",
    ),
    wrong(
        "always the first layer",
        "rope.cu",
        "((unsigned long long)block * layers + layer) * 2;",
        "((unsigned long long)block * layers) * 2;",
    ),
    race(
        "no barrier before keys are stored",
        "rope.cu",
        "  // Keys that one thread has turned another stores.\n  __syncthreads();\n",
        "",
    ),
    wrong("the mean of the wrong number", "rms_norm.cu", "/ (float)width", "/ 256.0f"),
    wrong(
        "only the first 256 elements are normed",
        "rms_norm.cu",
        "i < width; i += 256) {",
        "i < width && i < 256; i += 256) {",
    ),
    wrong(
        "sums without the closest lanes",
        "compat.cuh",
        "distance > 0; distance /= 2) x += __shfl",
        "distance > 1; distance /= 2) x += __shfl",
    ),
    wrong(
        "sums without the last warp",
        "compat.cuh",
        "warp < WARPS; warp++) sum +=",
        "warp + 1 < WARPS; warp++) sum +=",
    ),
    wrong(
        "sums of the wrong half",
        "compat.cuh",
        "lane & distance ? x[i] : x[i + half], kept",
        "lane & distance ? x[i + half] : x[i], kept",
    ),
    race(
        "no barrier before a block's sum",
        "compat.cuh",
        "  __syncthreads();\n  float sum = room[0];",
        "  float sum = room[0];",
    ),
    race(
        "no barrier after a block's greatest",
        "compat.cuh",
        "max = fmaxf(max, room[warp]);\n  __syncthreads();\n",
        "max = fmaxf(max, room[warp]);\n",
    ),
    wrong(
        "nibbles in the other half",
        "weights.cuh",
        "lane < 16 ? pair & 15 : pair >> 4",
        "lane < 16 ? pair >> 4 : pair & 15",
    ),
    wrong("nibbles side by side", "weights.cuh", "quants[lane % 16]", "quants[lane / 2]"),
    wrong("bytes without a sign", "weights.cuh", "(float)(signed char)run[2 + lane]", "(float)run[2 + lane]"),
    wrong("nibbles off by one", "weights.cuh", "- 8.0f)", "- 7.0f)"),
    wrong(
        "no least value",
        "weights.cuh",
        "nibble(run + 4, lane) + half_at(run + 2)",
        "nibble(run + 4, lane)",
    ),
    wrong("a gate upside down", "rows.cu", "1.0f + expf(-gate[i])", "1.0f + expf(gate[i])"),
    wrong(
        "the first rows, not those asked for",
        "rows.cu",
        "(unsigned long long)rows[blockIdx.y] * width",
        "(unsigned long long)blockIdx.y * width",
    ),
    wrong("a row of the table for each place", "embed.cu", "tokens[token] * row_bytes", "token * row_bytes"),
    wrong("products without their bias", "matmul.cu", "bias ? sum + bias[row] : sum", "sum"),
    wrong(
        "eight tokens' sums out of order",
        "matmul.cu",
        "t = lane * TOKENS / WARP",
        "t = TOKENS - 1 - lane * TOKENS / WARP",
    ),
];

/// An access past the end, which only a sanitizer must see: what lies there is nobody's.
const PAST_THE_END: Planted =
    wrong("an access past the end", "rows.cu", "if (i < elements) x[i] += delta[i];", "x[i] += delta[i];");

impl Planted {
    /// Says in which orders it shows, or that it does not where it must.
    pub(crate) fn check(&self) -> Outcome {
        let folder = self.build(&["-O1"])?;
        let shows = |order: &&str| {
            let mut run = on_stand_in_at(folder.path(), SHORT);
            !run.env("STAND_IN_ORDER", order).output().expect("this program").status.success()
        };
        let (seen, missed): (Vec<&str>, Vec<&str>) = ORDERS.iter().copied().partition(|order| shows(order));
        let is_enough = if self.shows == Shows::Everywhere { missed.is_empty() } else { !seen.is_empty() };
        let said = format!("seen in {seen:?}, not in {missed:?}");
        if is_enough { Ok(said) } else { Err(said) }
    }

    /// A folder with a stand-in that has it.
    fn build(&self, options: &[&str]) -> Result<TempDir, String> {
        let sources = root().join("engine/src/backend/cuda");
        let text = fs::read_to_string(sources.join(self.file)).map_err(|error| error.to_string())?;
        let found = text.matches(self.from).count();
        if found != 1 {
            return Err(format!("{}: expected {:?} once, found it {found} times", self.file, self.from));
        }
        let folder = folder();
        fs::write(folder.path().join(self.file), text.replace(self.from, self.to))
            .map_err(|error| error.to_string())?;
        build(folder.path(), options)?;
        Ok(folder)
    }
}

/// The right kernels on a stand-in whose every access to memory is checked, and a wrong one that reads past the end.
pub(crate) fn sanitized() -> Outcome {
    let options = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    let right = folder();
    build(right.path(), &options)?;
    for order in ORDERS {
        succeeds(&checked(right.path()).env("STAND_IN_ORDER", order).output().expect("this program"))?;
    }
    let wrong = PAST_THE_END.build(&options)?;
    let output = checked(wrong.path()).output().expect("this program");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() && said.contains("heap-buffer-overflow") {
        return Ok("clean, and an access past the end is seen".to_owned());
    }
    Err(format!("an access past the end was expected to be seen, got {}\n{said}", output.status))
}

/// The short case with the sanitizer's library before all others, as it must be in a program that was built without it.
fn checked(folder: &Path) -> Command {
    let found = Command::new("g++").arg("-print-file-name=libasan.so").output().expect("g++");
    let library = String::from_utf8(found.stdout).expect("a path");
    let mut command = on_stand_in_at(folder, SHORT);
    // Memory that a process leaves at its end is not what is looked for.
    command.env("LD_PRELOAD", library.trim()).env("ASAN_OPTIONS", "detect_leaks=0");
    command
}

/// Builds a stand-in out of the sources in a folder, and the right ones for those that it lacks.
fn build(folder: &Path, options: &[&str]) -> Result<(), String> {
    let mut compile = Command::new("g++");
    // The folder comes first: what lies in it is found before the right one.
    compile.current_dir(root()).args(options).arg("-I").arg(folder);
    compile.arg("@tests/cuda/options").arg("-o").arg(folder.join("libcuda.so.1"));
    succeeds(&compile.output().map_err(|error| format!("g++: {error}"))?).map(drop)
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}
