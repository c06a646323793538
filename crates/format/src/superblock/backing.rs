//! Checked superblock of a backing device.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{
    DEFAULT_DATA_OFFSET, LABEL_BYTES, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_PADDING_BYTES,
    VERSION_BACKING, VERSION_BACKING_FEATURES, VERSION_BACKING_OFFSET, label_text,
};
use crate::bytes::{as_u64, u64_at};
use crate::error::{Corrupt, Structure, Value};
use crate::units::{CopyNr, RegistrationNr, Sector, Sectors, Uuid};

/// Bytes of a backing superblock's padding for [`BackingSuper::copy`]: bytes 160 to 175.
pub const BACKING_PADDING_BYTES: usize = 16;

/// The use of a backing superblock's padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPadding {
    /// See [`BackingSuper::registration`].
    registration: U64,
    /// Every bit of `registration` inverted, if a registration was recorded.
    registration_inverted: U64,
    /// See [`BackingSuper::copy`].
    rest: [u8; BACKING_PADDING_BYTES],
    /// See [`BackingSuper::registered_sectors`].
    registered_sectors: U64,
}

const _: () = assert!(size_of::<RawPadding>() == SUPERBLOCK_PADDING_BYTES);

const CACHE_MODE_MASK: u64 = 15;
const STATE_SHIFT: u32 = 61;
const STATE_MASK: u64 = 3 << STATE_SHIFT;

/// The cache mode: where a write goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheMode {
    /// A write goes to both devices.
    #[default]
    Writethrough,
    /// A write goes to the cache first, and to the backing device later.
    Writeback,
    /// A write goes to the backing device only; the range is invalidated in the cache.
    Writearound,
    /// Nothing is cached.
    None,
}

impl CacheMode {
    const fn bits(self) -> u64 {
        match self {
            CacheMode::Writethrough => 0,
            CacheMode::Writeback => 1,
            CacheMode::Writearound => 2,
            CacheMode::None => 3,
        }
    }

    /// bcache's name of the mode.
    pub const fn name(self) -> &'static str {
        match self {
            CacheMode::Writethrough => "writethrough",
            CacheMode::Writeback => "writeback",
            CacheMode::Writearound => "writearound",
            CacheMode::None => "none",
        }
    }
}

/// Whether the backing device alone holds all the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackingState {
    /// Not attached to a cache set.
    #[default]
    None,
    /// Attached; the backing device has all data.
    Clean,
    /// Attached; the cache has data that the backing device lacks.
    Dirty,
    /// The device ran without its cache while attached, so the cached data is out of date.
    Stale,
}

impl BackingState {
    const fn bits(self) -> u64 {
        match self {
            BackingState::None => 0,
            BackingState::Clean => 1,
            BackingState::Dirty => 2,
            BackingState::Stale => 3,
        }
    }

    /// bcache's name of the state.
    pub const fn name(self) -> &'static str {
        match self {
            BackingState::None => "no cache",
            BackingState::Clean => "clean",
            BackingState::Dirty => "dirty",
            BackingState::Stale => "inconsistent",
        }
    }
}

/// A backing superblock that keeps every rule of the format.
///
/// Setters change the copy in memory only; [`BackingSuper::encode`] gives the bytes to write.
#[derive(Clone, PartialEq, Eq)]
pub struct BackingSuper {
    raw: Box<RawSuperblock>,
    data_offset: Sector,
    data_sectors: Sectors,
}

impl std::fmt::Debug for BackingSuper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackingSuper")
            .field("version", &self.version())
            .field("uuid", &self.uuid())
            .field("set_uuid", &self.set_uuid())
            .field("label", &self.label())
            .field("cache_mode", &self.cache_mode())
            .field("state", &self.state())
            .field("data_offset", &self.data_offset)
            .field("data_sectors", &self.data_sectors)
            .finish_non_exhaustive()
    }
}

/// The properties of a new backing device.
#[derive(Clone, Debug)]
pub struct BackingFormat {
    /// UUID of the device; not zero.
    pub uuid: Uuid,
    /// The set to attach to when both are registered, or zero for none.
    pub set_uuid: Uuid,
    /// Size of the device.
    pub device_sectors: Sectors,
    /// Logical block size of the cached device; a power of two.
    pub block_sectors: Sectors,
    /// Bucket size of the set. Formatters record it; it has no effect. Stored only if it fits 16 bits.
    pub bucket_sectors: Sectors,
    /// First data sector; at least 16.
    pub data_offset: Sector,
    /// Write policy.
    pub cache_mode: CacheMode,
    /// Label, NUL padded.
    pub label: [u8; LABEL_BYTES],
}

/// Checks a backing superblock; see [`RawSuperblock::check_backing`].
pub(super) fn check(
    raw: &RawSuperblock,
    device_sectors: Sectors,
    logical_block_bytes: u32,
) -> Result<BackingSuper, Corrupt> {
    let what = Structure::BackingSuperblock;
    raw.check_magic(what)?;
    let explicit_offset = match raw.version.get() {
        VERSION_BACKING => false,
        VERSION_BACKING_OFFSET | VERSION_BACKING_FEATURES => true,
        _ => return Err(raw.wrong_version(what, "1, 4 or 6")),
    };
    raw.check_common(what, logical_block_bytes)?;
    if !raw.block_size.get().is_power_of_two() {
        return Err(Corrupt::new(
            what,
            "block_size",
            as_u64(offset_of!(RawSuperblock, block_size)),
            Value::Text("a power of two"),
            Value::Num(u64::from(raw.block_size.get())),
        ));
    }
    let at = as_u64(offset_of!(RawSuperblock, nbuckets));
    let data_offset = if explicit_offset { Sector(raw.nbuckets.get()) } else { DEFAULT_DATA_OFFSET };
    if data_offset < DEFAULT_DATA_OFFSET {
        return Err(Corrupt::new(
            what,
            "data_offset",
            at,
            Value::AtLeast(DEFAULT_DATA_OFFSET.0),
            Value::Num(data_offset.0),
        ));
    }
    // The kernel does not check this rule. This code refuses a device that has no data area.
    let data_sectors = match Sector(device_sectors.0).checked_since(data_offset) {
        Some(n) if n > Sectors::ZERO => n,
        _ => {
            return Err(Corrupt::new(
                what,
                "data_offset",
                at,
                Value::AtMost(device_sectors.0.saturating_sub(1)),
                Value::Num(data_offset.0),
            ));
        }
    };
    Ok(BackingSuper { raw: Box::new(raw.clone()), data_offset, data_sectors })
}

impl BackingSuper {
    /// Makes the superblock of a new backing device. Formatters usually zero sectors 0–7 too.
    ///
    /// # Errors
    /// If the wanted sizes break a rule of the format; the error names the field.
    pub fn format(want: &BackingFormat) -> Result<BackingSuper, Corrupt> {
        let default = want.data_offset == DEFAULT_DATA_OFFSET;
        let version = if default { VERSION_BACKING } else { VERSION_BACKING_OFFSET };
        let mut raw = RawSuperblock::blank(version);
        raw.uuid = want.uuid.0;
        raw.set_uuid = want.set_uuid.0;
        raw.label = want.label;
        raw.flags = want.cache_mode.bits().into();
        raw.block_size = u16::try_from(want.block_sectors.0).unwrap_or(u16::MAX).into();
        raw.bucket_size = u16::try_from(want.bucket_sectors.0).unwrap_or(0).into();
        if !default {
            raw.nbuckets = want.data_offset.0.into();
        }
        raw.csum = raw.computed_csum().unwrap_or(0).into();
        raw.check_backing(want.device_sectors, 0)
    }

    /// The 4096 bytes to write, with a newly computed checksum.
    ///
    /// Fields that this code does not know have the bytes that were read.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        self.raw.sealed()
    }

    /// Version: 1, 4 (explicit data offset) or 6.
    pub fn version(&self) -> u64 {
        self.raw.version.get()
    }

    /// UUID of the device; identifies it in the set's UUID table.
    pub fn uuid(&self) -> Uuid {
        Uuid(self.raw.uuid)
    }

    /// UUID of the set that the device belongs to.
    ///
    /// In state [`BackingState::None`] it is the set that the device should attach to, or zero.
    pub fn set_uuid(&self) -> Uuid {
        Uuid(self.raw.set_uuid)
    }

    /// Sets [`BackingSuper::set_uuid`].
    pub fn set_set_uuid(&mut self, to: Uuid) {
        self.raw.set_uuid = to.0;
    }

    /// First data sector. Positions in keys are sectors of the backing device, so they start here.
    pub fn data_offset(&self) -> Sector {
        self.data_offset
    }

    /// Size of the cached device: everything behind the data offset.
    pub fn data_sectors(&self) -> Sectors {
        self.data_sectors
    }

    /// Logical block size of the cached device.
    pub fn block_sectors(&self) -> Sectors {
        Sectors(u64::from(self.raw.block_size.get()))
    }

    /// The label's bytes.
    pub fn label_bytes(&self) -> &[u8; LABEL_BYTES] {
        &self.raw.label
    }

    /// The label as text, up to the first NUL.
    pub fn label(&self) -> String {
        label_text(&self.raw.label)
    }

    /// Sets the label; [`super::label_bytes`] makes one from text.
    pub fn set_label(&mut self, label: [u8; LABEL_BYTES]) {
        self.raw.label = label;
    }

    /// Unix seconds of the last write, low 32 bits.
    pub fn last_mount(&self) -> u32 {
        self.raw.last_mount.get()
    }

    /// Sets [`BackingSuper::last_mount`].
    pub fn set_last_mount(&mut self, unix_seconds: u32) {
        let copy = self.copy();
        self.raw.last_mount = unix_seconds.into();
        if copy.is_some() {
            self.set_copy(copy);
        }
    }

    /// Write counter; kernels leave it as formatted.
    pub fn seq(&self) -> u64 {
        self.raw.seq.get()
    }

    /// Number of the last registration with the set; `None` if none was recorded.
    ///
    /// It is stored in padding, which kernels preserve. The cache device has it too
    /// ([`crate::UuidEntry::registrations`]), unless the cache device is an older copy. If the second word is not the
    /// inverted number, the padding has no number.
    pub fn registration(&self) -> Option<RegistrationNr> {
        let padding = self.raw_padding();
        let word = padding.registration.get();
        RegistrationNr::from_word(word).filter(|_| padding.registration_inverted.get() == !word)
    }

    /// Sets [`BackingSuper::registration`].
    pub fn set_registration(&mut self, to: Option<RegistrationNr>) {
        let word = RegistrationNr::to_word(to);
        let (registration, registration_inverted) = (word.into(), (!word).into());
        let padding = RawPadding { registration, registration_inverted, ..self.raw_padding() };
        self.raw.padding = zerocopy::transmute!(padding);
    }

    /// Size of the data area at the last registration; `None` if none was recorded.
    ///
    /// If the data area has another size now, the cache can have clean copies of sectors that the device has lost.
    pub fn registered_sectors(&self) -> Option<Sectors> {
        self.registration()?;
        Some(Sectors(self.raw_padding().registered_sectors.get())).filter(|sectors| *sectors > Sectors::ZERO)
    }

    /// Sets [`BackingSuper::registered_sectors`]. It counts only together with a number of a registration.
    pub fn set_registered_sectors(&mut self, to: Sectors) {
        let padding = RawPadding { registered_sectors: to.0.into(), ..self.raw_padding() };
        self.raw.padding = zerocopy::transmute!(padding);
    }

    /// The number of the copy that a second set has of the dirty data; `None` if no set has a copy ([`crate::mirror`]).
    ///
    /// It is stored in padding, which kernels preserve, with a check that contains the time of the last write of the superblock, which
    /// they change. So there is no copy any more when a kernel has changed the state of the device.
    pub fn copy(&self) -> Option<CopyNr> {
        let padding = self.padding();
        let (number, check) = (u64_at(&padding, 0)?, u64_at(&padding, 8)?);
        (check == self.check_of_copy(number)).then_some(CopyNr::from_word(number))
    }

    fn check_of_copy(&self, number: u64) -> u64 {
        !(number ^ u64::from(self.last_mount()))
    }

    /// Sets [`BackingSuper::copy`]. Bytes that are no number stay as they are if there is to be none.
    pub fn set_copy(&mut self, to: Option<CopyNr>) {
        if to.is_none() && self.copy().is_none() {
            return;
        }
        let number = to.map(CopyNr::to_word);
        let words: [U64; 2] =
            [number.unwrap_or(0).into(), number.map_or(0, |n| self.check_of_copy(n)).into()];
        self.set_padding(zerocopy::transmute!(words));
    }

    /// The bytes of [`BackingSuper::copy`], 160 to 175 of the superblock. The kernel preserves them and does not read them
    /// (format section 15).
    ///
    /// They are zero on a device that never had a copy. The superblock's checksum covers them.
    pub fn padding(&self) -> [u8; BACKING_PADDING_BYTES] {
        self.raw_padding().rest
    }

    /// Sets [`BackingSuper::padding`].
    pub fn set_padding(&mut self, rest: [u8; BACKING_PADDING_BYTES]) {
        self.raw.padding = zerocopy::transmute!(RawPadding { rest, ..self.raw_padding() });
    }

    fn raw_padding(&self) -> RawPadding {
        zerocopy::transmute!(self.raw.padding)
    }

    /// The checksum as read, or as computed by formatting. Setters do not change it.
    pub fn stored_csum(&self) -> u64 {
        self.raw.csum.get()
    }

    /// The raw flag word.
    pub fn flags(&self) -> u64 {
        self.raw.flags.get()
    }

    /// Write policy; `None` for a value that is not defined.
    pub fn cache_mode(&self) -> Option<CacheMode> {
        match self.flags() & CACHE_MODE_MASK {
            0 => Some(CacheMode::Writethrough),
            1 => Some(CacheMode::Writeback),
            2 => Some(CacheMode::Writearound),
            3 => Some(CacheMode::None),
            _ => None,
        }
    }

    /// Sets [`BackingSuper::cache_mode`].
    pub fn set_cache_mode(&mut self, to: CacheMode) {
        self.raw.flags = ((self.flags() & !CACHE_MODE_MASK) | to.bits()).into();
    }

    /// Whether the backing device alone holds all the data.
    pub fn state(&self) -> BackingState {
        match (self.flags() & STATE_MASK) >> STATE_SHIFT {
            0 => BackingState::None,
            1 => BackingState::Clean,
            2 => BackingState::Dirty,
            _ => BackingState::Stale,
        }
    }

    /// Sets [`BackingSuper::state`].
    pub fn set_state(&mut self, to: BackingState) {
        self.raw.flags = ((self.flags() & !STATE_MASK) | (to.bits() << STATE_SHIFT)).into();
    }
}
