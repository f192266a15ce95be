//! Options of `baton role`.

use clap::Args;
use serde::Serialize;

/// See [`crate::role::Config`].
#[derive(Args, Serialize)]
#[command(next_help_heading = "Changing a role")]
pub(crate) struct RoleOptions {
    /// Address at which the worker serves gRPC
    #[arg(long, value_name = "HOST:PORT")]
    worker: Option<String>,
}
