//! The table: every file, the text that it shows and the effect of a write.
//!
//! Owns one entry for each name of the kernel's (semantics section 16). Tests compare names, permissions, formats and
//! answers with those of a real kernel. Figures of parts that this engine does not have are shown as zero:
//! `bset_tree_stats` beyond the nodes, `btree_sort_*`, `btree_cache_max_chain`. Must not know FUSE.

use engine::figures::{BucketFigures, SetFigures, VolumeFigures};
use engine::stats::time::{TimeStats, TimeUnit};
use engine::stats::{Human, ViewValues};
use engine::tunables::{Range, TunableInfo};
use format::{Sectors, Uuid};

use crate::owner::{DeviceOrder, Errno, Order, Owner, SetOrder, VolumeId};
use crate::{names, values};

/// The directory that a file is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// `fs/bcache`
    Global,
    /// `fs/bcache/<set>`
    Set,
    /// `fs/bcache/<set>/internal`
    Internal,
    /// `stats_total` and the directories of the other periods, of sets and devices.
    Stats,
    /// `block/<cache device>/bcache`
    Cache,
    /// `block/<backing device>/bcache`
    Backing,
    /// `block/bcacheN/bcache` of a flash-only volume
    Volume,
}

impl Place {
    /// Every place.
    pub const ALL: [Place; 7] = [
        Place::Global,
        Place::Set,
        Place::Internal,
        Place::Stats,
        Place::Cache,
        Place::Backing,
        Place::Volume,
    ];
}

/// The set, volume and view that a file is about.
pub(crate) struct Subject<'a> {
    pub(crate) owner: &'a dyn Owner,
    pub(crate) set: Option<&'a SetFigures>,
    pub(crate) volume: Option<&'a VolumeFigures>,
    pub(crate) view: Option<ViewValues>,
}

impl Subject<'_> {
    fn set(&self) -> Result<&SetFigures, Errno> {
        self.set.ok_or(Errno::ENOENT)
    }

    fn volume(&self) -> Result<&VolumeFigures, Errno> {
        self.volume.ok_or(Errno::ENOENT)
    }

    fn view(&self) -> Result<ViewValues, Errno> {
        self.view.ok_or(Errno::ENOENT)
    }
}

type Read = fn(&Subject<'_>) -> Result<String, Errno>;
type Write = fn(&Subject<'_>, &str) -> Result<Order, Errno>;

/// How a file is read.
enum Reads {
    Nothing,
    Text(Read),
    /// The tunable with the name of the file.
    Tunable,
}

/// How a file is written.
enum Writes {
    Nothing,
    Order(Write),
    /// The tunable with the name of the file.
    Tunable,
}

/// An entry of the table.
pub(crate) struct File {
    pub(crate) name: &'static str,
    reads: Reads,
    writes: Writes,
}

const fn shown(name: &'static str, read: Read) -> File {
    File { name, reads: Reads::Text(read), writes: Writes::Nothing }
}

const fn order(name: &'static str, write: Write) -> File {
    File { name, reads: Reads::Nothing, writes: Writes::Order(write) }
}

const fn both(name: &'static str, read: Read, write: Write) -> File {
    File { name, reads: Reads::Text(read), writes: Writes::Order(write) }
}

const fn tunable(name: &'static str) -> File {
    File { name, reads: Reads::Tunable, writes: Writes::Tunable }
}

impl File {
    /// Permissions: every user may read, root may write.
    pub(crate) fn mode(&self) -> u16 {
        let reads = if matches!(self.reads, Reads::Nothing) { 0 } else { 0o444 };
        let writes = if matches!(self.writes, Writes::Nothing) { 0 } else { 0o200 };
        reads | writes
    }

    pub(crate) fn read(&self, place: Place, of: &Subject<'_>) -> Result<String, Errno> {
        let mut text = match self.reads {
            Reads::Nothing => return Err(Errno::EIO),
            Reads::Text(read) => match read(of)? {
                // The text is empty, or has complete lines already.
                text if text.is_empty() || text.ends_with('\n') => return Ok(text),
                text => text,
            },
            Reads::Tunable => find_tunable(place, of, self.name)?.value,
        };
        text.push('\n');
        Ok(text)
    }

    pub(crate) fn write(&self, place: Place, of: &Subject<'_>, text: &str) -> Result<Order, Errno> {
        match self.writes {
            Writes::Nothing => Err(Errno::EIO),
            Writes::Order(write) => write(of, text),
            Writes::Tunable => {
                let tunable = find_tunable(place, of, self.name)?;
                let value = match tunable.range {
                    // The owner clamps a number out of range.
                    Range::Number(..) | Range::Flag => values::number(text)?.to_string(),
                    Range::Choices(names) => values::choice(text, names)?,
                    Range::Text(bytes) => {
                        // The kernel counts the newline, too.
                        if text.len() > bytes {
                            return Err(Errno::EINVAL);
                        }
                        text.strip_suffix('\n').unwrap_or(text).to_owned()
                    }
                };
                match place {
                    Place::Backing | Place::Volume => {
                        tell_device(of, DeviceOrder::Tune { key: self.name, value })
                    }
                    _ => tell_set(of, SetOrder::Tune { key: self.name, value }),
                }
            }
        }
    }
}

/// The tunable that a file shows.
fn find_tunable(place: Place, of: &Subject<'_>, name: &str) -> Result<TunableInfo, Errno> {
    let found = match place {
        Place::Backing | Place::Volume => of.volume()?.tunables.iter().find(|k| k.name == name),
        _ => of.set()?.tunables.iter().find(|k| k.name == name),
    };
    found.ok_or(Errno::ENOENT)
}

fn tell_device(of: &Subject<'_>, what: DeviceOrder) -> Result<Order, Errno> {
    let v = of.volume()?;
    let set = of.set.map(|s| s.status.set_uuid);
    Ok(Order::Device(VolumeId { set, backing: v.backing_uuid, name: v.name.clone() }, what))
}

fn tell_set(of: &Subject<'_>, what: SetOrder) -> Result<Order, Errno> {
    Ok(Order::Set(of.set()?.status.set_uuid, what))
}

fn human(sectors: Sectors) -> Result<String, Errno> {
    Ok(Human::bytes(sectors.bytes()).to_string())
}

fn plain(n: impl Into<u64>) -> Result<String, Errno> {
    Ok(n.into().to_string())
}

fn flag(b: bool) -> Result<String, Errno> {
    Ok(u8::from(b).to_string())
}

/// The files of a place.
pub(crate) fn of(place: Place) -> &'static [File] {
    match place {
        Place::Global => GLOBAL,
        Place::Set => SET,
        Place::Internal => INTERNAL,
        Place::Stats => STATS,
        Place::Cache => CACHE,
        Place::Backing => BACKING,
        Place::Volume => VOLUME,
    }
}

/// Names and permissions of the files of a place.
pub fn files(place: Place) -> impl Iterator<Item = (&'static str, u16)> {
    of(place).iter().map(|f| (f.name, f.mode()))
}

static GLOBAL: &[File] = &[
    order("register", |_, text| register(text, false)),
    order("register_quiet", |_, text| register(text, true)),
    order("pendings_cleanup", |_, _| Ok(Order::ForgetPending)),
];

fn register(text: &str, quiet: bool) -> Result<Order, Errno> {
    Ok(Order::Register { path: text.trim().to_owned(), quiet })
}

static STATS: &[File] = &[
    shown("bypassed", |s| Ok(Human::bytes(s.view()?.bypassed_bytes).to_string())),
    shown("cache_bypass_hits", |s| plain(s.view()?.cache_bypass_hits)),
    shown("cache_bypass_misses", |s| plain(s.view()?.cache_bypass_misses)),
    shown("cache_hit_ratio", |s| plain(s.view()?.cache_hit_ratio())),
    shown("cache_hits", |s| plain(s.view()?.cache_hits)),
    shown("cache_miss_collisions", |s| plain(s.view()?.cache_miss_collisions)),
    shown("cache_misses", |s| plain(s.view()?.cache_misses)),
];

static SET: &[File] = &[
    shown("average_key_size", |s| human(s.set()?.btree.average_extent)),
    shown("block_size", |s| human(s.set()?.block_sectors)),
    shown("btree_cache_size", |s| Ok(Human::bytes(s.set()?.status.index_bytes as u64).to_string())),
    shown("bucket_size", |s| human(s.set()?.status.bucket_sectors)),
    shown("cache_available_percent", |s| plain(100 - u64::from(s.set()?.status.in_use_percent.min(100)))),
    order("clear_stats", |s, _| tell_set(s, SetOrder::ClearStats)),
    shown("congested", |s| human(s.set()?.congested.unwrap_or(Sectors::ZERO))),
    tunable("congested_read_threshold_us"),
    tunable("congested_write_threshold_us"),
    tunable("errors"),
    order("flash_vol_create", |s, text| tell_set(s, SetOrder::CreateVolume(values::sectors(text)?))),
    tunable("io_error_halflife"),
    tunable("io_error_limit"),
    tunable("journal_delay_ms"),
    shown("root_usage_percent", |s| plain(s.set()?.btree.root_usage_percent)),
    order("stop", |s, _| tell_set(s, SetOrder::Stop)),
    tunable("synchronous"),
    shown("tree_depth", |s| plain(s.set()?.btree.depth)),
    order("unregister", |s, _| tell_set(s, SetOrder::Unregister)),
];

static INTERNAL: &[File] = &[
    shown("active_journal_entries", |s| plain(s.set()?.journal_entries_in_use)),
    shown("bset_tree_stats", |s| Ok(bset_tree_stats(s.set()?))),
    shown("btree_cache_max_chain", |_| plain(0u64)),
    shown("btree_gc_average_duration_ms", |s| timed(s.set()?, Timed::Gc, "average_duration")),
    shown("btree_gc_average_frequency_sec", |s| timed(s.set()?, Timed::Gc, "average_frequency")),
    shown("btree_gc_last_sec", |s| timed(s.set()?, Timed::Gc, "last")),
    shown("btree_gc_max_duration_ms", |s| timed(s.set()?, Timed::Gc, "max_duration")),
    shown("btree_nodes", |s| plain(s.set()?.status.btree_nodes as u64)),
    shown("btree_read_average_duration_us", |s| timed(s.set()?, Timed::Read, "average_duration")),
    shown("btree_read_average_frequency_ms", |s| timed(s.set()?, Timed::Read, "average_frequency")),
    shown("btree_read_last_ms", |s| timed(s.set()?, Timed::Read, "last")),
    shown("btree_read_max_duration_us", |s| timed(s.set()?, Timed::Read, "max_duration")),
    tunable("btree_shrinker_disabled"),
    shown("btree_sort_average_duration_us", |s| timed(s.set()?, Timed::Sort, "average_duration")),
    shown("btree_sort_average_frequency_ms", |s| timed(s.set()?, Timed::Sort, "average_frequency")),
    shown("btree_sort_last_ms", |s| timed(s.set()?, Timed::Sort, "last")),
    shown("btree_sort_max_duration_us", |s| timed(s.set()?, Timed::Sort, "max_duration")),
    shown("btree_split_average_duration_us", |s| timed(s.set()?, Timed::Split, "average_duration")),
    shown("btree_split_average_frequency_sec", |s| timed(s.set()?, Timed::Split, "average_frequency")),
    shown("btree_split_last_sec", |s| timed(s.set()?, Timed::Split, "last")),
    shown("btree_split_max_duration_us", |s| timed(s.set()?, Timed::Split, "max_duration")),
    shown("btree_used_percent", |s| plain(s.set()?.btree.used_percent)),
    shown("cache_read_races", |s| plain(s.set()?.counters.cache_read_races)),
    tunable("copy_gc_enabled"),
    shown("cutoff_writeback", |s| plain(s.set()?.tunables.cutoff_writeback)),
    shown("cutoff_writeback_sync", |s| plain(s.set()?.tunables.cutoff_writeback_sync)),
    shown("feature_compat", |_| Ok(String::new())),
    // The file lists all features of this kind, and puts those of the set in brackets.
    shown("feature_incompat", |s| {
        let large = s.set()?.status.bucket_sectors.0 > u64::from(u16::MAX);
        Ok(if large { "[large_bucket]" } else { "large_bucket" }.to_owned())
    }),
    shown("feature_ro_compat", |_| Ok(String::new())),
    shown("flush_write", |s| plain(s.set()?.counters.flush_write)),
    tunable("gc_after_writeback"),
    tunable("gc_always_rewrite"),
    tunable("idle_max_writeback_rate"),
    tunable("io_disable"),
    order("prune_cache", |s, text| tell_set(s, SetOrder::Prune(values::number(text)?))),
    shown("reclaim", |s| plain(s.set()?.counters.reclaim)),
    shown("reclaimed_journal_buckets", |s| plain(s.set()?.counters.reclaimed_journal_buckets)),
    order("trigger_gc", |s, _| tell_set(s, SetOrder::Gc)),
    shown("writeback_keys_done", |s| plain(s.set()?.counters.writeback_keys_done)),
    shown("writeback_keys_failed", |s| plain(s.set()?.counters.writeback_keys_failed)),
];

#[derive(Clone, Copy)]
enum Timed {
    Gc,
    Split,
    Sort,
    Read,
}

/// A figure of a timed operation, by the middle part of its name, in the kernel's unit.
fn timed(set: &SetFigures, what: Timed, figure: &str) -> Result<String, Errno> {
    let none = TimeStats::new();
    let work = &set.times.work;
    let (stats, frequency, duration) = match what {
        Timed::Gc => (&work.gc, TimeUnit::Seconds, TimeUnit::Millis),
        Timed::Split => (&work.split, TimeUnit::Seconds, TimeUnit::Micros),
        // The engine sorts nothing, because it keeps extents in order.
        Timed::Sort => (&none, TimeUnit::Millis, TimeUnit::Micros),
        Timed::Read => (&work.read, TimeUnit::Millis, TimeUnit::Micros),
    };
    let figures = stats.attributes(frequency, duration, set.now);
    let found = figures.into_iter().find(|(name, _, _)| *name == figure);
    found.map(|(_, _, value)| value.to_string()).ok_or(Errno::ENOENT)
}

fn bset_tree_stats(set: &SetFigures) -> String {
    let key_bytes = set.btree.extents * 24;
    format!(
        "btree nodes:\t\t{}\nwritten sets:\t\t0\nunwritten sets:\t\t0\nwritten key bytes:\t{key_bytes}\n\
         unwritten key bytes:\t0\nfloats:\t\t\t0\nfailed:\t\t\t0\n",
        set.status.btree_nodes
    )
}

static CACHE: &[File] = &[
    shown("block_size", |s| human(s.set()?.block_sectors)),
    shown("btree_written", |s| human(s.set()?.counters.btree_written)),
    shown("bucket_size", |s| human(s.set()?.status.bucket_sectors)),
    tunable("cache_replacement_policy"),
    order("clear_stats", |s, _| tell_set(s, SetOrder::ClearDeviceStats)),
    tunable("discard"),
    shown("io_errors", |s| plain(s.set()?.io_errors)),
    shown("metadata_written", |s| human(s.set()?.counters.metadata_written)),
    shown("nbuckets", |s| plain(s.set()?.status.nbuckets)),
    shown("priority_stats", |s| Ok(priority_stats(&s.owner.buckets(s.set()?.status.set_uuid)?))),
    shown("written", |s| human(s.set()?.counters.written)),
];

fn priority_stats(b: &BucketFigures) -> String {
    let percent = |n: u32| u64::from(n) * 100 / u64::from(b.total.max(1));
    let quantiles: Vec<String> = b.quantiles.iter().map(u16::to_string).collect();
    format!(
        "Unused:\t\t{}%\nClean:\t\t{}%\nDirty:\t\t{}%\nMetadata:\t{}%\nAverage:\t{}\nSectors per Q:\t{}\nQuantiles:\t[{}]\n",
        percent(b.unused),
        percent(b.clean),
        percent(b.dirty),
        percent(b.metadata),
        b.average_age,
        b.sectors_per_quantile,
        quantiles.join(" ")
    )
}

static BACKING: &[File] = &[
    order("attach", |s, text| {
        let uuid: Uuid = text.trim().parse().map_err(|_| Errno::EINVAL)?;
        tell_device(s, DeviceOrder::Attach(uuid))
    }),
    shown("backing_dev_name", |s| {
        let name = s.volume()?.backing_name.as_deref().and_then(names::disk);
        Ok(name.unwrap_or_else(|| "unknown".to_owned()))
    }),
    shown("backing_dev_uuid", |s| Ok(s.volume()?.backing_uuid.map(|u| u.to_string()).unwrap_or_default())),
    tunable("cache_mode"),
    order("clear_stats", |s, _| tell_device(s, DeviceOrder::ClearStats)),
    order("detach", |s, _| tell_device(s, DeviceOrder::Detach)),
    shown("dirty_data", |s| human(s.volume()?.dirty)),
    tunable("io_disable"),
    tunable("io_error_limit"),
    shown("io_errors", |s| plain(s.volume()?.io_errors)),
    tunable("label"),
    shown("partial_stripes_expensive", |s| flag(s.volume()?.partial_stripes_expensive)),
    tunable("readahead_cache_policy"),
    both(
        "running",
        |s| flag(!s.volume()?.stopping),
        |s, text| match values::number(text)? {
            0 => Ok(Order::Nothing),
            _ => tell_device(s, DeviceOrder::Run),
        },
    ),
    tunable("sequential_cutoff"),
    shown("state", |s| Ok(s.volume()?.state.map_or("no cache", |state| state.name()).to_owned())),
    order("stop", |s, _| tell_device(s, DeviceOrder::Stop)),
    tunable("stop_when_cache_set_failed"),
    shown("stripe_size", |s| human(stripe(s.volume()?.stripe))),
    tunable("writeback_consider_fragment"),
    tunable("writeback_delay"),
    tunable("writeback_metadata"),
    tunable("writeback_percent"),
    tunable("writeback_rate"),
    shown("writeback_rate_debug", |s| Ok(s.volume()?.writeback.rate.to_string())),
    tunable("writeback_rate_fp_term_high"),
    tunable("writeback_rate_fp_term_low"),
    tunable("writeback_rate_fp_term_mid"),
    tunable("writeback_rate_i_term_inverse"),
    tunable("writeback_rate_minimum"),
    tunable("writeback_rate_p_term_inverse"),
    tunable("writeback_rate_update_seconds"),
    tunable("writeback_running"),
];

/// The unit in which the kernel counts stripes (semantics section 11.2).
fn stripe(optimal: Sectors) -> Sectors {
    const NONE: u64 = 1 << 31;
    const LEAST: u64 = 8192;
    match optimal.0 {
        0 => Sectors(NONE),
        n if n < LEAST => Sectors(LEAST.next_multiple_of(n)),
        n => Sectors(n),
    }
}

static VOLUME: &[File] = &[
    tunable("label"),
    both(
        "size",
        |s| human(s.volume()?.size),
        |s, text| tell_device(s, DeviceOrder::Resize(values::sectors(text)?)),
    ),
    order("unregister", |s, _| tell_device(s, DeviceOrder::Unregister)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_differ() {
        for place in Place::ALL {
            let names: Vec<&str> = of(place).iter().map(|f| f.name).collect();
            if place != Place::Global {
                assert!(names.is_sorted_by(|a, b| a < b), "{place:?}: {names:?}");
            }
        }
    }

    #[test]
    fn stripes_are_of_four_mebibytes_at_least() {
        for (optimal, shown) in [(0, 1 << 31), (1024, 8192), (3000, 9000), (8192, 8192), (10000, 10000)] {
            assert_eq!(stripe(Sectors(optimal)), Sectors(shown));
        }
    }
}
