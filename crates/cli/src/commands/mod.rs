//! The commands, one file each.

mod check;
mod control;
mod daemon;
mod demo;
pub(crate) mod drain;
mod dump;
mod extract;
mod group;
mod image;
mod make;
mod nbd_args;
mod probe_bcache;
mod repair;
mod salvage;
mod superblock;
mod up;

use clap::Subcommand;

use crate::failure::Failure;

/// The option to read a device that another process writes to.
const IN_USE: &str = "--in-use";

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    Make(make::Make),
    Super(superblock::Super),
    Up(up::Up),
    Group(group::Group),
    Extract(extract::Extract),
    // For scripts that know `drain -C` by its former name.
    #[command(hide = true)]
    Flush(drain::OfflineDrain),
    Check(check::Check),
    Repair(repair::Repair),
    Salvage(salvage::Salvage),
    Dump(dump::Dump),
    Demo(demo::Demo),
    Daemon(daemon::Daemon),
    Register(control::Register),
    Unregister(control::Unregister),
    Attach(control::Attach),
    Detach(control::Detach),
    Stop(control::Stop),
    Wait(control::Wait),
    SetCachemode(control::SetCachemode),
    SetLabel(control::SetLabel),
    Drain(control::Drain),
    Wipe(control::Wipe),
    Scrub(control::Scrub),
    Damaged(control::Damaged),
    Gc(control::Gc),
    Volume(control::Volume),
    Show(control::Show),
    Tree(control::Tree),
    Status(control::Status),
    Top(control::Top),
    Explain(control::Explain),
    Get(control::Get),
    Set(control::Set),
    Reset(control::Reset),
    Jobs(control::Jobs),
    Cancel(control::Cancel),
    Events(control::Events),
    Reload(control::Reload),
    /// For the completion of names by shells.
    #[command(hide = true)]
    ListNames(control::ListNames),
    /// For `probe-bcache`, a name by which the program can be called.
    #[command(hide = true)]
    ProbeBcache(probe_bcache::ProbeBcache),
}

impl Command {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self {
            Command::Make(c) => c.run(),
            Command::Super(c) => c.run(),
            Command::Up(c) => c.run(),
            Command::Group(c) => c.run(),
            Command::Extract(c) => c.run(),
            Command::Flush(c) => c.run(),
            Command::Check(c) => c.run(),
            Command::Repair(c) => c.run(),
            Command::Salvage(c) => c.run(),
            Command::Dump(c) => c.run(),
            Command::Demo(c) => c.run(),
            Command::Daemon(c) => c.run(),
            Command::Register(c) => c.run(),
            Command::Unregister(c) => c.run(),
            Command::Attach(c) => c.run(),
            Command::Detach(c) => c.run(),
            Command::Stop(c) => c.run(),
            Command::Wait(c) => c.run(),
            Command::SetCachemode(c) => c.run(),
            Command::SetLabel(c) => c.run(),
            Command::Drain(c) => c.run(),
            Command::Wipe(c) => c.run(),
            Command::Scrub(c) => c.run(),
            Command::Damaged(c) => c.run(),
            Command::Gc(c) => c.run(),
            Command::Volume(c) => c.run(),
            Command::Show(c) => c.run(),
            Command::Tree(c) => c.run(),
            Command::Status(c) => c.run(),
            Command::Top(c) => c.run(),
            Command::Explain(c) => c.run(),
            Command::Get(c) => c.run(),
            Command::Set(c) => c.run(),
            Command::Reset(c) => c.run(),
            Command::Jobs(c) => c.run(),
            Command::Cancel(c) => c.run(),
            Command::Events(c) => c.run(),
            Command::Reload(c) => c.run(),
            Command::ListNames(c) => c.run(),
            Command::ProbeBcache(c) => c.run(),
        }
    }
}
