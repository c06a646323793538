//! The use of each bucket.
//!
//! Owns the table of bucket uses and the rules about it: one use per bucket (invariants 16 and 18), no shared cache sector
//! (17), room to start (18a). The use of a bucket is not stored on the device. It follows from the roots, so the computation
//! needs the whole view.

use format::{BucketNr, Inode, Sector};
use serde::Serialize;

use crate::extent_map::Piece;
use crate::finding::{Finding, Findings, Invariant, Mismatch, Place, Severity};
use crate::sparse::Sparse;
use crate::view::{PieceKind, SetView, data_place};

/// The use of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Use {
    /// No live contents.
    #[default]
    Unused,
    /// Reserved at the start of the device, with the superblock.
    Superblock,
    /// The journal ring.
    Journal,
    /// A set of the prio chain.
    Prio,
    /// The UUID table.
    Uuid,
    /// A btree node.
    Btree,
    /// Data of devices and volumes.
    Data,
}

impl Use {
    /// All uses, in the order of [`UsageCounts`]; unused is last.
    pub const ALL: [Use; 7] =
        [Use::Superblock, Use::Journal, Use::Prio, Use::Uuid, Use::Btree, Use::Data, Use::Unused];

    /// Short stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Use::Unused => "unused",
            Use::Superblock => "superblock",
            Use::Journal => "journal",
            Use::Prio => "prio",
            Use::Uuid => "uuid",
            Use::Btree => "btree",
            Use::Data => "data",
        }
    }
}

/// Use of one bucket. If a damaged set gives a bucket several uses, this is the first one found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BucketUse {
    /// The use of the bucket.
    pub what: Use,
    /// Sectors of dirty extents in the bucket.
    pub dirty_sectors: u64,
    /// Sectors of clean extents in the bucket.
    pub clean_sectors: u64,
}

/// Number of buckets by use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct UsageCounts {
    /// Buckets reserved for the superblock.
    pub superblock: u64,
    /// Buckets of the journal ring.
    pub journal: u64,
    /// Buckets of the prio chain.
    pub prio: u64,
    /// Buckets with the UUID table.
    pub uuid: u64,
    /// Buckets with btree nodes.
    pub btree: u64,
    /// Buckets with live data.
    pub data: u64,
    /// Buckets without a use.
    pub unused: u64,
}

/// Use of all buckets.
#[derive(Clone, Debug)]
pub struct Usage {
    table: Sparse<BucketUse>,
    first_bucket: BucketNr,
    first_dynamic: BucketNr,
    counts: UsageCounts,
}

impl Usage {
    /// Computes the use of all buckets of `view`, with findings about buckets that have two uses.
    pub fn of(view: &SetView) -> (Usage, Findings) {
        let geometry = view.geometry();
        let reserved = u64::from(geometry.first_bucket.0);
        let mut usage = Usage {
            table: Sparse::new(u64::from(geometry.nbuckets)),
            first_bucket: geometry.first_bucket,
            first_dynamic: geometry.first_dynamic(),
            counts: UsageCounts {
                superblock: reserved,
                journal: u64::from(geometry.njournal),
                ..UsageCounts::default()
            },
        };
        let mut findings = Findings::default();
        usage.metadata(view, &mut findings);
        usage.data(view, &mut findings);
        let c = &mut usage.counts;
        let used = c.superblock + c.journal + c.prio + c.uuid + c.btree + c.data;
        c.unused = u64::from(geometry.nbuckets).saturating_sub(used);
        (usage, findings)
    }

    /// Use of one bucket.
    pub fn get(&self, bucket: BucketNr) -> BucketUse {
        let fixed = |what| BucketUse { what, ..BucketUse::default() };
        if bucket < self.first_bucket {
            fixed(Use::Superblock)
        } else if bucket < self.first_dynamic {
            fixed(Use::Journal)
        } else {
            self.table.get(bucket)
        }
    }

    /// The entries of the table, in order. Unused buckets may be among them.
    pub fn used(&self) -> impl Iterator<Item = (BucketNr, BucketUse)> + '_ {
        self.table.iter()
    }

    /// Number of buckets of each use.
    pub fn counts(&self) -> &UsageCounts {
        &self.counts
    }

    fn metadata(&mut self, view: &SetView, findings: &mut Findings) {
        let prio = view.prio.chain.iter().map(|b| (*b, Use::Prio, None));
        let uuid = view.uuid_bucket.iter().map(|b| (*b, Use::Uuid, None));
        let nodes = (0..).map(crate::view::NodeId).zip(&view.nodes);
        let btree = nodes.map(|(id, node)| (node.bucket, Use::Btree, Some(id)));
        for (bucket, what, node) in prio.chain(uuid).chain(btree) {
            let before = self.get(bucket).what;
            if before != Use::Unused {
                let place = node.map_or_else(
                    || {
                        let structure = if what == Use::Prio { "prio set" } else { "uuid table" };
                        let sector = view.geometry().bucket_start(bucket);
                        Place::new(&view.device, structure).sector(sector).bucket(bucket)
                    },
                    |id| view.node_place(id),
                );
                findings.push(conflict(Invariant::BucketUse, place, what, before));
                continue;
            }
            if let Some(entry) = self.table.get_mut(bucket) {
                entry.what = what;
            }
            match what {
                Use::Prio => self.counts.prio += 1,
                Use::Uuid => self.counts.uuid += 1,
                _ => self.counts.btree += 1,
            }
        }
    }

    fn data(&mut self, view: &SetView, findings: &mut Findings) {
        let mut ranges: Vec<(Sector, Inode, &Piece)> = Vec::new();
        for (inode, piece, kind) in view.pieces().filter(|(_, _, kind)| kind.is_live()) {
            let Some(ptr) = piece.ptr else { continue };
            let Some(bucket) = view.gens.bucket_of(ptr, piece.len) else { continue };
            ranges.push((ptr.offset(), inode, piece));
            let before = self.get(bucket).what;
            if !matches!(before, Use::Unused | Use::Data) {
                let invariant =
                    if before == Use::Btree { Invariant::NodeAsData } else { Invariant::BucketUse };
                findings.push_with(invariant, Severity::Error, || {
                    conflict(invariant, data_place(view, inode, piece), Use::Data, before)
                });
                continue;
            }
            let Some(entry) = self.table.get_mut(bucket) else { continue };
            entry.what = Use::Data;
            match kind {
                PieceKind::Dirty => entry.dirty_sectors += piece.len.0,
                _ => entry.clean_sectors += piece.len.0,
            }
            self.counts.data += u64::from(before == Use::Unused);
        }
        ranges.sort_by_key(|(at, ..)| *at);
        shared(view, &ranges, findings);
    }

    /// Whether the kernel could start the set (invariant 18a).
    pub fn check_room(&self, view: &SetView) -> Option<Finding> {
        let geometry = view.geometry();
        let needed = u64::from(geometry.prio_buckets);
        let wanted = needed + u64::from(geometry.njournal);
        let (least, severity, what) = match self.counts.unused {
            free if free < needed => (needed, Severity::Error, "to write the table of generations once"),
            free if free < wanted => (wanted, Severity::Notice, "to fill the lists that a start fills"),
            _ => return None,
        };
        let place = Place::new(&view.device, "cache device");
        let expected = format!("at least {least}, {what}");
        Some(Finding::new(
            severity,
            Invariant::Room,
            place,
            Mismatch::new("buckets without any live pointer", expected, self.counts.unused),
        ))
    }
}

fn conflict(invariant: Invariant, place: Place, what: Use, before: Use) -> Finding {
    let expected = format!("a bucket for {} alone", what.name());
    let found = format!("it is used for {} too", before.name());
    Finding::new(Severity::Error, invariant, place, Mismatch::new("bucket", expected, found))
}

/// Checks invariant 17: no two live extents share a cache sector. `ranges` are sorted by cache sector.
fn shared(view: &SetView, ranges: &[(Sector, Inode, &Piece)], findings: &mut Findings) {
    let mut reaching: Option<(Sector, Inode, &Piece)> = None;
    for &(at, inode, piece) in ranges {
        let end = Sector(at.0.saturating_add(piece.len.0));
        if let Some((before_end, other_inode, other)) = reaching.filter(|(end, ..)| *end > at) {
            findings.push_with(Invariant::DataShared, Severity::Error, || {
                let other = view.range_text(other_inode, other.start, other.len);
                let found = format!("slot {other_inode}, {other}, up to cache sector {before_end}");
                Finding::new(
                    Severity::Error,
                    Invariant::DataShared,
                    data_place(view, inode, piece),
                    Mismatch::new("cache sectors", "no other live extent there", found),
                )
            });
        }
        if reaching.is_none_or(|(before, ..)| end > before) {
            reaching = Some((end, inode, piece));
        }
    }
}
