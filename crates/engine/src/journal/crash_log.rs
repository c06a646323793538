//! The keys in a crash log: decoding them, and the decision which of them are replayed.
//!
//! A crash log ([`CrashLogMemory`]) is memory and not a structure on the device, so it may belong to an older state of
//! the device. It is tied to the sequence number of the superblock, which every program that registers the device
//! raises. Entries that are on the device already are not replayed from the crash log. If an entry between the newest on the
//! device and those in the crash log is missing, the device has an older state: its data is not what the keys mean.

use format::{Bkey, Geometry, JournalSeq, Jset, Ptr};
use io::{CrashLogMemory, RECORDED_ENTRIES};

use crate::canary::{Bug, bug};

/// Decodes the keys in the words of a crash log; stops at words that cannot be a key.
fn keys_of(mut words: &[u64]) -> Vec<Bkey> {
    let mut keys = Vec::new();
    while let [high, low, rest @ ..] = words {
        let mut key = Bkey { high: *high, low: *low, ptr: Ptr(0) };
        words = match (key.nptrs(), rest) {
            (0, rest) => rest,
            (1, [ptr, rest @ ..]) => {
                key.ptr = Ptr(*ptr);
                rest
            }
            _ => break,
        };
        keys.push(key);
    }
    keys
}

/// The entries of the crash log that are newer than `newest`, the newest entry on the device; they are numbered as the
/// entries that follow it. `superblock_seq` is the sequence number that the superblock had at the start.
///
/// # Errors
/// The first entry that cannot follow. At most [`RECORDED_ENTRIES`] entries are not durable at a time: the open one, and one that
/// is being written. So an entry further on proves that the device had a newer entry than it has now.
pub(crate) fn newer_entries(
    crash_log: &dyn CrashLogMemory,
    superblock_seq: u64,
    newest: &Jset,
    geometry: &Geometry,
) -> Result<Vec<Jset>, JournalSeq> {
    if !crash_log.tied().contains(&superblock_seq) {
        return Ok(Vec::new());
    }
    let mut behind = crash_log.recorded();
    behind.retain(|(seq, _)| *seq > newest.seq.0);
    let last = newest.seq.0.saturating_add(RECORDED_ENTRIES as u64);
    if let Some((seq, _)) = behind.iter().find(|(seq, _)| *seq > last)
        && !bug(Bug::CrashLogOfNewerState)
    {
        return Err(JournalSeq(*seq));
    }
    let mut seq = newest.seq;
    let entries = behind.into_iter().map(|(_, words)| {
        seq = seq.next();
        Jset { seq, keys: keys_of(&words), ..newest.clone() }
    });
    // Keys that do not fit the geometry belong to another device.
    Ok(entries.take_while(|entry| entry.check_keys(geometry).is_ok()).collect())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use format::{Gen, Inode, Sector, Sectors};
    use io::CrashLogRef;

    use super::*;
    use crate::device::CrashLog;

    #[derive(Default)]
    struct Words(RefCell<Vec<u64>>);

    impl CrashLogMemory for Words {
        fn record(&self, _: u64, words: &[u64]) {
            self.0.borrow_mut().extend_from_slice(words);
        }

        fn recorded(&self) -> Vec<(u64, Vec<u64>)> {
            vec![(1, self.0.borrow().clone())]
        }

        fn reset(&self) {}

        fn tie(&self, _: [u64; 2]) {}

        fn tied(&self) -> [u64; 2] {
            [0, 0]
        }
    }

    #[test]
    fn keys_come_back_as_they_were() {
        let words = Rc::new(Words::default());
        let log = CrashLog::default();
        log.begin(CrashLogRef(words.clone()));
        let extent =
            |end| Bkey::extent(Inode(3), Sector(end), Sectors(8), true, Ptr::new(0, Sector(end), Gen(2)));
        let keys = [extent(8), Bkey::hole(Inode(3), Sector(24), Sectors(16)), extent(100)];
        for key in &keys {
            log.record(JournalSeq(1), key);
        }
        assert_eq!(words.0.borrow().len(), 8);
        assert_eq!(keys_of(&words.0.borrow()), keys);
        // A process that crashes while it records a key leaves a part of the key.
        let some = &words.0.borrow()[..7];
        assert_eq!(keys_of(some), keys[..2]);
        assert_eq!(keys_of(&[u64::MAX; 9]), []);
    }

    /// Keys of two entries: none, one or both of them on the device, and on a device that is too old, with and without the
    /// superblock to which the crash log is tied.
    #[test]
    fn entries_behind_the_newest_follow_it() {
        struct TwoEntries;

        impl CrashLogMemory for TwoEntries {
            fn record(&self, _: u64, _: &[u64]) {}

            fn recorded(&self) -> Vec<(u64, Vec<u64>)> {
                let hole = Bkey::hole(Inode(3), Sector(24), Sectors(16));
                [5, 7].map(|seq| (seq, vec![hole.high, hole.low])).to_vec()
            }

            fn reset(&self) {}

            fn tie(&self, _: [u64; 2]) {}

            fn tied(&self) -> [u64; 2] {
                [10, 11]
            }
        }

        let geometry = Geometry::new(Sectors(64), Sectors(1), 1024, 4, 4).unwrap();
        let seqs = |superblock_seq, newest| {
            let newest = Jset { seq: JournalSeq(newest), ..Jset::default() };
            let entries = newer_entries(&TwoEntries, superblock_seq, &newest, &geometry);
            entries.map(|entries| entries.iter().map(|e| e.seq.0).collect::<Vec<_>>())
        };
        for superblock_seq in [10, 11] {
            assert_eq!(seqs(superblock_seq, 5), Ok(vec![6]), "entry 6 was empty, and is lost");
            assert_eq!(seqs(superblock_seq, 6), Ok(vec![7]));
            assert_eq!(seqs(superblock_seq, 7), Ok(Vec::new()));
            assert_eq!(seqs(superblock_seq, 4), Err(JournalSeq(7)));
        }
        assert_eq!(seqs(12, 4), Ok(Vec::new()));
    }
}
