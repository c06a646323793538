//! Names of devices: the number of `bcacheN` of a volume, and the name of a disk.
//!
//! Owns the numbers. Must not know the files.

use std::collections::BTreeMap;

use engine::figures::VolumeFigures;
use format::Uuid;

use crate::owner::Snapshot;

/// The identity of a volume: its set, its backing device, and its slot if it has no backing device.
type Key = (Option<Uuid>, Option<Uuid>, u32);

fn key(set: Option<Uuid>, v: &VolumeFigures) -> Key {
    match v.backing_uuid {
        // A device keeps its number when it is attached or detached.
        Some(uuid) => (None, Some(uuid), 0),
        None => (set, None, v.inode.map_or(u32::MAX, |i| i.0)),
    }
}

/// The numbers of `bcacheN`. A volume keeps its number as long as it exists; a new volume gets the lowest free number.
#[derive(Default, Debug)]
pub(crate) struct Numbers(BTreeMap<Key, u32>);

impl Numbers {
    /// Updates the numbers, and returns that of each volume in the order of the snapshot, in which volumes of sets come
    /// first.
    pub(crate) fn of(&mut self, snapshot: &Snapshot) -> Vec<u32> {
        let sets =
            snapshot.sets.iter().flat_map(|s| s.volumes.iter().map(|v| key(Some(s.status.set_uuid), v)));
        let keys: Vec<Key> = sets.chain(snapshot.alone.iter().map(|v| key(None, v))).collect();
        self.0.retain(|k, _| keys.contains(k));
        keys.iter()
            .map(|k| match self.0.get(k) {
                Some(n) => *n,
                None => {
                    let n = (0..).find(|n| !self.0.values().any(|taken| taken == n)).unwrap_or(u32::MAX);
                    self.0.insert(*k, n);
                    n
                }
            })
            .collect()
    }
}

/// The name of a device's directory: the last part of the device's path.
pub(crate) fn disk(device: &str) -> String {
    let last = device.rsplit('/').find(|part| !part.is_empty()).unwrap_or("unknown");
    if matches!(last, "." | "..") { "unknown".to_owned() } else { last.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_called_by_the_end_of_their_path() {
        for (path, name) in
            [("/dev/sdb", "sdb"), ("disk.img", "disk.img"), ("/a/b/", "b"), ("/", "unknown"), ("", "unknown")]
        {
            assert_eq!(disk(path), name);
        }
    }
}
