//! Backing devices whose size changes between two starts.
//!
//! Run with `cargo test -p ubcache-sim --test resized_devices`.
#![allow(clippy::unwrap_used)]

use std::rc::Rc;

use engine::{CacheSet, SetOptions, Volume};
use format::{CacheMode, Sector, Sectors};
use sim::disk::{Retained, SimDisk};
use sim::hardware::Layout;
use sim::scenario::{Boot, Scenario};

/// First sector of the volume that only the large device has.
const FAR: u64 = 2000;
const SMALL: Sectors = Sectors(1024);

/// Starts the set with a device of this size. It has what the original device has in front of the small size, and zeros behind.
async fn open_with(b: &Boot, size: Sectors) -> (CacheSet, Rc<Volume>) {
    let disk = SimDisk::new(&b.world, 9, SimDisk::describe("resized", size.0, 512));
    disk.put(Sector(0), &b.backings[0].image().read_vec(Sector(0), SMALL));
    let set = CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
    let volume = set.register(io::Disk::new(disk.clone(), b.rt.clone())).await.unwrap();
    // The next start reads the superblock that this one has written.
    b.backings[0].put(Sector(0), &disk.image().read_vec(Sector(0), SMALL));
    (set, volume)
}

/// Clean copies behind the end of a truncated device came back when the device grew again: reads returned data that the device
/// did not have, and the data changed without a write when the cache evicted it.
#[test]
pub fn copies_behind_the_end_of_a_truncated_device_are_gone() {
    for power_loss in [false, true] {
        let mut s = Scenario::new(1, Layout::small(CacheMode::Writethrough), 0);
        s.boot(|b| async move {
            b.open().await;
            assert!(b.clients[0].write(FAR, 16, true).await);
            b.set().stop().await.unwrap();
        });
        s.power_loss(Retained::Nothing);
        s.boot(|b| async move {
            let large = b.backings[0].image().size();
            let (set, _small) = open_with(&b, SMALL).await;
            if power_loss {
                return;
            }
            set.stop().await.unwrap();
            grown(&b, large).await;
        });
        if power_loss {
            s.power_loss(Retained::Nothing);
            s.boot(|b| async move {
                let large = b.backings[0].image().size();
                grown(&b, large).await;
            });
        }
    }
}

async fn grown(b: &Boot, size: Sectors) {
    let (set, volume) = open_with(b, size).await;
    let buffer = b.rt.pool().take(16 * 512);
    let (buffer, read) = volume.read(Sector(FAR), Sectors(16), buffer, 0).await;
    read.unwrap();
    assert!(buffer.as_slice().iter().all(|byte| *byte == 0), "a copy of lost data is a hit");
    set.stop().await.unwrap();
}
