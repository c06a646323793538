//! The commands, one file each.

mod check;
mod demo;
mod dump;
mod extract;
mod flush;
mod make;
mod superblock;
mod up;

use clap::Subcommand;

use crate::failure::Failure;

/// What the program does.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    Make(make::Make),
    Super(superblock::Super),
    Up(up::Up),
    Extract(extract::Extract),
    Flush(flush::Flush),
    Check(check::Check),
    Dump(dump::Dump),
    Demo(demo::Demo),
}

impl Command {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self {
            Command::Make(c) => c.run(),
            Command::Super(c) => c.run(),
            Command::Up(c) => c.run(),
            Command::Extract(c) => c.run(),
            Command::Flush(c) => c.run(),
            Command::Check(c) => c.run(),
            Command::Dump(c) => c.run(),
            Command::Demo(c) => c.run(),
        }
    }
}
