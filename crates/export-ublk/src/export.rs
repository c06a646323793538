//! The devices of all volumes of a session.
//!
//! Owns the list of devices and the order in which they are made and removed. Must not know the driver's commands.

use std::path::PathBuf;
use std::rc::Rc;

use blockio::{Driver, flusher, users};
use io::BlockVolume;

use crate::control::Control;
use crate::device::{Device, Host, KernelNode};
use crate::error::UblkError;
use crate::find::Identities;
use crate::shape::Shape;
use crate::sysfs;

/// Options for new devices.
#[derive(Clone, Copy, Default, Debug)]
pub struct Options {
    /// Number of the first volume's device; the following volumes get the following numbers.
    ///
    /// With `None`, bcache3 becomes `/dev/ublkb3` if that is free, so that devices have the same names after each start.
    /// Otherwise the driver chooses the number.
    pub number: Option<u32>,
    /// Number of queues and depth of each device.
    pub shape: Shape,
}

/// A volume that is exported as a block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exported {
    /// The volume's name.
    pub volume: String,
    /// The block device.
    pub path: PathBuf,
    /// The process that left the device behind, if the device was recovered.
    pub recovered_from: Option<i32>,
}

/// Served block devices. If this is dropped, the devices stay as after the end of the process.
pub struct Ublk<V: BlockVolume> {
    host: Rc<Host<KernelNode>>,
    devices: Vec<(String, Device<V, KernelNode>)>,
    notes: Vec<String>,
}

/// Why this host, or this user, can have no devices; `None` if it can. Loads the driver if that is possible. May block
/// for a moment.
pub fn obstacle() -> Option<UblkError> {
    Control::open().err()
}

impl<V: BlockVolume> Ublk<V> {
    /// Makes a device for each volume, or recovers the device that was left behind with an identity of the volume.
    ///
    /// The thread of `driver` serves the devices. It should be marked as a flusher (`blockio::flusher`).
    ///
    /// # Errors
    /// Devices that were made before the error are removed. Recovered devices are left behind again.
    pub async fn start(
        driver: &Driver,
        volumes: Vec<(Rc<V>, Identities)>,
        options: Options,
    ) -> Result<Ublk<V>, UblkError> {
        if !driver.reactor().is_uring() {
            let why = format!("requests come through io_uring, and I/O is done by {}", driver.backend_note());
            return Err(UblkError::NoRing(std::io::Error::other(why)));
        }
        let reactor = driver.reactor().clone();
        let control = reactor.blocking(Control::open).await?;
        let node = KernelNode(reactor.clone());
        let host = Rc::new(Host { control, node, rt: driver.handle(), reactor });
        let mut this = Ublk { host, devices: Vec::new(), notes: Vec::new() };
        for (i, (volume, identities)) in volumes.into_iter().enumerate() {
            let name = volume.name();
            let number = options.number.map(|n| n + i as u32);
            match this.start_one(&volume, identities, number, options.shape).await {
                Ok(mut device) => {
                    this.notes.extend(device.note.take());
                    this.note_differences(&device, number, options.shape);
                    this.devices.push((name, device));
                }
                Err(e) => {
                    this.give_up().await;
                    return Err(e);
                }
            }
        }
        Ok(this)
    }

    async fn start_one(
        &self,
        volume: &Rc<V>,
        identities: Identities,
        number: Option<u32>,
        shape: Shape,
    ) -> Result<Device<V, KernelNode>, UblkError> {
        let start = |number| Device::start(&self.host, volume.clone(), identities, number, shape);
        match (number, number_of(&volume.name())) {
            (None, Some(usual)) => match start(Some(usual)).await {
                Err(UblkError::Taken { .. }) => start(None).await,
                started => started,
            },
            (number, _) => start(number).await,
        }
    }

    fn note_differences(&mut self, device: &Device<V, KernelNode>, number: Option<u32>, shape: Shape) {
        let Some(pid) = device.recovered_from else { return };
        let path = device.path();
        let path = path.display();
        self.notes.push(format!("{path}: recovered; process {pid} had left it behind"));
        if number.is_some_and(|n| n != device.number()) || device.shape() != shape {
            let Shape { queues, depth } = device.shape();
            self.notes.push(format!("{path}: its number, {queues} queues and depth {depth} do not change"));
        }
    }

    /// Length of the buffers of all devices, in bytes.
    pub fn buffer_bytes(&self) -> u64 {
        self.devices.iter().map(|(_, device)| device.shape().buffer_bytes()).sum()
    }

    /// The devices whose buffers are not resident because they are beyond the limit of the process, with their shapes. None if the
    /// process has not locked its memory: no buffers stay resident then.
    pub fn beyond_memory(&self) -> impl Iterator<Item = (PathBuf, Shape)> {
        let devices = self.devices.iter().map(|(_, device)| device);
        let beyond = devices.filter(|device| !device.holds_buffers() && flusher::memory_is_locked());
        beyond.map(|device| (device.path(), device.shape()))
    }

    /// Messages for the operator.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The devices.
    pub fn exports(&self) -> Vec<Exported> {
        let exported = |(volume, device): &(String, Device<V, KernelNode>)| Exported {
            volume: volume.clone(),
            path: device.path(),
            recovered_from: device.recovered_from,
        };
        self.devices.iter().map(exported).collect()
    }

    /// Describes a user of a device; `None` if no device has users and the page cache has no data that was written to one.
    pub async fn in_use(&self) -> Option<String> {
        let numbers: Vec<u32> = self.devices.iter().map(|(_, d)| d.number()).collect();
        let find_user = move || {
            let users: Vec<_> =
                numbers.iter().flat_map(|n| users::of_block_device(&sysfs::disk_name(*n))).collect();
            if !users.is_empty() {
                return Some(users::in_words(&users));
            }
            // An error of the disk does not go away by waiting, so it does not count as use.
            let busy = numbers.iter().find(|n| matches!(sysfs::settle(**n), Ok(false)))?;
            Some(format!("{} is in use", sysfs::disk(*busy).display()))
        };
        self.host.reactor.blocking(find_user).await
    }

    /// Makes every later request fail, for devices that are removed while in use.
    pub fn fail_everything(&self) {
        self.devices.iter().for_each(|(_, d)| d.fail_everything());
    }

    /// Removes the devices, even in use: see [`Ublk::in_use`]. Requests are served until there are none.
    ///
    /// # Errors
    /// The first error; the other devices are removed as well.
    pub async fn stop(self) -> Result<(), UblkError> {
        let mut result = Ok(());
        for (_, device) in self.devices {
            result = result.and(device.remove().await);
        }
        result
    }

    /// Answers the requests under way and begins no others. The devices stay with their waiting requests.
    ///
    /// The driver releases this process when it ends. The next process that starts with the same identities recovers them.
    pub async fn hand_over(&self) {
        for (_, device) in &self.devices {
            device.leave().await;
        }
    }

    /// Cleans up after an error: removes new devices, and leaves recovered ones behind.
    pub async fn give_up(self) {
        for (_, device) in self.devices {
            match device.recovered_from {
                Some(_) => device.leave().await,
                // The caller reports an earlier error.
                None => drop(device.remove().await),
            }
        }
    }
}

/// The number in the name of a volume, which becomes the number of its device if it is free.
fn number_of(volume: &str) -> Option<u32> {
    // Larger numbers are not usual, and the driver has a limit.
    volume.strip_prefix("bcache")?.parse().ok().filter(|n| *n < 1024)
}

#[cfg(test)]
mod tests {
    use super::number_of;

    #[test]
    fn volumes_have_numbers() {
        assert_eq!(number_of("bcache0"), Some(0));
        assert_eq!(number_of("bcache17"), Some(17));
        for other in ["bcache", "bcache-1", "bcache5000", "data", "0"] {
            assert_eq!(number_of(other), None, "{other}");
        }
    }
}
