//! Findings: violations of invariants, with place and severity.
//!
//! Owns [`Finding`] and the list of invariants (format section 11). Must not know how anything is checked. A finding always
//! names device, place, expected and found, and prints as one line.
//!
//! Invariant: [`Findings`] lists a bounded number of findings per invariant and severity and counts the rest, so that the list
//! stays short even if the whole image is damaged.

use std::collections::BTreeMap;
use std::fmt;

use format::{BucketNr, Corrupt, Gen, Sector, Structure};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

/// The severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Information for the operator; a correct writer can leave this state, at least after a crash.
    Notice,
    /// The invariant does not hold: the writer of this image has a bug, or the image was damaged.
    Error,
    /// The kernel would refuse the set or shut it down. Structures that this one points to cannot be read normally.
    Fatal,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Notice => "notice",
            Severity::Error => "error",
            Severity::Fatal => "fatal",
        })
    }
}

macro_rules! invariants {
    ($($variant:ident = $number:literal $name:literal $text:literal,)*) => {
        /// The invariants of a cache set, with their numbers (format section 11). They cite sections of the format.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        pub enum Invariant {
            $(#[doc = $text] $variant,)*
        }

        impl Invariant {
            /// All of them, in order.
            pub const ALL: &'static [Invariant] = &[$(Invariant::$variant,)*];

            /// Number of the invariant (format section 11).
            pub const fn number(self) -> &'static str {
                match self { $(Invariant::$variant => $number,)* }
            }

            /// Short stable name.
            pub const fn name(self) -> &'static str {
                match self { $(Invariant::$variant => $name,)* }
            }

            /// What holds, as the table of format section 11 says it.
            pub const fn text(self) -> &'static str {
                match self { $(Invariant::$variant => $text,)* }
            }
        }
    };
}

invariants! {
    Superblock = "1" "superblock"
        "The superblock passes section 2.5.",
    JournalContiguous = "2" "journal-contiguous"
        "With *sync* there is at least one entry; no entry from `last_seq` of the newest to the newest is \
         missing, except as section 9.3 allows.",
    JournalOrder = "3" "journal-order"
        "No two valid entries have the same `seq`; `last_seq` is not above `seq` and does not fall as `seq` \
         rises.",
    JournalRoots = "4" "journal-roots"
        "The keys of root and UUID table are clean, have a pointer and a size, and point to the start of a \
         bucket behind the ring. The root's key is the greatest key. The UUID table has the metadata size. \
         The prio bucket is in range.",
    JournalKeys = "5" "journal-keys"
        "A journal key has a size, does not begin before 0, and points into one bucket, which lies behind \
         the superblock area.",
    PrioChain = "6" "prio-chain"
        "The chain has as many prio sets as section 3.2 says, all intact, all of one `seq`, no bucket \
         twice.",
    UuidTable = "7" "uuid-table"
        "No UUID is in two slots, except that of detached devices. A volume has a size.",
    NodeReadable = "8" "node-readable"
        "The bsets of each node can be read to their end (section 8.2).",
    NodeShape = "9" "node-shape"
        "Levels fall by one; a node begins at a bucket, and no other node is in it.",
    BsetOrder = "10" "bset-order"
        "The keys of a bset ascend; in a bset of a leaf extents do not overlap. Keys of size 0 do not \
         count.",
    NodeRange = "11" "node-range"
        "The keys of a node lie between the end of its predecessor and its own end.",
    MergedSize = "11a" "merged-size"
        "The merged keys of a leaf fit into the space of its bsets (section 8.5).",
    NodePartition = "12" "node-partition"
        "The children of a node cover its range, each position once.",
    ExtentValid = "13" "extent-valid"
        "An extent does not begin before 0, lies in one bucket, belongs to a slot that is or was used, and \
         lies inside its device.",
    PointerAge = "14" "pointer-age"
        "No pointer is more than 96 generations old; no dirty key is stale (notice: section 4.5 has the \
         exception).",
    Alignment = "15" "alignment"
        "Extents and their pointers begin and end at blocks, keys without a pointer excepted. Notice.",
    BucketUse = "16" "bucket-use"
        "A bucket is superblock, journal, prio set, UUID table, node, data, or unused, and only one of \
         them.",
    DataShared = "17" "data-shared"
        "No two live extents share a sector of the cache device.",
    NodeAsData = "18" "node-as-data"
        "No live extent points into the bucket of a node.",
    Room = "18a" "room"
        "A kernel can start the set: there are buckets without a live pointer for a prio chain and some \
         nodes.",
    BackingState = "19" "backing-state"
        "A device with dirty extents has state dirty. Notice after a crash.",
    CleanEqual = "20" "clean-equal"
        "Clean extents have the bytes of the backing device. Notice after a crash.",
    DataChecksum = "21" "data-checksum"
        "A block of a live extent has the checksum that the valid footer of its bucket has for it (section \
         16). Notice if the data is clean, because the backing device has it, too.",
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.number(), self.name())
    }
}

impl Serialize for Invariant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut s = serializer.serialize_struct("Invariant", 2)?;
        s.serialize_field("number", self.number())?;
        s.serialize_field("name", self.name())?;
        s.end()
    }
}

/// A place on a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Place {
    /// Name of the device.
    pub device: String,
    /// The structure ("btree node", "journal entry", …).
    pub structure: &'static str,
    /// First sector of the structure on the device, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sector: Option<u64>,
    /// Bucket of the cache device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket: Option<u32>,
    /// Generation of the pointer to the structure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation: Option<u8>,
    /// Level of the btree node; leaves have 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<u16>,
    /// Buckets of the btree nodes from the root to the node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<u32>,
    /// The part of the structure ("set 2, key 17").
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item: Option<String>,
}

impl Place {
    /// The place of a structure as a whole.
    pub fn new(device: &str, structure: &'static str) -> Place {
        Place {
            device: device.to_owned(),
            structure,
            sector: None,
            bucket: None,
            generation: None,
            level: None,
            path: Vec::new(),
            item: None,
        }
    }

    /// Sets the first sector.
    #[must_use]
    pub fn sector(mut self, sector: Sector) -> Place {
        self.sector = Some(sector.0);
        self
    }

    /// Sets the bucket.
    #[must_use]
    pub fn bucket(mut self, bucket: BucketNr) -> Place {
        self.bucket = Some(bucket.0);
        self
    }

    /// Sets the generation of the pointer to the structure.
    #[must_use]
    pub fn generation(mut self, generation: Gen) -> Place {
        self.generation = Some(generation.0);
        self
    }

    /// Sets the level and the path of the btree node.
    #[must_use]
    pub fn node(mut self, level: u16, path: Vec<u32>) -> Place {
        self.level = Some(level);
        self.path = path;
        self
    }

    /// Sets the part of the structure.
    #[must_use]
    pub fn item(mut self, item: impl fmt::Display) -> Place {
        self.item = Some(item.to_string());
        self
    }
}

/// Prints a path as messages show it and `dump` takes it.
pub(crate) fn path_text(path: &[u32]) -> String {
    path.iter().map(u32::to_string).collect::<Vec<_>>().join("→")
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.device, self.structure)?;
        let mut more = Vec::new();
        more.extend(self.sector.map(|n| format!("sector {n}")));
        match (self.bucket, self.generation) {
            (Some(b), Some(g)) => more.push(format!("bucket {b} gen {g}")),
            (Some(b), None) => more.push(format!("bucket {b}")),
            (None, _) => {}
        }
        more.extend(self.level.map(|n| format!("level {n}")));
        if !self.path.is_empty() {
            more.push(format!("path {}", path_text(&self.path)));
        }
        if !more.is_empty() {
            write!(f, " ({})", more.join(", "))?;
        }
        match &self.item {
            Some(item) => write!(f, ", {item}"),
            None => Ok(()),
        }
    }
}

/// A field or property whose value is not the expected one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    field: String,
    expected: String,
    found: String,
}

impl Mismatch {
    /// States that `field` is `found` and should be `expected`.
    pub fn new(field: impl fmt::Display, expected: impl fmt::Display, found: impl fmt::Display) -> Mismatch {
        Mismatch { field: field.to_string(), expected: expected.to_string(), found: found.to_string() }
    }
}

/// A violation of an invariant, or a notice.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// The severity.
    pub severity: Severity,
    /// The invariant that the finding is about.
    pub invariant: Invariant,
    /// The place of the violation.
    pub place: Place,
    /// The field or property in question.
    pub field: String,
    /// The expected value.
    pub expected: String,
    /// The found value.
    pub found: String,
    /// The consequence, or the assumption that is made instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Finding {
    /// A finding that the `mismatch` at `place` breaks the `invariant`.
    pub fn new(severity: Severity, invariant: Invariant, place: Place, mismatch: Mismatch) -> Finding {
        let Mismatch { field, expected, found } = mismatch;
        Finding { severity, invariant, place, field, expected, found, note: None }
    }

    /// A finding from a parser's error about the structure at `place`.
    pub fn corrupt(severity: Severity, invariant: Invariant, place: Place, error: &Corrupt) -> Finding {
        // The journal as a whole has no byte position.
        let byte = (error.structure != Structure::Journal).then(|| format!("byte {}", error.offset_bytes));
        let item: Vec<String> = place.item.iter().cloned().chain(byte).collect();
        let place = if item.is_empty() { place } else { place.item(item.join(", ")) };
        let field = if error.is_unsupported() {
            format!("{} (not supported)", error.field)
        } else {
            error.field.to_owned()
        };
        Finding::new(severity, invariant, place, Mismatch::new(field, error.expected, error.found))
    }

    /// Adds the consequence or the assumption.
    #[must_use]
    pub fn note(mut self, note: impl fmt::Display) -> Finding {
        self.note = Some(note.to_string());
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} [{}]", self.severity, self.as_error(), self.invariant)
    }
}

impl Finding {
    /// The finding as the message of an error, without severity and invariant.
    pub fn as_error(&self) -> impl fmt::Display {
        AsError(self)
    }
}

/// A finding as the message of an error.
struct AsError<'a>(&'a Finding);

impl fmt::Display for AsError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { place, field, expected, found, note, .. } = self.0;
        write!(f, "{place}: {field}: expected {expected}, found {found}")?;
        note.iter().try_for_each(|note| write!(f, "; {note}"))
    }
}

/// A list of findings in the order of discovery, bounded per invariant and severity.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    list: Vec<Finding>,
    counts: BTreeMap<(Invariant, Severity), u64>,
}

impl Findings {
    /// Number of findings of one invariant and severity that are listed. Further ones are only counted.
    pub const LISTED: u64 = 50;

    /// Adds a finding.
    pub fn push(&mut self, finding: Finding) {
        self.push_with(finding.invariant, finding.severity, || finding);
    }

    /// Counts a finding, and calls `make` only if the finding is listed.
    pub(crate) fn push_with(
        &mut self,
        invariant: Invariant,
        severity: Severity,
        make: impl FnOnce() -> Finding,
    ) {
        let count = self.counts.entry((invariant, severity)).or_insert(0);
        *count += 1;
        if *count <= Findings::LISTED {
            self.list.push(make());
        }
    }

    /// Adds all findings of `more`, with those that were only counted.
    pub fn append(&mut self, more: Findings) {
        for finding in more.list {
            self.push(finding);
        }
        for (what, n) in more.counts {
            // `push` has counted the listed findings.
            *self.counts.entry(what).or_insert(0) += n.saturating_sub(Findings::LISTED);
        }
    }

    /// The listed findings.
    pub fn list(&self) -> &[Finding] {
        &self.list
    }

    /// Number of findings of each kind, listed or not.
    pub fn counts(&self) -> &BTreeMap<(Invariant, Severity), u64> {
        &self.counts
    }

    /// Number of findings of this severity, listed or not.
    pub fn count(&self, severity: Severity) -> u64 {
        self.counts.iter().filter(|((_, s), _)| *s == severity).map(|(_, n)| n).sum()
    }

    /// The worst severity; `None` if there is no finding.
    pub fn worst(&self) -> Option<Severity> {
        self.counts.keys().map(|(_, severity)| *severity).max()
    }

    /// Number of findings that were counted and not listed.
    pub fn not_listed(&self) -> u64 {
        self.counts.values().map(|n| n.saturating_sub(Findings::LISTED)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_everything_in_one_line() {
        let place = Place::new("/dev/sdb", "btree node")
            .sector(Sector(20480))
            .bucket(BucketNr(160))
            .generation(Gen(7))
            .node(0, vec![12, 88, 160])
            .item("set 2");
        let f = Finding::new(
            Severity::Fatal,
            Invariant::NodeReadable,
            place,
            Mismatch::new("checksum", "0x1", "0x2"),
        );
        assert_eq!(
            f.to_string(),
            "fatal: /dev/sdb: btree node (sector 20480, bucket 160 gen 7, level 0, path 12→88→160), set 2: \
             checksum: expected 0x1, found 0x2 [8 node-readable]"
        );
        let json = serde_json::to_value(&f).unwrap();
        assert_eq!(json["invariant"]["number"], "8");
        assert_eq!(json["severity"], "fatal");
        assert_eq!(json["place"]["path"][1], 88);
    }

    #[test]
    fn keeps_a_bounded_number_and_counts_all() {
        let f = |s| {
            Finding::new(s, Invariant::Alignment, Place::new("d", "extent"), Mismatch::new("start", 0, 1))
        };
        let mut all = Findings::default();
        for _ in 0..70 {
            all.push(f(Severity::Notice));
        }
        let mut other = Findings::default();
        for _ in 0..60 {
            other.push(f(Severity::Notice));
        }
        other.push(f(Severity::Error));
        all.append(other);
        assert_eq!(all.count(Severity::Notice), 130);
        assert_eq!(all.list().len(), 51);
        assert_eq!(all.not_listed(), 80);
        assert_eq!(all.worst(), Some(Severity::Error));
    }

    #[test]
    fn numbers_are_those_of_the_description() {
        let numbers: Vec<_> = Invariant::ALL.iter().map(|i| i.number()).collect();
        let mut expected: Vec<String> = (1..=21).map(|n| n.to_string()).collect();
        expected.insert(18, "18a".into());
        expected.insert(11, "11a".into());
        assert_eq!(numbers, expected);
    }
}
