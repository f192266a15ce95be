//! Workloads by name, in the shapes that public traces have.
//!
//! | name | lengths | arrivals and sharing |
//! |---|---|---|
//! | `chat` | short questions, answers of some hundred tokens | Poisson |
//! | `code` | medians of 1,500 and 13 tokens: Azure's coding trace of 2023 (Patel et al., *Splitwise*, ISCA 2024) | Gamma, a little bursty |
//! | `summaries` | documents of some 6,000 tokens, a page of output | Poisson |
//! | `long-prompts` | about 7,600 tokens in and 180 out on average, with a heavy tail: Kimi's (Qin et al., *Mooncake*, FAST 2025) | one in three behind a shared start |
//! | `sessions` | a system prompt of eight, then some six turns that each bring everything before | Poisson |
//! | `bursts` | medians of 1,020 and 129 tokens: Azure's conversation trace of 2023 (*Splitwise*) | bursts of four times the rate, as in *BurstGPT* (Wang et al., 2024) |

use proto::Error;

use super::{Arrivals, Lengths, Sharing, Workload};

/// Names of the presets.
pub const NAMES: [&str; 6] = ["chat", "code", "summaries", "long-prompts", "sessions", "bursts"];

/// The workload of that name, at one request per second for two minutes.
///
/// # Errors
/// INVALID_ARGUMENT that names `workload` and the names there are.
pub fn preset(name: &str) -> Result<Workload, Error> {
    let class = |(prompt_median, prompt_sigma): (f64, f64), (output_median, output_sigma): (f64, f64)| {
        Lengths { weight: 1.0, prompt_median, prompt_sigma, output_median, output_sigma }
    };
    let none = Sharing::default();
    let (lengths, arrivals, sharing) = match name {
        "chat" => {
            // Most are a line or two, some bring a page along.
            let line = Lengths { weight: 3.0, ..class((80.0, 0.9), (220.0, 0.8)) };
            (vec![line, class((700.0, 0.8), (260.0, 0.7))], Arrivals::Poisson, none)
        }
        "code" => (vec![class((1500.0, 0.8), (13.0, 0.9))], Arrivals::Gamma { cv: 1.5 }, none),
        "summaries" => (vec![class((6000.0, 0.5), (200.0, 0.5))], Arrivals::Poisson, none),
        "long-prompts" => {
            let sharing = Sharing { system_prompts: 40, system_tokens: 2048, ..none };
            (vec![class((3200.0, 1.1), (130.0, 0.8))], Arrivals::Poisson, sharing)
        }
        "sessions" => {
            let sharing = Sharing {
                system_prompts: 8,
                system_tokens: 1024,
                system_skew: 1.0,
                turns: 6.0,
                think_seconds: 15.0,
            };
            (vec![class((120.0, 1.0), (150.0, 0.7))], Arrivals::Poisson, sharing)
        }
        "bursts" => {
            let arrivals = Arrivals::OnOff { burst: 4.0, burst_seconds: 3.0, calm_seconds: 17.0 };
            (vec![class((1020.0, 1.0), (129.0, 0.9))], arrivals, none)
        }
        _ => {
            let message =
                format_args!("{} or the path of a .toml file expected, {name} came", NAMES.join(", "));
            return Err(Error::invalid("workload", message));
        }
    };
    Ok(Workload { rate: 1.0, seconds: 120.0, arrivals, lengths, sharing })
}
