//! `ubcache group add`: one more cache device.

use std::path::{Path, PathBuf};

use blockio::{Backend, Driver, DriverOptions};
use clap::Args;
use format::{CacheSuper, Uuid};
use inspect::{DeviceSuper, read_superblock};
use serve::session::{Simulation, new_uuid, open_device};

use super::change;
use crate::commands::IN_USE;
use crate::commands::control::Waiting;
use crate::commands::make::for_group::{self, Options};
use crate::failure::Failure;
use crate::read_only::ReadOnlyOpener;
use crate::superblock;

/// Add a cache device to a group
///
/// The device is formatted as a new cache set with the sizes of SET. If SET is in no group yet, both become one. The daemon serves it
/// and copies all dirty data while clients use the volumes; the command waits until that is done. Ending the command does not end
/// the job: `cancel` does, and the device leaves the group again.
///
/// With -C it works offline and only formats the device; a set that is in no group must not be served then. `ubcache register` or
/// `ubcache up` with the new device makes the copies.
#[derive(Args, Debug)]
#[command(after_help = "Example: ubcache group add fast /dev/nvme1n1p2")]
pub(crate) struct Add {
    /// A set of the daemon (UUID, label or cache device) and the new cache device; with -C only the new cache device
    #[arg(value_names = ["SET", "NEW"], num_args = 1..=2, required = true)]
    names: Vec<String>,
    /// Offline: a cache device of the group, in place of SET
    #[arg(short = 'C', long = "cache", value_name = "DEV", conflicts_with_all = ["no_wait", "socket", "api"])]
    cache: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    waiting: Waiting,
}

impl Add {
    pub(super) fn run(&self) -> Result<(), Failure> {
        match (&self.cache, self.names.as_slice()) {
            (Some(cache), [new]) => self.offline(cache, Path::new(new)),
            (None, [set, new]) => {
                let body = change::of_new(new, "device", self.options)?;
                change::begin(&self.waiting, "adding", (set, "add"), &body)
            }
            (Some(_), _) => Err(Failure::Usage("with -C: expected NEW alone, found SET, too".into())),
            (None, _) => {
                Err(Failure::Usage("expected SET and NEW, or -C DEV and NEW; found one name".into()))
            }
        }
    }

    fn offline(&self, cache: &Path, new: &Path) -> Result<(), Failure> {
        let options = DriverOptions { backend: Backend::Pool, ..DriverOptions::default() };
        let driver = Driver::new(options).map_err(Failure::of)?;
        driver.block_on(self.format(&driver, cache, new))
    }

    async fn format(&self, driver: &Driver, cache: &Path, new: &Path) -> Result<(), Failure> {
        let options = (self.options, self.waiting.control.json);
        if let Some((member, group)) = served_member(cache)? {
            // Its superblock does not change.
            return for_group::make(new, &member, group, options);
        }
        // The device stays claimed until the new one has its superblock.
        let disk = open_device(driver, cache, Simulation::default())?;
        let mut member = superblock::cache(&disk, cache).await?;
        let group = member.group().unwrap_or_else(new_uuid);
        for_group::make(new, &member, group, options)?;
        if member.group().is_none() && !self.options.dry_run {
            serve::group::put_into(&disk, &mut member, group).await?;
        }
        Ok(())
    }
}

/// The superblock and the group of the other cache device, which may be in use; `None` if it is in no group.
fn served_member(cache: &Path) -> Result<Option<(CacheSuper, Uuid)>, Failure> {
    let device = ReadOnlyOpener::new(true, IN_USE)?.open(cache)?;
    match read_superblock(&device.source).map_err(Failure::of)? {
        DeviceSuper::Cache(member) => Ok(member.group().map(|group| (member, group))),
        DeviceSuper::Backing(_) => {
            let path = cache.display();
            Err(Failure::Failed(format!("{path}: expected a cache device, found a backing device")))
        }
    }
}
