//! The error of the parsers: bytes that break a rule of the format.
//!
//! Owns [`Corrupt`], the only error of the parsers. It names the structure and the place inside it. It
//! must not know devices or sectors: the caller adds them. Building one allocates nothing, so that a
//! scan over invalid bytes stays cheap.

use std::fmt;

use thiserror::Error;

use crate::units::Uuid;

/// The on-disk structure that an error is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Structure {
    /// Superblock of a cache device.
    CacheSuperblock,
    /// Superblock of a backing device.
    BackingSuperblock,
    /// A journal entry.
    Jset,
    /// The journal as a whole: the entries chosen for replay.
    Journal,
    /// A btree node, which is a log of bsets.
    BtreeNode,
    /// One set of keys inside a btree node.
    Bset,
    /// A list of keys whose container is not known.
    Keys,
    /// One bucket of the table of generations and priorities.
    PrioSet,
    /// The table of the set's devices and volumes.
    UuidTable,
    /// The checksums of a bucket's data.
    Footer,
}

impl Structure {
    /// The name used in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Structure::CacheSuperblock => "cache superblock",
            Structure::BackingSuperblock => "backing superblock",
            Structure::Jset => "journal entry",
            Structure::Journal => "journal",
            Structure::BtreeNode => "btree node",
            Structure::Bset => "bset",
            Structure::Keys => "key list",
            Structure::PrioSet => "prio set",
            Structure::UuidTable => "uuid table",
            Structure::Footer => "footer",
        }
    }
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why the bytes cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// The bytes contradict the format: the device returned wrong bytes, or the structure was overwritten.
    Corrupt,
    /// The bytes use something that this code does not implement (feature bits, versions, several
    /// pointers). No check finds them damaged. Newer software may read them.
    Unsupported,
}

/// An expected or found value; the variant decides how it is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Value {
    /// A count, length or number.
    Num(u64),
    /// A checksum, magic or bit field.
    Hex(u64),
    /// At least this number.
    AtLeast(u64),
    /// At most this number.
    AtMost(u64),
    /// A number of bytes.
    Bytes(u64),
    /// At least the logical block of the device, in bytes.
    LogicalBlock(u32),
    /// A number in an inclusive range.
    Range(u64, u64),
    /// A UUID.
    Uuid(Uuid),
    /// Anything else, in words.
    Text(&'static str),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Value::Num(n) => write!(f, "{n}"),
            Value::Hex(n) => write!(f, "{n:#018x}"),
            Value::AtLeast(n) => write!(f, "at least {n}"),
            Value::AtMost(n) => write!(f, "at most {n}"),
            Value::Bytes(n) => write!(f, "{n} bytes"),
            Value::LogicalBlock(n) => write!(f, "at least {n} bytes, the logical block of the device"),
            Value::Range(a, b) => write!(f, "{a} to {b}"),
            Value::Uuid(u) => write!(f, "{u}"),
            Value::Text(t) => f.write_str(t),
        }
    }
}

/// A structure that cannot be used as found.
///
/// Displays as one line, for instance `journal entry, checksum (at byte 0): expected
/// 0x00000000deadbeef, found 0x0000000000000000`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "{structure}, {field} (at byte {offset_bytes}): {}expected {expected}, found {found}",
    .family.prefix()
)]
pub struct Corrupt {
    /// Whether the bytes are damaged or use something that is not implemented.
    pub family: Family,
    /// The structure that was being read.
    pub structure: Structure,
    /// The field of the structure.
    pub field: &'static str,
    /// The value that the format requires.
    pub expected: Value,
    /// The value that was read.
    pub found: Value,
    /// Offset of the field in bytes from the start of the structure. For a set inside a node it counts
    /// from the start of the node.
    pub offset_bytes: u64,
}

impl Family {
    const fn prefix(self) -> &'static str {
        match self {
            Family::Corrupt => "",
            Family::Unsupported => "not supported: ",
        }
    }
}

impl Corrupt {
    /// An error of the family [`Family::Corrupt`].
    pub const fn new(
        structure: Structure,
        field: &'static str,
        offset_bytes: u64,
        expected: Value,
        found: Value,
    ) -> Corrupt {
        Corrupt { family: Family::Corrupt, structure, field, expected, found, offset_bytes }
    }

    /// An error of the family [`Family::Unsupported`].
    pub const fn unsupported(
        structure: Structure,
        field: &'static str,
        offset_bytes: u64,
        expected: Value,
        found: Value,
    ) -> Corrupt {
        Corrupt { family: Family::Unsupported, structure, field, expected, found, offset_bytes }
    }

    /// True if the error is of the family [`Family::Unsupported`].
    pub fn is_unsupported(&self) -> bool {
        self.family == Family::Unsupported
    }

    /// The same error about a structure that begins `bytes` further into a larger one.
    #[must_use]
    pub const fn moved_by(mut self, bytes: u64) -> Corrupt {
        self.offset_bytes = self.offset_bytes.saturating_add(bytes);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_structure_field_expected_and_found() {
        let e = Corrupt::new(Structure::Bset, "checksum", 512, Value::Hex(0x1c0ffee0), Value::Hex(0));
        assert_eq!(
            e.to_string(),
            "bset, checksum (at byte 512): expected 0x000000001c0ffee0, found 0x0000000000000000"
        );
        let e = Corrupt::unsupported(Structure::Jset, "version", 24, Value::AtMost(1), Value::Num(9));
        assert_eq!(
            e.to_string(),
            "journal entry, version (at byte 24): not supported: expected at most 1, found 9"
        );
    }

    #[test]
    fn stays_small_enough_to_return_by_value() {
        assert!(size_of::<Corrupt>() <= 96, "{}", size_of::<Corrupt>());
    }
}
