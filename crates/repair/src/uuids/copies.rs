//! Older copies of the UUID table.
//!
//! Owns the search for them. Each change of the table goes to a new bucket, and nothing reuses the old bucket at once. The table has
//! neither magic nor checksum: journal entries name some copies, and a copy that none names must have a device of the set.

use std::collections::{BTreeMap, BTreeSet};

use format::uuid_table::{check_uuid_table, parse_uuid_table, used};
use format::{Bkey, BucketNr, Inode, JournalSeq, Sectors, Uuid, UuidEntry, parse_entry};
use inspect::usage::{Usage, Use};
use inspect::{ReadAt, SetView};

/// Most slots of a copy that are in use.
const MOST_SLOTS: usize = 4096;

/// How new a copy is: the newest journal entry that names it, the newest time in it, and the number of its slots in use.
///
/// A slot never becomes free again, but an invalid one can be given to another device. So a copy with more slots is not always newer.
type Age = (Option<JournalSeq>, u32, usize);

/// The copies that were found.
#[derive(Default)]
pub(super) struct Copies {
    newest: Option<(Age, BucketNr, BTreeMap<Inode, UuidEntry>)>,
    volumes: BTreeSet<Inode>,
}

impl Copies {
    /// Searches all buckets that nothing uses. `current` is the key of the damaged table.
    pub(super) fn find(
        view: &SetView,
        cache: &dyn ReadAt,
        current: &Bkey,
        given: &BTreeSet<Uuid>,
    ) -> Option<Copies> {
        let g = *view.geometry();
        let mut bytes = vec![0; usize::try_from(current.size().bytes()).ok()?];
        let (usage, named) = (Usage::of(view).0, named(view, cache));
        let mut copies = Copies::default();
        // Damage may have spared a slot of the table.
        if let Some(ptr) = current.pointer()
            && cache.read_at(ptr.offset(), &mut bytes).is_ok()
        {
            copies.add_volumes(&parse_uuid_table(&bytes, 1).ok()?);
        }
        let at = current.pointer().and_then(|ptr| g.bucket_of(ptr.offset()));
        for bucket in (g.first_dynamic().0..g.nbuckets).map(BucketNr).filter(|b| Some(*b) != at) {
            // Clients decide about the bytes of data, so data is no evidence.
            if usage.get(bucket).what != Use::Unused
                || cache.read_at(g.bucket_start(bucket), &mut bytes).is_err()
            {
                continue;
            }
            let Ok(entries) = parse_uuid_table(&bytes, 1) else { continue };
            if is_plausible(&entries) {
                copies.add(bucket, &entries, named.get(&bucket), given);
            }
        }
        Some(copies)
    }

    fn add(
        &mut self,
        bucket: BucketNr,
        entries: &[UuidEntry],
        named: Option<&Mention>,
        given: &BTreeSet<Uuid>,
    ) {
        self.add_volumes(entries);
        let is_of_set =
            named.is_some_and(|n| n.is_current) || entries.iter().any(|e| given.contains(&e.uuid));
        let age = (named.map(|n| n.newest), newest_time(entries), used(entries).count());
        if is_of_set && self.newest.as_ref().is_none_or(|(newest, ..)| age > *newest) {
            self.newest = Some((age, bucket, used(entries).map(|(inode, e)| (inode, *e)).collect()));
        }
    }

    fn add_volumes(&mut self, entries: &[UuidEntry]) {
        let volumes = used(entries).filter(|(_, e)| e.is_live() && e.is_flash_only() && is_sized(e));
        self.volumes.extend(volumes.map(|(inode, _)| inode));
    }

    /// The slots of the newest copy, and its bucket.
    pub(super) fn newest(&self) -> Option<(BucketNr, &BTreeMap<Inode, UuidEntry>)> {
        self.newest.as_ref().map(|(_, bucket, slots)| (*bucket, slots))
    }

    /// The newest time in the newest copy, in Unix seconds.
    pub(super) fn time(&self) -> u32 {
        self.newest.as_ref().map_or(0, |((_, time, _), ..)| *time)
    }

    /// Whether any copy says that the slot is that of a flash-only volume.
    pub(super) fn names_volume(&self, inode: Inode) -> bool {
        self.volumes.contains(&inode)
    }
}

/// A bucket that journal entries name as that of the table.
struct Mention {
    newest: JournalSeq,
    /// The bucket was not reused since.
    is_current: bool,
}

/// The buckets that journal entries name, needed or not.
fn named(view: &SetView, cache: &dyn ReadAt) -> BTreeMap<BucketNr, Mention> {
    let (magic, block) = (view.superblock.set_magic(), view.geometry().block_sectors);
    let mut all = BTreeMap::new();
    for info in view.journal.iter().flat_map(|journal| &journal.entries) {
        let mut bytes = vec![0; usize::try_from(info.sectors.bytes()).unwrap_or(0)];
        if cache.read_at(info.sector, &mut bytes).is_err() {
            continue;
        }
        let Ok((entry, _)) = parse_entry(&bytes, magic, block) else { continue };
        let (key, seq) = (entry.uuid_bucket, entry.seq);
        let Some(ptr) = key.pointer() else { continue };
        let Some(bucket) = view.gens.bucket_of(ptr, key.size()) else { continue };
        let is_current = view.gens.age(ptr, key.size()) == Some(0);
        let named = all.entry(bucket).or_insert(Mention { newest: seq, is_current });
        if seq > named.newest {
            *named = Mention { newest: seq, is_current };
        }
    }
    all
}

/// Whether a bucket can have a table: slots in use are well formed.
///
/// An invalid slot keeps the size of the volume that it had, and loses the flag. So only live slots say something.
pub(super) fn is_plausible(entries: &[UuidEntry]) -> bool {
    let slots = used(entries).count();
    let mut live = used(entries).map(|(_, e)| e).filter(|e| e.is_live());
    slots > 0 && slots <= MOST_SLOTS && live.all(is_sized) && check_uuid_table(entries).is_ok()
}

/// The newest time in a table, in Unix seconds.
pub(super) fn newest_time(entries: &[UuidEntry]) -> u32 {
    used(entries).map(|(_, e)| e.first_reg.max(e.last_reg).max(e.invalidated)).max().unwrap_or(0)
}

/// Whether a slot has a size if and only if it is that of a volume.
fn is_sized(entry: &UuidEntry) -> bool {
    entry.is_flash_only() == (entry.sectors != Sectors(0)) && entry.sectors.0 < 1 << 48
}
