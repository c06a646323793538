//! `ubcache group remove`: a cache device leaves its group.

use clap::Args;
use serde_json::json;

use super::change;
use crate::commands::control::Waiting;
use crate::failure::Failure;

/// Remove a cache device from a group
///
/// The volumes of DEV go to the other cache devices of the group, and so do the copies of dirty data that DEV has; clients do not notice
/// it. In the end DEV is an empty cache set and not registered any more. The command is refused, and changes nothing, if a volume
/// would have no other cache device. Ending the command does not end the job: `cancel` does, and DEV stays.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache group remove fast /dev/nvme0n1p2")]
pub(crate) struct Remove {
    /// A set of the group (UUID, label or cache device)
    set: String,
    /// The cache device that leaves, or the UUID or label of its set
    #[arg(value_name = "DEV")]
    device: String,
    /// Print what would be done, and do nothing
    #[arg(long, conflicts_with = "no_wait")]
    dry_run: bool,
    #[command(flatten)]
    waiting: Waiting,
}

impl Remove {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let device = self.waiting.control.device_name(&self.device)?;
        let body = json!({"device": device, "dry_run": self.dry_run});
        change::begin(&self.waiting, "removing", (&self.set, "remove"), &body)
    }
}
