//! `ubcache make`: formats cache and backing devices (format section 13).
//!
//! Owns the order: the command claims and checks all devices and builds their superblocks before it writes the first byte.
//! `for_daemon` runs the command for a client of the daemon. `report` prints the result.

mod contents;
pub(super) mod for_daemon;
pub(super) mod for_group;
mod report;

use std::cell::RefCell;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use self::report::{Made, MakeReport, ToolsReport};
use crate::failure::Failure;
use crate::superblock::HEAD;
use crate::{out, size};
use blockio::{Backend, Driver, DriverOptions, FileDevice, OpenOptions, probe_signature};
use clap::{Args, ValueEnum};
use format::geometry::{MAX_BLOCK_SECTORS, MIN_BUCKET_SECTORS, MIN_BUCKETS};
use format::superblock::{BackingFormat, CacheFormat, LABEL_BYTES, SUPERBLOCK_BYTES, label_bytes};
use format::{BackingSuper, CacheMode, CacheSuper, RawSuperblock, Replacement, Sector, Sectors, Uuid};
use io::{DeviceInfo, Disk};

/// Replacement policy: which data is evicted for new data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Policy {
    /// Least recently used data first
    Lru,
    /// Oldest data first
    Fifo,
    /// Random data
    Random,
}

/// Whether a property is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Switch {
    /// The property is on
    On,
    /// The property is off
    Off,
}

/// Format cache and backing devices
///
/// Makes DEV the cache device (-C) of a new cache set, or backing devices (-B), or both: backing devices that are
/// formatted together with a cache device belong to its set from the first start on. The contents of a backing device
/// are lost. Several cache devices become a group: dirty data is on two of them, so any one may fail.
#[derive(Args, Debug)]
pub(crate) struct Make {
    /// Cache device: the fast one; several become a group, which has dirty data on two of them
    #[arg(short = 'C', long = "cache", value_name = "DEV")]
    cache: Vec<PathBuf>,
    /// Backing device: a slow one
    #[arg(short = 'B', long = "backing", value_name = "DEV")]
    backing: Vec<PathBuf>,
    /// Size of the buckets in which the cache is allocated: a power of two; the erase block of an SSD or a multiple
    #[arg(long, value_name = "SIZE", default_value = BUCKET, value_parser = size::parse_sectors)]
    bucket: Sectors,
    /// Smallest unit of data, a power of two up to 4k [default: the largest logical block size of the devices]
    #[arg(long, value_name = "SIZE", value_parser = size::parse_sectors)]
    block: Option<Sectors>,
    /// Where data begins on the backing devices, in sectors of 512 bytes [default: 16; where it begins now if the device is a
    /// backing device already]
    #[arg(long, value_name = "SECTORS", value_parser = parse_offset)]
    data_offset: Option<u64>,
    /// Write to the cache first and to the backing device later [default: to both at once]
    #[arg(long)]
    writeback: bool,
    /// Discard buckets before they are reused
    #[arg(long)]
    discard: bool,
    /// Store a checksum of each block of cached data, so that damage on the cache device is noticed [default: off]
    #[arg(long, value_name = "on|off", num_args = 0..=1, default_missing_value = "on")]
    checksums: Option<Switch>,
    /// Replacement policy: which data is evicted for new data
    #[arg(long, visible_alias = "cache_replacement_policy", value_name = "POLICY", default_value = "lru")]
    cache_replacement_policy: Policy,
    /// Label of the backing devices, at most 32 bytes
    #[arg(short = 'l', long, value_name = "L")]
    label: Option<String>,
    /// Label of the cache set, at most 32 bytes
    #[arg(long, value_name = "L")]
    set_label: Option<String>,
    /// UUID of the cache set [default: a random one; none for backing devices alone]
    #[arg(long, value_name = "UUID", value_parser = parse_uuid)]
    cset_uuid: Option<Uuid>,
    /// Overwrite superblocks of bcache, unless dirty data would be lost
    #[arg(long)]
    wipe: bool,
    /// Overwrite superblocks of bcache and lose their dirty data, which exists nowhere else
    #[arg(long)]
    wipe_dirty: bool,
    /// Overwrite whatever is on the devices, unless dirty data would be lost
    #[arg(long)]
    force: bool,
    /// Print what would be made and what would be lost, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print what make-bcache prints
    #[arg(long, hide = true, conflicts_with_all = ["json", "dry_run"])]
    as_bcache_tools: bool,
    /// The group that a new set joins.
    #[arg(skip)]
    join: Option<Uuid>,
    /// Devices whose dirty data a client of the daemon has agreed to lose.
    #[arg(skip)]
    wipe_dirty_of: Vec<PathBuf>,
}

/// Size of the buckets, unless another one is given.
const BUCKET: &str = "512k";
/// First sector of the data of a backing device, unless another one is given.
const DATA_OFFSET: u64 = 16;

/// Messages beside the report, each with its level.
type Notes = RefCell<Vec<(&'static str, String)>>;

/// The text is no data offset.
#[derive(Debug, thiserror::Error)]
enum OffsetError {
    #[error("expected sectors of 512 bytes, for example 2048")]
    NoNumber(#[source] std::num::ParseIntError),
    #[error("expected at least {DATA_OFFSET} sectors, which the superblock takes, found {0}")]
    TooSmall(u64),
}

fn parse_offset(text: &str) -> Result<u64, OffsetError> {
    match text.parse().map_err(OffsetError::NoNumber)? {
        offset if offset < DATA_OFFSET => Err(OffsetError::TooSmall(offset)),
        offset => Ok(offset),
    }
}

/// Refuses blocks that are smaller than the sectors of a device.
fn block_fits(block: Sectors, device: &DeviceInfo) -> Result<(), Failure> {
    let (wanted, sector) = (block.bytes(), device.logical_block_bytes);
    if wanted >= u64::from(sector) {
        return Ok(());
    }
    Err(Failure::Failed(format!(
        "--block {wanted} is smaller than the {sector}-byte sectors of {}: use --block {sector}, or leave it out",
        device.name
    )))
}

/// A label as the bytes of a superblock.
fn label_of(device: &DeviceInfo, label: Option<&str>) -> Result<[u8; LABEL_BYTES], Failure> {
    let label = label.unwrap_or("");
    label_bytes(label).ok_or_else(|| {
        Failure::Failed(format!(
            "{}: label: expected at most 32 bytes without NUL, found {}",
            device.name,
            label.len()
        ))
    })
}

/// The reason why a text is no UUID for a new set.
#[derive(Debug, thiserror::Error)]
enum UuidError {
    /// It has not the form of a UUID.
    #[error("expected a UUID")]
    NoUuid(#[source] format::ParseUuidError),
    /// It is the UUID that means "no set".
    #[error("expected a UUID other than zero")]
    Zero,
}

fn parse_uuid(text: &str) -> Result<Uuid, UuidError> {
    let uuid: Uuid = text.parse().map_err(UuidError::NoUuid)?;
    if uuid.is_nil() { Err(UuidError::Zero) } else { Ok(uuid) }
}

fn random_uuid() -> Uuid {
    Uuid(uuid::Uuid::new_v4().into_bytes())
}

/// A device that is claimed and will be formatted.
struct DeviceToFormat {
    path: PathBuf,
    disk: Disk,
    /// The new contents of the first sectors.
    head: [u8; SUPERBLOCK_BYTES],
    made: Made,
}

impl Make {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let notes = Notes::default();
        let made = self.carry_out(&notes);
        notes.take().iter().for_each(|(level, text)| out::message(level, text));
        match (made?, self.as_bcache_tools) {
            (report, true) => out::print(&ToolsReport(&report).to_string()),
            (report, false) => out::document(self.json, &report),
        }
    }

    /// Checks and formats the devices, or only checks them.
    fn carry_out(&self, notes: &Notes) -> Result<MakeReport, Failure> {
        self.check_usage()?;
        self.refuse_repeats()?;
        let options = DriverOptions { backend: Backend::Pool, ..DriverOptions::default() };
        let driver = Driver::new(options).map_err(Failure::of)?;
        driver.block_on(self.make(&driver, notes))
    }

    fn check_usage(&self) -> Result<(), Failure> {
        let usage = |text: &str| Err(Failure::Usage(text.into()));
        if self.cache.is_empty() && self.backing.is_empty() {
            return usage("nothing to make: give a cache device with -C, backing devices with -B, or both");
        }
        if self.cache.len() > 1 && self.cset_uuid.is_some() {
            return usage("--cset-uuid: each cache device of a group has a set of its own: expected one -C");
        }
        if let Some(label) = self.label.as_ref().filter(|l| !l.is_empty()) {
            serve::label_is_fit(label)?;
            if self.backing.len() > 1 {
                return usage(
                    "--label: labels are unique: expected one -B; make the others in runs of their own",
                );
            }
        }
        if self.backing.is_empty() && (self.label.is_some() || self.writeback) {
            return usage(
                "--label and --writeback are properties of backing devices: expected a -B with them",
            );
        }
        if let Some(label) = self.set_label.as_ref().filter(|l| !l.is_empty()) {
            serve::label_is_fit(label)?;
            if self.cache.is_empty() {
                return usage("--set-label is a property of the cache device: expected a -C with it");
            }
            if self.cache.len() > 1 {
                return usage(
                    "--set-label: labels are unique, and each cache device of a group has a set of its own: expected one -C; label \
                     the sets afterwards with `ubcache set-label`",
                );
            }
            if self.label.as_ref() == Some(label) {
                return usage("--set-label: labels are unique: expected another label than that of --label");
            }
        }
        if self.cache.is_empty() && self.discard {
            return usage("--discard is a property of the cache device: expected a -C with it");
        }
        if self.cache.is_empty() && self.checksums.is_some() {
            return usage("--checksums is a property of the cache device: expected a -C with it");
        }
        self.check_sizes()
    }

    /// Refuses sizes that no device can have.
    fn check_sizes(&self) -> Result<(), Failure> {
        let refused = |option: &str, expected: String, found: Sectors| {
            let found = size::human(found.bytes());
            Err(Failure::Usage(format!("{option}: expected a power of two {expected}, found {found}")))
        };
        if !self.bucket.0.is_power_of_two() || self.bucket < MIN_BUCKET_SECTORS {
            let least = size::human(MIN_BUCKET_SECTORS.bytes());
            return refused("--bucket", format!("of at least {least}, such as 512k"), self.bucket);
        }
        match self.block {
            Some(block) if !block.0.is_power_of_two() || block > MAX_BLOCK_SECTORS => {
                let most = size::human(MAX_BLOCK_SECTORS.bytes());
                refused("--block", format!("up to {most}, such as 4k"), block)
            }
            _ => Ok(()),
        }
    }

    fn devices(&self) -> impl Iterator<Item = &Path> {
        self.backing.iter().chain(&self.cache).map(PathBuf::as_path)
    }

    /// Refuses a device that is given twice, because it would be formatted twice.
    fn refuse_repeats(&self) -> Result<(), Failure> {
        let mut seen: Vec<((u64, u64, u64), &Path)> = Vec::new();
        for path in self.devices() {
            let meta = std::fs::metadata(path).map_err(|e| Failure::at(path, "cannot be opened", e))?;
            let id = if meta.file_type().is_block_device() {
                (0, 0, meta.rdev())
            } else {
                (meta.dev(), meta.ino(), 0)
            };
            if let Some((_, first)) = seen.iter().find(|(other, _)| *other == id) {
                let (first, second) = (first.display(), path.display());
                return Err(Failure::Usage(format!("{first} and {second} are the same device")));
            }
            seen.push((id, path));
        }
        Ok(())
    }

    async fn make(&self, driver: &Driver, notes: &Notes) -> Result<MakeReport, Failure> {
        let mut disks = Vec::new();
        for path in self.devices() {
            let device = FileDevice::open(driver.reactor(), path, &OpenOptions::default())?;
            disks.push((path, Disk::new(Rc::new(device), driver.handle())));
        }
        let lost = self.refuse_contents(&disks, notes).await?;
        let logical = disks.iter().map(|(_, d)| d.info().logical_block_bytes).max().unwrap_or(512);
        let block = self.block.unwrap_or(Sectors::from_bytes_ceil(u64::from(logical)));
        disks.iter().try_for_each(|(_, disk)| block_fits(block, disk.info()))?;
        let sets: Vec<Uuid> = match self.cset_uuid {
            Some(uuid) => vec![uuid],
            None => self.cache.iter().map(|_| random_uuid()).collect(),
        };
        let group = self.join.or_else(|| (self.cache.len() > 1).then(random_uuid));
        let cache_at = self.backing.len();
        let mut targets = Vec::new();
        for (i, ((path, disk), overwrites)) in disks.into_iter().zip(lost).enumerate() {
            let mut target = match i.checked_sub(cache_at) {
                // The sets of a group get the backing devices in turn, so each is the second one of others.
                None => {
                    let set = sets.iter().cycle().nth(i).copied();
                    self.backing_target(path, disk, block, set.unwrap_or(Uuid::NIL)).await?
                }
                Some(n) => {
                    let set = sets.get(n).copied().unwrap_or_else(random_uuid);
                    self.cache_target((path, disk), block, (set, group))?
                }
            };
            target.made.overwrites = overwrites;
            targets.push(target);
        }
        for target in targets.iter().filter(|_| !self.dry_run) {
            if self.force {
                erase_signatures(target).await?;
            }
            write_head(target).await?;
        }
        // The cache device is listed first.
        let mut devices: Vec<Made> = targets.into_iter().map(|t| t.made).collect();
        devices.rotate_right(self.cache.len());
        devices.iter().filter_map(Made::warning).for_each(|text| notes.borrow_mut().push(("warning", text)));
        let set_uuid = sets.first().filter(|_| group.is_none()).map(Uuid::to_string);
        let group_uuid = group.map(|u| u.to_string());
        Ok(MakeReport { schema_version: 1, dry_run: self.dry_run, set_uuid, group_uuid, devices })
    }

    /// The properties of the new cache device.
    fn cache_format(&self, info: &DeviceInfo, block_sectors: Sectors, set_uuid: Uuid) -> CacheFormat {
        CacheFormat {
            uuid: random_uuid(),
            set_uuid,
            device_sectors: info.sectors,
            block_sectors,
            bucket_sectors: self.bucket,
            replacement: match self.cache_replacement_policy {
                Policy::Lru => Replacement::Lru,
                Policy::Fifo => Replacement::Fifo,
                Policy::Random => Replacement::Random,
            },
            discard: self.discard,
        }
    }

    fn cache_target(
        &self,
        (path, disk): (&Path, Disk),
        block: Sectors,
        (set, group): (Uuid, Option<Uuid>),
    ) -> Result<DeviceToFormat, Failure> {
        let info = disk.info().clone();
        let nbuckets = info.sectors.0 / self.bucket.0;
        if self.bucket.0.is_power_of_two() && nbuckets < u64::from(MIN_BUCKETS) {
            return Err(Failure::Failed(format!(
                "{}: too small: expected at least {MIN_BUCKETS} buckets of {} ({} sectors), found {} sectors, which \
                 give {nbuckets}: use a larger device or a smaller --bucket",
                info.name,
                size::human(self.bucket.bytes()),
                u64::from(MIN_BUCKETS) * self.bucket.0,
                info.sectors,
            )));
        }
        let want = self.cache_format(&info, block, set);
        let mut sb = CacheSuper::format(&want).map_err(|e| Failure::because(&info.name, e))?;
        sb.set_label(label_of(&info, self.set_label.as_deref())?);
        sb.set_group(group);
        let has_checksums = self.checksums == Some(Switch::On);
        if has_checksums {
            serve::checksums_fit(&info.name, sb.geometry())?;
            sb.set_checksum_key(Some(serve::new_checksum_key()));
        }
        let head = sb.encode();
        recheck(&info, &head, |raw| raw.check_cache(info.sectors, info.logical_block_bytes).map(drop))?;
        let g = sb.geometry();
        let made = Made {
            device: info.name.to_string(),
            kind: "cache",
            uuid: sb.uuid().to_string(),
            set_uuid: Some(sb.set_uuid()).filter(|set| !set.is_nil()).map(|set| set.to_string()),
            version: sb.version(),
            device_sectors: info.sectors.0,
            block_sectors: g.block_sectors.0,
            bucket_sectors: Some(g.bucket_sectors.0),
            nbuckets: Some(g.nbuckets),
            first_bucket: Some(g.first_bucket.0),
            data_offset: None,
            data_sectors: None,
            cache_mode: None,
            overwrites: None,
            checksums: Some(has_checksums),
        };
        Ok(DeviceToFormat { path: path.to_path_buf(), disk, head, made })
    }

    async fn backing_target(
        &self,
        path: &Path,
        disk: Disk,
        block: Sectors,
        set: Uuid,
    ) -> Result<DeviceToFormat, Failure> {
        let info = disk.info().clone();
        let fail = |text: String| Failure::Failed(format!("{}: {text}", info.name));
        let label = label_of(&info, self.label.as_deref())?;
        let offset = match self.data_offset {
            Some(offset) => offset,
            // The data of a device that gets a new superblock stays where it is.
            None => contents::data_offset(&disk).await?.map_or(DATA_OFFSET, |offset| offset.0),
        };
        if info.sectors.0 <= offset {
            let found = info.sectors;
            return Err(fail(format!("too small: expected more than {offset} sectors, found {found}")));
        }
        let cache_mode = if self.writeback { CacheMode::Writeback } else { CacheMode::Writethrough };
        let want = BackingFormat {
            uuid: random_uuid(),
            set_uuid: set,
            device_sectors: info.sectors,
            block_sectors: block,
            bucket_sectors: self.bucket,
            data_offset: Sector(offset),
            cache_mode,
            label,
        };
        let sb = BackingSuper::format(&want).map_err(|e| Failure::because(&info.name, e))?;
        if !offset.is_multiple_of(block.0) {
            // The kernel would serve such a device without caching its data.
            return Err(fail(format!(
                "data offset: expected a multiple of the block size of {block} sectors, found {offset}"
            )));
        }
        let head = sb.encode();
        recheck(&info, &head, |raw| raw.check_backing(info.sectors, info.logical_block_bytes).map(drop))?;
        let made = Made {
            device: info.name.to_string(),
            kind: "backing",
            uuid: sb.uuid().to_string(),
            set_uuid: Some(sb.set_uuid()).filter(|set| !set.is_nil()).map(|set| set.to_string()),
            version: sb.version(),
            device_sectors: info.sectors.0,
            block_sectors: sb.block_sectors().0,
            bucket_sectors: None,
            nbuckets: None,
            first_bucket: None,
            data_offset: Some(sb.data_offset().0),
            data_sectors: Some(sb.data_sectors().0),
            cache_mode: Some(cache_mode.name()),
            overwrites: None,
            checksums: None,
        };
        Ok(DeviceToFormat { path: path.to_path_buf(), disk, head, made })
    }
}

/// Checks a new superblock as a later start does. The function that builds it does not know the logical block size.
fn recheck(
    info: &io::DeviceInfo,
    head: &[u8],
    check: impl FnOnce(&RawSuperblock) -> Result<(), format::Corrupt>,
) -> Result<(), Failure> {
    let checked = RawSuperblock::from_prefix(head).and_then(check);
    checked.map_err(|e| Failure::because(&info.name, e))
}

/// Signatures that are erased at most: ZFS alone has 128 of them.
const MAX_SIGNATURES: usize = 1000;

/// Erases old signatures on the device.
async fn erase_signatures(target: &DeviceToFormat) -> Result<(), Failure> {
    let disk = &target.disk;
    let block = u64::from(disk.info().logical_block_bytes);
    for _ in 0..MAX_SIGNATURES {
        let found =
            probe_signature(&target.path).map_err(|e| Failure::at(&target.path, "cannot be read", e))?;
        let Some(found) = found else { return Ok(()) };
        let start = found.offset_bytes / block * block;
        let zeros = disk.runtime().pool().zeroed(block as usize);
        disk.write(Sector(start / 512), zeros, true).await?;
    }
    let path = target.path.display();
    Err(Failure::Failed(format!(
        "{path}: still has a signature after {MAX_SIGNATURES} were erased; run `wipefs --all {path}`"
    )))
}

/// Writes the superblock, and zeros to the sectors before it, as other tools do.
async fn write_head(target: &DeviceToFormat) -> Result<(), Failure> {
    let disk = &target.disk;
    let mut buffer = disk.runtime().pool().zeroed(HEAD.bytes() as usize);
    let at = HEAD.bytes() as usize - SUPERBLOCK_BYTES;
    buffer.as_mut()[at..].copy_from_slice(&target.head);
    disk.write(Sector(0), buffer, true).await?;
    Ok(disk.flush().await?)
}
