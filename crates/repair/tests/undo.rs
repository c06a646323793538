//! The undo file: a repair is taken back as long as the set was not used.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code")]

mod common;

use std::path::{Path, PathBuf};

use common::{Set, Unreadable, structures};
use format::checksum::crc64;
use format::journal::JsetBuilder;
use format::{Uuid, parse_entry};
use inspect::{FileSource, SliceSource};
use repair::{Guard, IfUsed, Undo, UndoError, UndoneDevice, plan};

/// A set with one flipped bit in a leaf, repaired; with its undo file.
struct Repaired {
    set: Set,
    dir: tempfile::TempDir,
    damaged: Vec<u8>,
    undo: Undo,
}

impl Repaired {
    fn new() -> Repaired {
        let set = Set::new("04-writeback-killed");
        let dir = tempfile::tempdir().unwrap();
        let path = std::fs::canonicalize(dir.path()).unwrap().join("cache");
        let leaf = structures(&set).into_iter().find(|s| s.name == "leaf").unwrap();
        let mut damaged = set.cache.clone();
        damaged[leaf.used] ^= 0x10;
        std::fs::write(&path, &damaged).unwrap();
        let undo = undo_of(&path, &set.backing);
        undo.save(&dir.path().join("undo")).unwrap();
        undo.apply().unwrap();
        let repaired = Repaired { set, dir, damaged, undo };
        assert!(repaired.bytes() == repaired.set.cache);
        repaired
    }

    fn path(&self) -> PathBuf {
        self.undo.devices[0].path.clone()
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path()).unwrap()
    }

    fn loaded(&self) -> Undo {
        Undo::load(&self.dir.path().join("undo")).unwrap()
    }

    /// Writes one more journal entry, as each start of a set does.
    fn use_it(&self) -> Vec<u8> {
        let mut bytes = self.bytes();
        let view = &self.set.view;
        let (magic, block) = (view.superblock.set_magic(), view.geometry().block_sectors);
        let newest = *view.journal.as_ref().unwrap().newest_info().unwrap();
        let at = newest.sector.bytes() as usize;
        let (entry, _) = parse_entry(&bytes[at..], magic, block).unwrap();
        let mut builder = JsetBuilder::begin(vec![0; 32768], block);
        let len = builder.finish(magic, entry.seq.next(), entry.last_seq, &entry.roots());
        let at = at + newest.sectors.bytes() as usize;
        bytes[at..at + len].copy_from_slice(&builder.into_inner()[..len]);
        std::fs::write(self.path(), &bytes).unwrap();
        bytes
    }
}

fn undo_of(path: &Path, backing: &[u8]) -> Undo {
    let cache = FileSource::open(path).unwrap();
    let backing = SliceSource::new("backing", backing);
    let plan = plan(&cache, &[&backing], Uuid([3; 16]));
    assert!(plan.is_complete(), "{}", plan.report());
    let changes = plan.cache().changes().unwrap();
    let device = UndoneDevice { path: path.to_owned(), sectors: inspect::ReadAt::sectors(&cache), changes };
    Undo { devices: vec![device], guard: Some(Guard::of(path, plan.cache())) }
}

#[test]
fn a_repair_is_taken_back_once_and_again() {
    let repaired = Repaired::new();
    let undo = repaired.loaded();
    assert_eq!(undo, repaired.undo);
    undo.check_revert(IfUsed::Refuse).unwrap();
    for _ in 0..2 {
        undo.revert(IfUsed::Refuse).unwrap();
        assert!(repaired.bytes() == repaired.damaged);
    }
}

/// The set was served after the repair. The leaf was not written since, so its bytes are those of the repair. With the old ones the set
/// would be damaged again.
#[test]
fn a_repair_of_a_set_that_was_used_since_is_not_taken_back() {
    let repaired = Repaired::new();
    let used = repaired.use_it();
    let undo = repaired.loaded();
    let why = undo.revert(IfUsed::Refuse).unwrap_err();
    assert!(matches!(why, UndoError::Used { .. }), "{why}");
    assert!(why.to_string().contains("was used since") && why.to_string().contains("--force"), "{why}");
    assert!(undo.check_revert(IfUsed::Refuse).is_err());
    assert!(repaired.bytes() == used, "nothing was written");
    undo.revert(IfUsed::Revert).unwrap();
    let differing = repaired.bytes().iter().zip(&used).filter(|(a, b)| a != b).count();
    assert_eq!(differing, 1, "--force takes the repair back: the flipped bit is there again");
}

/// A power failure during the repair or its undo can leave a sector that cannot be read until it is written.
#[test]
fn a_sector_that_cannot_be_read_is_written() {
    let repaired = Repaired::new();
    let device = &repaired.undo.devices[0];
    let at = device.changes[0].at.0;
    for image in [&repaired.set.cache, &repaired.damaged] {
        let cache = Unreadable { image: SliceSource::new("cache", image), sectors: at..at + 1 };
        device.check_revert(&cache).unwrap();
    }
    // The sectors around it are still compared.
    let mut device = device.clone();
    let mut more = device.changes[0].clone();
    more.before.extend([1; 512]);
    more.after.extend([2; 512]);
    device.changes[0] = more;
    let cache = Unreadable { image: SliceSource::new("cache", &repaired.damaged), sectors: at..at + 1 };
    let why = device.check_revert(&cache).unwrap_err();
    assert!(matches!(why, UndoError::Changed { at: other, .. } if other.0 == at + 1), "{why}");
}

/// Files of the first version have no guard.
#[test]
fn an_older_undo_file_is_still_understood() {
    let repaired = Repaired::new();
    let path = repaired.dir.path().join("old");
    Undo { guard: None, ..repaired.undo.clone() }.save(&path).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(bytes.len() - 16);
    bytes[..16].copy_from_slice(b"ubcache undo 1\n\0");
    let sum = crc64(&bytes);
    bytes.extend(sum.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    let undo = Undo::load(&path).unwrap();
    assert_eq!((&undo.devices, &undo.guard), (&repaired.undo.devices, &None));
    undo.revert(IfUsed::Refuse).unwrap();
    assert!(repaired.bytes() == repaired.damaged);
}
