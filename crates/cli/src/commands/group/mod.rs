//! `ubcache group`: cache devices that have the dirty data of their backing devices twice (decision 037).
//!
//! `show` reads the devices. `add -C` writes a new one, and the superblock of the other one only if no process serves that. The other
//! commands are jobs of the daemon.

mod add;
mod change;
mod remove;
mod replace;
mod show;

use clap::{Args, Subcommand};

use crate::failure::Failure;

/// Show and change groups: cache devices of which any one may fail
///
/// Each cache device of a group is a cache set of its own. Dirty data is on two of them. `ubcache make` with several -C
/// makes a group, and `ubcache up` or the daemon serves it.
#[derive(Args, Debug)]
pub(crate) struct Group {
    #[command(subcommand)]
    command: GroupCommand,
}

#[derive(Subcommand, Debug)]
enum GroupCommand {
    Show(show::GroupShow),
    Add(add::Add),
    Remove(remove::Remove),
    Replace(replace::Replace),
}

impl Group {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match &self.command {
            GroupCommand::Show(c) => c.run(),
            GroupCommand::Add(c) => c.run(),
            GroupCommand::Remove(c) => c.run(),
            GroupCommand::Replace(c) => c.run(),
        }
    }
}
