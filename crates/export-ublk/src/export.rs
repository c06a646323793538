//! The devices of all volumes of a session.

use std::path::PathBuf;
use std::rc::Rc;

use blockio::{Driver, flusher, users};
use io::BlockVolume;

use crate::control::Control;
use crate::device::{Device, Host, KernelNode, Shape};
use crate::error::UblkError;
use crate::find::Identity;
use crate::sysfs;

/// How devices are made.
#[derive(Clone, Copy, Default, Debug)]
pub struct Options {
    /// Number of the first volume's device; the others follow. `None`: bcache3 becomes `/dev/ublkb3` if that is free, so
    /// that devices have the same names after each start; else the driver chooses.
    pub number: Option<u32>,
    /// Queues and depth of each.
    pub shape: Shape,
}

/// A volume that is a block device now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exported {
    /// The volume's name.
    pub volume: String,
    /// The block device.
    pub path: PathBuf,
    /// The process that had left the device behind, if it was there already.
    pub recovered_from: Option<i32>,
}

/// Block devices that are served. Dropping this leaves them as the death of the process does.
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
    /// Makes a device for each volume, or recovers the one that was left behind with its identity. They are served on
    /// the thread of `driver`, which should be marked as one that block devices depend on (`blockio::flusher`).
    ///
    /// # Errors
    /// Devices that were made before the error are taken away again; those that were recovered are left as they were.
    pub async fn start(
        driver: &Driver,
        volumes: Vec<(Rc<V>, Identity)>,
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
        for (i, (volume, identity)) in volumes.into_iter().enumerate() {
            let name = volume.name();
            let number = options.number.map(|n| n + i as u32);
            match this.start_one(&volume, identity, number, options.shape).await {
                Ok(mut device) => {
                    this.notes.extend(device.note.take());
                    this.note_differences(&device, number, options.shape);
                    this.note_memory(&device);
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
        identity: Identity,
        number: Option<u32>,
        shape: Shape,
    ) -> Result<Device<V, KernelNode>, UblkError> {
        let start = |number| Device::start(&self.host, volume.clone(), identity, number, shape);
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

    /// That memory is locked at all is said elsewhere.
    fn note_memory(&mut self, device: &Device<V, KernelNode>) {
        if device.holds_buffers() || !flusher::memory_is_locked() {
            return;
        }
        let path = device.path();
        let (path, shape) = (path.display(), device.shape());
        self.notes.push(format!(
            "{path}: the buffers of its requests take {} MiB (queues {}, depth {}), which is more than may be \
             locked in memory for it; if swap is on it, make it smaller (--ublk-queues, --ublk-depth)",
            shape.buffer_bytes() >> 20,
            shape.queues,
            shape.depth
        ));
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

    /// Who uses a device, in words; `None` if nobody does, and then nothing that was written to one is left in the page
    /// cache either.
    pub async fn in_use(&self) -> Option<String> {
        let numbers: Vec<u32> = self.devices.iter().map(|(_, d)| d.number()).collect();
        let look = move || {
            let users: Vec<_> =
                numbers.iter().flat_map(|n| users::of_block_device(&sysfs::disk_name(*n))).collect();
            if !users.is_empty() {
                return Some(users::in_words(&users));
            }
            // An error of the disk itself is none that waiting would end.
            let busy = numbers.iter().find(|n| matches!(sysfs::settle(**n), Ok(false)))?;
            Some(format!("{} is in use", sysfs::disk(*busy).display()))
        };
        self.host.reactor.blocking(look).await
    }

    /// Makes every request fail from now on: for devices that are removed while in use.
    pub fn fail_everything(&self) {
        self.devices.iter().for_each(|(_, d)| d.fail_everything());
    }

    /// Takes the devices away, in use or not: see [`Ublk::in_use`]. Requests are served until there are none any more.
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

    /// Answers the requests under way and begins no more. The devices stay with what is asked of them, and the driver
    /// lets go of this process when it ends; whoever starts with the same identities goes on with them.
    pub async fn hand_over(&self) {
        for (_, device) in &self.devices {
            device.leave().await;
        }
    }

    /// After an error: removes new devices, and leaves recovered ones.
    pub async fn give_up(self) {
        for (_, device) in self.devices {
            match device.recovered_from {
                Some(_) => device.leave().await,
                // There is an error to tell already.
                None => drop(device.remove().await),
            }
        }
    }
}

/// The number in the name of a volume: the number of its device, if it is free.
fn number_of(volume: &str) -> Option<u32> {
    // Larger ones are nobody's habit, and the driver has a limit.
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
