//! `ubcache group add`: one more cache device.

use std::path::PathBuf;

use blockio::{Backend, Driver, DriverOptions};
use clap::Args;
use format::{CacheSuper, Uuid};
use inspect::{DeviceSuper, read_superblock};
use serve::session::{Simulation, new_uuid, open_device};

use crate::commands::IN_USE;
use crate::commands::make::for_group::{self, Options};
use crate::failure::Failure;
use crate::read_only::ReadOnlyOpener;
use crate::superblock;

/// Format a device as one more cache device of a group
///
/// The device gets a new cache set with the sizes of the other one. If that one is in no group yet, the command puts both into a
/// new group; stop its set first. Serve the new device then: the daemon copies the dirty data after `ubcache register`, and
/// `ubcache up` does so at its start.
///
/// Example: ubcache group add -C /dev/nvme0n1p2 /dev/nvme1n1p2
#[derive(Args, Debug)]
pub(crate) struct Add {
    /// A cache device of the group
    #[arg(short = 'C', long = "cache", value_name = "DEV")]
    cache: PathBuf,
    /// The new cache device
    #[arg(value_name = "NEW")]
    new: PathBuf,
    #[command(flatten)]
    options: Options,
}

impl Add {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let options = DriverOptions { backend: Backend::Pool, ..DriverOptions::default() };
        let driver = Driver::new(options).map_err(Failure::of)?;
        driver.block_on(self.add(&driver))
    }

    async fn add(&self, driver: &Driver) -> Result<(), Failure> {
        if let Some((member, group)) = self.served_member()? {
            // Its superblock does not change.
            return for_group::make(&self.new, &member, group, self.options);
        }
        // The device stays claimed until the new one has its superblock.
        let disk = open_device(driver, &self.cache, Simulation::default())?;
        let mut member = superblock::cache(&disk, &self.cache).await?;
        let group = member.group().unwrap_or_else(new_uuid);
        for_group::make(&self.new, &member, group, self.options)?;
        if member.group().is_none() && !self.options.dry_run {
            serve::group::put_into(&disk, &mut member, group).await?;
        }
        Ok(())
    }

    /// The superblock and the group of the other cache device, which may be in use; `None` if it is in no group.
    fn served_member(&self) -> Result<Option<(CacheSuper, Uuid)>, Failure> {
        let device = ReadOnlyOpener::new(true, IN_USE)?.open(&self.cache)?;
        match read_superblock(&device.source).map_err(Failure::of)? {
            DeviceSuper::Cache(member) => Ok(member.group().map(|group| (member, group))),
            DeviceSuper::Backing(_) => {
                let path = self.cache.display();
                Err(Failure::Failed(format!("{path}: expected a cache device, found a backing device")))
            }
        }
    }
}
