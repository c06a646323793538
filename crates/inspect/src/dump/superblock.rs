//! Superblocks, decoded, as `super` and `dump … superblock` show them.
//!
//! Owns [`SuperblockDoc`]. It shows as much as the bytes allow, also for a superblock that breaks the rules; `problem` has the
//! broken rule. The text has the field names and the order of the usual superblock dump, so that scripts for that dump work.

use std::fmt::{self, Write};

use format::superblock::{
    DEFAULT_DATA_OFFSET, SUPERBLOCK_SECTOR, VERSION_BACKING, VERSION_CACHE_FEATURES, label_text,
};
use format::{Identity, RawSuperblock, Sectors, Uuid, identify};
use serde::Serialize;

use crate::SCHEMA_VERSION;
use crate::device::{DeviceSuper, check_superblock, read_superblock_bytes};
use crate::finding::Finding;
use crate::source::{ReadAt, ReadError, ReadFailure};

/// A superblock, field by field. Sizes and positions are in sectors.
#[derive(Clone, Debug, Serialize)]
pub struct SuperblockDoc {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// Device that was read.
    pub device: String,
    /// `cache`, `backing`, or `unknown`.
    pub kind: &'static str,
    /// Whether the magic is bcache's.
    pub magic_ok: bool,
    /// Sector of the superblock as its own field states it; expected: 8.
    pub first_sector: u64,
    /// Checksum as stored, in hexadecimal.
    pub csum: String,
    /// Checksum of the bytes, in hexadecimal; absent if the length that the checksum covers is not valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub csum_expected: Option<String>,
    /// Version number.
    pub version: u64,
    /// Label of a backing device.
    pub label: String,
    /// UUID of the device.
    pub uuid: String,
    /// UUID of the cache set; nil if the backing device is attached to none.
    pub set_uuid: String,
    /// Block size.
    pub block_sectors: u64,
    /// Bucket size: decoded for a valid cache device, else as stored.
    pub bucket_sectors: u64,
    /// Write counter.
    pub seq: u64,
    /// The flag word, in hexadecimal.
    pub flags: String,
    /// Unix seconds of the last mount.
    pub last_mount: u32,
    /// Fields of a cache device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheDoc>,
    /// Fields of a backing device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<BackingDoc>,
    /// The first rule that the superblock breaks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Finding>,
}

/// Fields of a cache superblock.
#[derive(Clone, Debug, Serialize)]
pub struct CacheDoc {
    /// Number of buckets, including the reserved ones.
    pub nbuckets: u64,
    /// Number of the first bucket after the superblock area.
    pub first_bucket: u64,
    /// Number of journal buckets.
    pub journal_buckets: u64,
    /// First sector after the superblock area.
    pub first_sector: u64,
    /// Number of sectors from the first sector to the end of the last bucket.
    pub cache_sectors: u64,
    /// Number of sectors of all buckets.
    pub total_sectors: u64,
    /// Whether the set was initialised, so that its journal and tree are valid.
    pub synchronous: bool,
    /// Whether buckets are discarded before reuse.
    pub discard: bool,
    /// Index of this device in the set.
    pub nr_this_dev: u16,
    /// Number of cache devices in the set.
    pub nr_in_set: u16,
    /// Replacement policy as stored.
    pub replacement: u64,
    /// Name of the replacement policy; absent if the value has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replacement_name: Option<&'static str>,
    /// Whether cached data has checksums.
    pub checksums: bool,
    /// Feature words (compatible, incompatible, read-only compatible), in hexadecimal; version 5 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<[String; 3]>,
}

/// Fields of a backing superblock.
#[derive(Clone, Debug, Serialize)]
pub struct BackingDoc {
    /// First data sector.
    pub data_offset: u64,
    /// Size of the cached device, in sectors; absent if the superblock is not valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_sectors: Option<u64>,
    /// Cache mode as stored.
    pub cache_mode: u64,
    /// Name of the cache mode; absent if the value has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_mode_name: Option<&'static str>,
    /// State as stored.
    pub state: u64,
    /// Name of the state.
    pub state_name: &'static str,
}

/// Reads and decodes the superblock of a device.
///
/// # Errors
/// If the superblock cannot be read. All other problems are in the document.
pub fn superblock(source: &dyn ReadAt) -> Result<SuperblockDoc, ReadError> {
    let bytes = read_superblock_bytes(source)?;
    let checked = check_superblock(source, &bytes[..], source.sectors());
    // The array has 4096 bytes, so this view of it exists.
    let raw = RawSuperblock::from_prefix(&bytes[..]).map_err(|_| ReadError {
        device: source.name().to_owned(),
        at: SUPERBLOCK_SECTOR,
        sectors: Sectors(8),
        reason: ReadFailure::PastEnd { end: source.sectors() },
    })?;
    let identity = identify(&bytes[..]);
    let (valid, problem) = match checked {
        Ok(valid) => (Some(valid), None),
        Err(finding) => (None, Some(*finding)),
    };
    let bucket_sectors = match &valid {
        Some(DeviceSuper::Cache(sb)) => sb.geometry().bucket_sectors.0,
        _ => u64::from(raw.bucket_size.get()),
    };
    let magic_ok = identity != Identity::NotBcache;
    Ok(SuperblockDoc {
        schema_version: SCHEMA_VERSION,
        device: source.name().to_owned(),
        kind: match identity {
            Identity::Cache => "cache",
            Identity::Backing => "backing",
            _ => "unknown",
        },
        magic_ok,
        first_sector: raw.offset.get(),
        csum: format!("{:016X}", raw.csum.get()),
        csum_expected: raw.computed_csum().map(|c| format!("{c:016X}")),
        version: raw.version.get(),
        label: label_text(&raw.label),
        uuid: Uuid(raw.uuid).to_string(),
        set_uuid: Uuid(raw.set_uuid).to_string(),
        block_sectors: u64::from(raw.block_size.get()),
        bucket_sectors,
        seq: raw.seq.get(),
        flags: format!("{:#x}", raw.flags.get()),
        last_mount: raw.last_mount.get(),
        cache: (identity == Identity::Cache).then(|| CacheDoc {
            checksums: matches!(&valid, Some(DeviceSuper::Cache(sb)) if sb.checksum_key().is_some()),
            ..cache_doc(raw, bucket_sectors)
        }),
        backing: (identity == Identity::Backing).then(|| backing_doc(raw, valid.as_ref())),
        problem,
    })
}

fn cache_doc(raw: &RawSuperblock, bucket_sectors: u64) -> CacheDoc {
    let (nbuckets, first) = (raw.nbuckets.get(), u64::from(raw.first_bucket.get()));
    let replacement = (raw.flags.get() >> 2) & 7;
    let words = [&raw.feature_compat, &raw.feature_incompat, &raw.feature_ro_compat];
    CacheDoc {
        nbuckets,
        first_bucket: first,
        journal_buckets: u64::from(raw.keys.get()),
        first_sector: first.saturating_mul(bucket_sectors),
        cache_sectors: nbuckets.saturating_sub(first).saturating_mul(bucket_sectors),
        total_sectors: nbuckets.saturating_mul(bucket_sectors),
        synchronous: raw.flags.get() & 1 != 0,
        discard: raw.flags.get() & 2 != 0,
        nr_this_dev: raw.nr_this_dev.get(),
        nr_in_set: raw.nr_in_set.get(),
        replacement,
        replacement_name: match replacement {
            0 => Some("lru"),
            1 => Some("fifo"),
            2 => Some("random"),
            _ => None,
        },
        checksums: false,
        features: (raw.version.get() == VERSION_CACHE_FEATURES)
            .then(|| words.map(|word| format!("{:#x}", word.get()))),
    }
}

fn backing_doc(raw: &RawSuperblock, valid: Option<&DeviceSuper>) -> BackingDoc {
    let (cache_mode, state) = (raw.flags.get() & 15, raw.flags.get() >> 61 & 3);
    let explicit = raw.version.get() != VERSION_BACKING;
    BackingDoc {
        data_offset: if explicit { raw.nbuckets.get() } else { DEFAULT_DATA_OFFSET.0 },
        data_sectors: match valid {
            Some(DeviceSuper::Backing(sb)) => Some(sb.data_sectors().0),
            _ => None,
        },
        cache_mode,
        cache_mode_name: match cache_mode {
            0 => Some("writethrough"),
            1 => Some("writeback"),
            2 => Some("writearound"),
            3 => Some("no caching"),
            _ => None,
        },
        state,
        state_name: match state {
            0 => "detached",
            1 => "clean",
            2 => "dirty",
            _ => "inconsistent",
        },
    }
}

/// `value [name]`, or the value alone if it has no name.
fn named(value: u64, name: Option<&str>) -> String {
    name.map_or_else(|| value.to_string(), |name| format!("{value} [{name}]"))
}

/// Removes leading zeros, as bcache-super-show prints checksums.
fn without_zeros(digits: &str) -> &str {
    let short = digits.trim_start_matches('0');
    if short.is_empty() { "0" } else { short }
}

/// `found [match]`, or `found [expected …]`.
fn matched(found: impl fmt::Display, expected: impl fmt::Display) -> String {
    let (found, expected) = (found.to_string(), expected.to_string());
    if found == expected { format!("{found} [match]") } else { format!("{found} [expected {expected}]") }
}

impl fmt::Display for SuperblockDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The values stand in one column, after the third tab stop.
        let line = |f: &mut fmt::Formatter<'_>, name: &str, value: &dyn fmt::Display| {
            let tabs = "\t".repeat(3usize.saturating_sub(name.len() / 8).max(1));
            writeln!(f, "{name}{tabs}{value}")
        };
        line(f, "sb.magic", &if self.magic_ok { "ok" } else { "bad magic" })?;
        line(f, "sb.first_sector", &matched(self.first_sector, SUPERBLOCK_SECTOR))?;
        let expected = self.csum_expected.as_deref().unwrap_or("unknown: too many journal buckets");
        line(f, "sb.csum", &matched(without_zeros(&self.csum), without_zeros(expected)))?;
        let kind = match self.kind {
            "unknown" => "unknown".to_owned(),
            kind => format!("{kind} device"),
        };
        line(f, "sb.version", &named(self.version, Some(&kind)))?;
        f.write_char('\n')?;
        line(
            f,
            "dev.label",
            &if self.label.is_empty() { "(empty)".to_owned() } else { encoded(&self.label) },
        )?;
        line(f, "dev.uuid", &self.uuid)?;
        line(f, "dev.sectors_per_block", &self.block_sectors)?;
        line(f, "dev.sectors_per_bucket", &self.bucket_sectors)?;
        if let Some(cache) = &self.cache {
            let yes_no = |b| if b { "yes" } else { "no" };
            line(f, "dev.cache.first_sector", &cache.first_sector)?;
            line(f, "dev.cache.cache_sectors", &cache.cache_sectors)?;
            line(f, "dev.cache.total_sectors", &cache.total_sectors)?;
            line(f, "dev.cache.ordered", &yes_no(cache.synchronous))?;
            line(f, "dev.cache.discard", &yes_no(cache.discard))?;
            line(f, "dev.cache.pos", &cache.nr_this_dev)?;
            line(f, "dev.cache.replacement", &named(cache.replacement, cache.replacement_name))?;
            // Programs for the usual dump know no such line, so a set without checksums has none.
            if cache.checksums {
                line(f, "dev.cache.checksums", &yes_no(cache.checksums))?;
            }
        }
        if let Some(backing) = &self.backing {
            line(f, "dev.data.first_sector", &backing.data_offset)?;
            line(f, "dev.data.cache_mode", &named(backing.cache_mode, backing.cache_mode_name))?;
            line(f, "dev.data.cache_state", &named(backing.state, Some(backing.state_name)))?;
        }
        f.write_char('\n')?;
        line(f, "cset.uuid", &self.set_uuid)
    }
}

/// Encodes a label without spaces or control characters: letters, digits and `.-_` stay, any other byte becomes `%` and two
/// hexadecimal digits.
fn encoded(label: &str) -> String {
    let mut out = String::new();
    for b in label.bytes() {
        let plain = b.is_ascii_alphanumeric() || b".-_".contains(&b);
        out.push_str(&if plain { char::from(b).to_string() } else { format!("%{b:02x}") });
    }
    out
}
