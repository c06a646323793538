//! Buckets: what they are used for, their generations and priorities.

use std::collections::BTreeSet;
use std::fmt;

use format::BucketNr;
use serde::Serialize;

use crate::SCHEMA_VERSION;
use crate::usage::{Usage, UsageCounts, Use};
use crate::view::SetView;

/// All buckets that are in use, or have a generation or a priority.
#[derive(Clone, Debug, Serialize)]
pub struct BucketsDoc {
    /// Version of this document's layout.
    pub schema_version: u32,
    /// Cache device.
    pub device: String,
    /// Number of buckets.
    pub nbuckets: u32,
    /// Size of a bucket.
    pub bucket_sectors: u64,
    /// Buckets by use.
    pub counts: UsageCounts,
    /// The buckets. Those that are unused and have generation and priority 0 are left out.
    pub buckets: Vec<BucketDoc>,
}

/// A bucket.
#[derive(Clone, Debug, Serialize)]
pub struct BucketDoc {
    /// Bucket number.
    pub bucket: u32,
    /// Use of the bucket.
    #[serde(rename = "use")]
    pub what: Use,
    /// Generation of the bucket: the newest of the stored one and those of pointers.
    pub generation: u8,
    /// Generation in the prio set; absent if the set could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored_generation: Option<u8>,
    /// Priority in the prio set; absent if the set could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prio: Option<u16>,
    /// Dirty sectors in the bucket.
    pub dirty_sectors: u64,
    /// Clean sectors in the bucket.
    pub clean_sectors: u64,
}

/// The buckets of a set.
pub fn buckets(view: &SetView) -> BucketsDoc {
    let (usage, _) = Usage::of(view);
    let reserved = (0..view.geometry().first_dynamic().0).map(BucketNr);
    let known = view.gens.iter().map(|(bucket, _)| bucket);
    let used = usage.used().map(|(bucket, _)| bucket);
    let numbers: BTreeSet<BucketNr> = reserved.chain(known).chain(used).collect();
    let buckets = numbers.into_iter().map(|bucket| {
        let (state, used) = (view.gens.state(bucket), usage.get(bucket));
        BucketDoc {
            bucket: bucket.0,
            what: used.what,
            generation: state.effective.unwrap_or_default().0,
            stored_generation: state.stored.map(|(generation, _)| generation.0),
            prio: state.stored.map(|(_, prio)| prio),
            dirty_sectors: used.dirty_sectors,
            clean_sectors: used.clean_sectors,
        }
    });
    let blank = |b: &BucketDoc| b.what == Use::Unused && b.generation == 0 && b.prio.unwrap_or(0) == 0;
    BucketsDoc {
        schema_version: SCHEMA_VERSION,
        device: view.device.clone(),
        nbuckets: view.geometry().nbuckets,
        bucket_sectors: view.geometry().bucket_sectors.0,
        counts: *usage.counts(),
        buckets: buckets.filter(|b| !blank(b)).collect(),
    }
}

impl fmt::Display for BucketsDoc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} buckets of {} sectors", self.nbuckets, self.bucket_sectors)?;
        let c = &self.counts;
        writeln!(
            f,
            "{} superblock, {} journal, {} prio, {} uuid, {} btree, {} data, {} unused",
            c.superblock, c.journal, c.prio, c.uuid, c.btree, c.data, c.unused
        )?;
        writeln!(
            f,
            "{:>10} {:<10} {:>4} {:>7} {:>6} {:>8} {:>8}",
            "bucket", "use", "gen", "stored", "prio", "dirty", "clean"
        )?;
        for b in &self.buckets {
            let number = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
            writeln!(
                f,
                "{:>10} {:<10} {:>4} {:>7} {:>6} {:>8} {:>8}",
                b.bucket,
                b.what.name(),
                b.generation,
                number(b.stored_generation.map(u64::from)),
                number(b.prio.map(u64::from)),
                b.dirty_sectors,
                b.clean_sectors
            )?;
        }
        Ok(())
    }
}
