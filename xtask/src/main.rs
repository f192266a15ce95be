//! The project's own tools: everything that takes more than one command to set up is one command here.

mod bench;
mod clients;
mod cuda;
mod debian;
mod etcd;
mod faults;
mod fuzz;
mod model;
mod process;
mod schemas;
mod simulate;
mod stages;
mod tidy;
mod watermark;

use clap::{Parser, Subcommand};

/// Command line of `cargo xtask`.
#[derive(Parser)]
#[command(name = "cargo xtask", about = "Baton's own tools")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the release binary and serve: the default model, fetched first, or another one
    Serve {
        /// Passed on to `baton serve`; a model comes first
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run every test, with what they need fetched first, and print how long each stage took
    Test,
    /// What continuous integration runs: formatting, lints, then every test
    Ci,
    /// Check the rules of the house that a compiler does not
    Tidy,
    /// Fetch a model into the cache folder and print its path as the last word
    FetchModel {
        /// Which one
        #[arg(value_enum, default_value_t = model::Name::Smollm2)]
        name: model::Name,
    },
    /// Install the Python clients that the end-to-end tests run, and print the folder as the last word
    FetchClients,
    /// Install kubectl and the schemas that the tests of deploy/kubernetes run, and print the folder as the last word
    FetchKubernetes,
    /// Install what the tests need that lay networks of their own
    FetchNetwork,
    /// Run the twelve scenarios of faults, as root, and print their table
    Scenarios {
        /// Words of which a scenario's name must have one; all scenarios by default
        names: Vec<String>,
    },
    /// Run streams under constant faults, as root, and print what became of them
    Soak {
        /// How long
        #[arg(long, default_value_t = 2.0)]
        minutes: f64,
        /// Streams at a time
        #[arg(long, default_value_t = 50)]
        streams: usize,
        /// Which faults: the number that an earlier run printed
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Fetch the etcd server that the tests of discovery start, and print its path as the last word
    FetchEtcd,
    /// Unpack the browser that the tests of the dashboard drive, and print its path as the last word
    FetchBrowser,
    /// Unpack the checker of the alert rules, and print its path as the last word
    FetchPromtool,
    /// Fetch the compiler of CUDA kernels and build the driver that stands in for a GPU's, and print its folder as the last
    /// word
    CudaStandIn,
    /// Compile every CUDA kernel for every architecture and print what each needs
    Kernels,
    /// Build the binary that the end-to-end tests start, with fail points, into target/e2e
    E2eBinary,
    /// Give generated inputs to everything that reads outside data, or writes for outside readers
    Fuzz {
        /// A few seconds for each target, from the committed corpus alone, as the tests do
        #[arg(long, conflicts_with = "seconds")]
        short: bool,
        /// Seconds for each target
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// One target; all of them by default
        target: Option<String>,
    },
    /// Have chats with JSON schemas as response format, and judge every answer by an independent validator
    Schemas {
        /// A tenth of them, as the tests have
        #[arg(long)]
        short: bool,
    },
    /// Run the protocol in virtual time with faults at every step, and print the hand-offs that it survived
    Simulate {
        /// Schedules, each of up to four requests in a cluster of its own; 10 have some 34 hand-offs
        #[arg(long, default_value_t = 300_000)]
        schedules: u64,
    },
    /// Look for the watermark in a text that comes on standard input
    Watermark {
        /// The key that the text is asked about
        #[arg(long)]
        key: u64,
        /// Share of the vocabulary that is green
        #[arg(long, default_value_t = 0.25)]
        gamma: f32,
        /// Whose tokens the text is made of
        #[arg(long, value_enum, default_value_t = model::Name::Smollm2)]
        model: model::Name,
    },
    /// Simulate a cluster: placements and pools side by side
    Sim {
        /// Passed on to the simulator; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure, and print figures side by side
    Bench {
        /// Which benchmark
        #[arg(value_enum, default_value_t = bench::Name::Engine)]
        name: bench::Name,
    },
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().task {
        Task::Serve { arguments } => stages::serve(&arguments),
        Task::Test => stages::test(),
        Task::Ci => stages::ci(),
        Task::Tidy => tidy::check(&process::root()),
        Task::FetchModel { name } => model::fetch(name).map(|path| println!("model: {}", path.display())),
        Task::FetchClients => clients::fetch().map(|folder| println!("clients: {}", folder.display())),
        Task::FetchKubernetes => {
            clients::fetch_kubernetes().map(|folder| println!("kubernetes: {}", folder.display()))
        }
        Task::FetchNetwork => faults::fetch(),
        Task::Scenarios { names } => faults::test("scenarios", &names),
        Task::Soak { minutes, streams, seed } => faults::soak(minutes, streams, seed),
        Task::FetchEtcd => etcd::fetch().map(|path| println!("etcd: {}", path.display())),
        Task::FetchBrowser => {
            debian::fetch(&debian::Tool::Chromium).map(|path| println!("browser: {}", path.display()))
        }
        Task::FetchPromtool => {
            debian::fetch(&debian::Tool::Promtool).map(|path| println!("promtool: {}", path.display()))
        }
        Task::CudaStandIn => cuda::stand_in().map(|folder| println!("stand-in: {}", folder.display())),
        Task::Kernels => cuda::kernels(),
        Task::E2eBinary => stages::e2e_binary(),
        Task::Fuzz { short, seconds, target } => fuzz::run(&fuzz::Plan { short, seconds, only: target }),
        Task::Schemas { short } => schemas::check(short),
        Task::Simulate { schedules } => simulate::run_schedules(schedules),
        Task::Watermark { key, gamma, model } => watermark::detect(model, key, gamma),
        Task::Sim { arguments } => stages::sim(&arguments),
        Task::Bench { name } => bench::run(name),
    }
}
