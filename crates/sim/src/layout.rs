//! The sizes of the devices of a run, as a plan has them, and their UUIDs.
//!
//! Owns the types. Must not know how devices are formatted.

use format::{CacheMode, Replacement, Uuid};
use serde::{Deserialize, Serialize};

/// A backing device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackingLayout {
    /// Size of the data in sectors.
    pub data_sectors: u64,
    /// Offset of the data in sectors.
    pub data_offset: u64,
    /// Block size in its superblock, in sectors.
    pub block_sectors: u64,
    /// Logical block size of the device.
    pub logical_block_bytes: u32,
    /// Initial cache mode.
    #[serde(with = "as_mode")]
    pub mode: CacheMode,
    /// Preferred I/O size in bytes, 0 for none. With one, partial stripes are expensive.
    pub stripe_bytes: u32,
    /// Whether the device accepts discards.
    pub discard: bool,
}

/// The sizes and properties of all devices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Layout {
    /// Bucket size in sectors.
    pub bucket_sectors: u64,
    /// Block size of the set in sectors.
    pub block_sectors: u64,
    /// Number of buckets of the cache device.
    pub nbuckets: u64,
    /// Logical block size of the cache device in bytes.
    pub logical_block_bytes: u32,
    /// Replacement policy in the superblock.
    #[serde(with = "as_replacement")]
    pub replacement: Replacement,
    /// Whether buckets are discarded before reuse.
    pub discard: bool,
    /// Whether data has checksums. Plans from before this field have none.
    #[serde(default)]
    pub checksums: bool,
    /// The backing devices.
    pub backings: Vec<BackingLayout>,
}

impl Layout {
    /// The largest block of the set and of a backing device, in sectors.
    pub fn largest_block(&self, backing: &BackingLayout) -> u64 {
        let of_devices = self.logical_block_bytes.max(backing.logical_block_bytes);
        self.block_sectors.max(backing.block_sectors).max(u64::from(of_devices) / 512)
    }

    /// A small set with one backing device of 1 MiB.
    pub fn small(mode: CacheMode) -> Layout {
        Layout {
            bucket_sectors: 8,
            block_sectors: 1,
            nbuckets: 256,
            logical_block_bytes: 512,
            replacement: Replacement::Lru,
            discard: false,
            checksums: false,
            backings: vec![BackingLayout {
                data_sectors: 2048,
                data_offset: 16,
                block_sectors: 1,
                logical_block_bytes: 512,
                mode,
                stripe_bytes: 0,
                discard: true,
            }],
        }
    }

    /// The small set with checksums, so that buckets have seven blocks of data and a footer.
    pub fn with_checksums(mode: CacheMode) -> Layout {
        Layout { checksums: true, ..Layout::small(mode) }
    }

    /// The small set with so many buckets and a backing device of this size, in sectors.
    pub fn sized(mode: CacheMode, nbuckets: u64, data_sectors: u64) -> Layout {
        let mut layout = Layout { nbuckets, ..Layout::small(mode) };
        layout.backings[0].data_sectors = data_sectors;
        layout
    }

    /// The small set in writeback mode with a second backing device of half the size.
    pub fn pair() -> Layout {
        Layout::small(CacheMode::Writeback).and_backing(1024, CacheMode::Writeback)
    }

    /// Adds a backing device like the first one, but of this size, in sectors, and with this mode.
    #[must_use]
    pub fn and_backing(mut self, data_sectors: u64, mode: CacheMode) -> Layout {
        let first = self.backings[0].clone();
        self.backings.push(BackingLayout { data_sectors, mode, ..first });
        self
    }
}

/// UUID of the set.
pub const SET_UUID: Uuid = Uuid([0x5e; 16]);

/// UUID of a backing device or volume, by its number in the run.
pub fn uuid_of(number: usize) -> Uuid {
    let mut bytes = [0xb0; 16];
    bytes[15] = number as u8;
    Uuid(bytes)
}

macro_rules! by_name {
    ($module:ident, $type:ty, $all:expr, $name:expr) => {
        /// Serializes a value as its name.
        pub mod $module {
            use serde::{Deserialize, Deserializer, Serializer, de::Error};

            /// Writes the name of the value.
            ///
            /// # Errors
            /// Those of the serializer.
            pub fn serialize<S: Serializer>(v: &$type, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(&($name)(v))
            }

            /// Reads a value by its name.
            ///
            /// # Errors
            /// If no value has this name.
            pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<$type, D::Error> {
                let found = String::deserialize(d)?;
                let all = $all.into_iter().find(|v| ($name)(v) == found);
                all.ok_or_else(|| D::Error::custom(format!("unknown name {found:?}")))
            }
        }
    };
}

by_name!(
    as_mode,
    format::CacheMode,
    [
        format::CacheMode::Writeback,
        format::CacheMode::Writethrough,
        format::CacheMode::Writearound,
        format::CacheMode::None
    ],
    |m: &format::CacheMode| m.name().to_owned()
);
by_name!(
    as_replacement,
    format::Replacement,
    [format::Replacement::Lru, format::Replacement::Fifo, format::Replacement::Random],
    |r: &format::Replacement| format!("{r:?}").to_lowercase()
);
