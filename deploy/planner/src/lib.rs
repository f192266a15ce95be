//! How many workers a workload needs, of which kind, and how requests are best placed on them: by simulation.
//!
//! Read [`sim`] first: a cluster in virtual time, in which the router's own code places requests on workers that cost
//! time and compute nothing. [`machine`] is what a worker costs, [`workload`] what users ask for, [`report`] what became
//! of it, [`plan`] looks
//! for the best cluster, and [`cli`] has the commands.

pub mod cli;
pub mod grid;
pub mod machine;
pub mod plan;
mod random;
pub mod report;
pub mod sim;
mod table;
pub mod workload;
