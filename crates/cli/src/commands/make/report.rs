//! What `make` has made, as text and as JSON.
//!
//! Owns the forms of the output. Must not touch a device.

use std::fmt;

use format::geometry::MIN_BUCKETS_KERNEL;
use serde::Serialize;

use crate::size;

/// The formatted devices.
#[derive(Serialize)]
pub(super) struct MakeReport {
    pub(super) schema_version: u32,
    /// Whether nothing was written.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) dry_run: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) set_uuid: Option<String>,
    /// The group of the sets, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) group_uuid: Option<String>,
    pub(super) devices: Vec<Made>,
}

#[derive(Serialize)]
pub(super) struct Made {
    pub(super) device: String,
    pub(super) kind: &'static str,
    pub(super) uuid: String,
    /// The set to which the device belongs; absent for a backing device that belongs to none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) set_uuid: Option<String>,
    pub(super) version: u64,
    pub(super) device_sectors: u64,
    pub(super) block_sectors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bucket_sectors: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) nbuckets: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_bucket: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) data_offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) data_sectors: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cache_mode: Option<&'static str>,
    /// Whether cached data has checksums; absent for a backing device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) checksums: Option<bool>,
    /// What a dry run found on the device, which the command would overwrite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) overwrites: Option<String>,
}

impl Made {
    /// What is to be known about the device beside the report.
    pub(super) fn warning(&self) -> Option<String> {
        let n = self.nbuckets.filter(|n| *n < MIN_BUCKETS_KERNEL)?;
        Some(format!(
            "{}: the kernel's bcache does not register caches of less than {MIN_BUCKETS_KERNEL} buckets, and this one has {n}",
            self.device
        ))
    }
}

/// The report in the form of make-bcache, which scripts parse.
pub(super) struct ToolsReport<'a>(pub(super) &'a MakeReport);

impl fmt::Display for ToolsReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for d in &self.0.devices {
            let set = d.set_uuid.as_deref().unwrap_or("00000000-0000-0000-0000-000000000000");
            write!(f, "UUID:\t\t\t{}\nSet UUID:\t\t{set}\nversion:\t\t{}\n", d.uuid, d.version)?;
            if let (Some(n), Some(bucket), Some(first)) = (d.nbuckets, d.bucket_sectors, d.first_bucket) {
                write!(
                    f,
                    "nbuckets:\t\t{n}\nblock_size:\t\t{}\nbucket_size:\t\t{bucket}\n",
                    d.block_sectors
                )?;
                write!(f, "nr_in_set:\t\t1\nnr_this_dev:\t\t0\nfirst_bucket:\t\t{first}\n")?;
            } else if let Some(offset) = d.data_offset {
                write!(f, "block_size:\t\t{}\ndata_offset:\t\t{offset}\n", d.block_sectors)?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for MakeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(set) = self.set_uuid.as_ref().filter(|_| !self.dry_run) {
            writeln!(f, "cache set {set}")?;
        }
        if let Some(group) = self.group_uuid.as_ref().filter(|_| !self.dry_run) {
            writeln!(f, "group {group}: dirty data is on two cache devices")?;
        }
        let has_cache = self.devices.iter().any(|d| d.kind == "cache");
        for d in &self.devices {
            let of = if has_cache { " of a new cache set" } else { "" };
            match self.dry_run {
                true => writeln!(f, "{}: would become a {} device{of}", d.device, d.kind)?,
                false => writeln!(f, "{}: {} device {}", d.device, d.kind, d.uuid)?,
            }
            if let Some(set) = d.set_uuid.as_ref().filter(|_| self.group_uuid.is_some() && !self.dry_run) {
                writeln!(f, "  cache set {set}")?;
            }
            let size = |sectors: u64| size::human(sectors.saturating_mul(512));
            if let (Some(n), Some(bucket)) = (d.nbuckets, d.bucket_sectors) {
                let with = if d.checksums == Some(true) { ", with checksums of cached data" } else { "" };
                writeln!(f, "  {n} buckets of {}: {}{with}", size(bucket), size(u64::from(n) * bucket))?;
            }
            if let (Some(offset), Some(data), Some(mode)) = (d.data_offset, d.data_sectors, d.cache_mode) {
                writeln!(f, "  data from sector {offset} on: {data} sectors ({}), {mode}", size(data))?;
            }
            writeln!(f, "  blocks of {} bytes, superblock version {}", d.block_sectors * 512, d.version)?;
            match &d.overwrites {
                Some(lost) => writeln!(f, "  {lost}: this would be lost")?,
                None if self.dry_run => {
                    writeln!(
                        f,
                        "  no file system or other contents that are known; all data on it would be lost"
                    )?;
                }
                None => {}
            }
        }
        if self.dry_run {
            writeln!(f, "nothing was written")?;
        }
        Ok(())
    }
}
