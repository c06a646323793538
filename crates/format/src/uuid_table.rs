//! The UUID table: which backing devices and volumes a set knows.
//!
//! Owns the slots and their bytes. The index of a slot is the inode of all keys of that device, so a
//! slot is never given to another device while keys may remain. The slot of a detached device gets
//! [`INVALID_UUID`] instead. The table has neither magic nor checksum; only the journal entry that points
//! to it identifies it.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::bytes::as_u64;
use crate::error::{Corrupt, Structure, Value};
use crate::mirror::{ROLE_BYTES, SlotRole};
use crate::superblock::{LABEL_BYTES, label_text};
use crate::units::{Inode, RegistrationNr, Sectors, Uuid};

/// Bytes of a slot.
pub const UUID_ENTRY_BYTES: usize = 128;
/// Bytes of a slot in tables of journal version 0.
pub const UUID_ENTRY_V0_BYTES: usize = 64;
/// Bytes of a slot behind its fields, from byte 72 on, which the kernel preserves and does not read.
pub const SLOT_RESERVED_BYTES: usize = 56;
/// Bytes of a slot behind the numbers of its registrations: bytes 96 to 127.
pub const SLOT_PADDING_BYTES: usize = ROLE_BYTES;
/// UUID of the slots of devices that were detached and volumes that were deleted.
pub const INVALID_UUID: Uuid =
    Uuid([0xa0, 0x3e, 0xf8, 0xed, 0x3e, 0xe1, 0xb8, 0x78, 0xc8, 0x50, 0xfc, 0x5e, 0xcb, 0x16, 0xcd, 0x99]);
/// Bit of `flags`: the slot is of a volume whose data is only in the cache.
pub const FLAG_FLASH_ONLY: u32 = 1 << 0;

/// A slot as it lies on the device.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawUuidEntry {
    uuid: [u8; 16],
    label: [u8; LABEL_BYTES],
    first_reg: U32,
    last_reg: U32,
    invalidated: U32,
    flags: U32,
    sectors: U64,
    reserved: [u8; SLOT_RESERVED_BYTES],
}

/// The use of the bytes of a slot behind its fields.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawReserved {
    /// See [`UuidEntry::registrations`].
    newest: U64,
    before: U64,
    /// The exclusive or of both with every bit inverted, if there are numbers.
    check: U64,
    /// See [`UuidEntry::role`].
    padding: [u8; SLOT_PADDING_BYTES],
}

/// A slot of a table of journal version 0.
#[derive(Clone, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEntryV0 {
    uuid: [u8; 16],
    label: [u8; LABEL_BYTES],
    first_reg: U32,
    last_reg: U32,
    invalidated: U32,
    pad: U32,
}

const _: () = {
    assert!(size_of::<RawUuidEntry>() == UUID_ENTRY_BYTES);
    assert!(align_of::<RawUuidEntry>() == 1);
    assert!(size_of::<RawReserved>() == SLOT_RESERVED_BYTES);
    assert!(size_of::<RawEntryV0>() == UUID_ENTRY_V0_BYTES);
    assert!(offset_of!(RawUuidEntry, label) == 16);
    assert!(offset_of!(RawUuidEntry, first_reg) == 48);
    assert!(offset_of!(RawUuidEntry, last_reg) == 52);
    assert!(offset_of!(RawUuidEntry, invalidated) == 56);
    assert!(offset_of!(RawUuidEntry, flags) == 60);
    assert!(offset_of!(RawUuidEntry, sectors) == 64);
    assert!(offset_of!(RawUuidEntry, reserved) == 72);
    assert!(offset_of!(RawEntryV0, invalidated) == 56);
};

/// A slot of the UUID table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UuidEntry {
    /// UUID of the backing device or volume; zero if the slot is free.
    pub uuid: Uuid,
    /// Label. Its text ends at the first NUL; the bytes behind it mean nothing.
    pub label: [u8; LABEL_BYTES],
    /// Time of the first registration in Unix seconds.
    pub first_reg: u32,
    /// Time of the last registration in Unix seconds.
    pub last_reg: u32,
    /// Time of the invalidation in Unix seconds; 0 if the slot was never invalidated.
    pub invalidated: u32,
    /// Flag bits; see [`FLAG_FLASH_ONLY`].
    pub flags: u32,
    /// Size of a volume; zero for backing devices.
    pub sectors: Sectors,
    /// Bytes that the kernel preserves and does not read; see [`UuidEntry::registrations`] and [`UuidEntry::padding`].
    pub reserved: [u8; SLOT_RESERVED_BYTES],
}

impl UuidEntry {
    /// A free slot.
    pub const FREE: UuidEntry = UuidEntry {
        uuid: Uuid::NIL,
        label: [0; LABEL_BYTES],
        first_reg: 0,
        last_reg: 0,
        invalidated: 0,
        flags: 0,
        sectors: Sectors::ZERO,
        reserved: [0; SLOT_RESERVED_BYTES],
    };

    /// Slot of a backing device that registers for the first time at `now` (Unix seconds).
    pub fn backing(uuid: Uuid, label: [u8; LABEL_BYTES], now: u32) -> UuidEntry {
        UuidEntry { uuid, label, first_reg: now, last_reg: now, ..UuidEntry::FREE }
    }

    /// Slot of a volume that is created at `now` (Unix seconds).
    pub fn volume(uuid: Uuid, label: [u8; LABEL_BYTES], sectors: Sectors, now: u32) -> UuidEntry {
        let flags = FLAG_FLASH_ONLY;
        UuidEntry { flags, sectors, ..UuidEntry::backing(uuid, label, now) }
    }

    /// True if the slot may be given to a new device. Invalidated slots are not free: keys with their
    /// inode may still exist.
    pub fn is_free(&self) -> bool {
        self.uuid.is_nil()
    }

    /// True for the slot of a detached device or deleted volume, whose keys are unreachable.
    pub fn is_invalidated(&self) -> bool {
        self.uuid == INVALID_UUID
    }

    /// True for the slot of an existing device or volume.
    pub fn is_live(&self) -> bool {
        !self.is_free() && !self.is_invalidated()
    }

    /// True for a volume whose data is only in the cache.
    pub fn is_flash_only(&self) -> bool {
        self.flags & FLAG_FLASH_ONLY != 0
    }

    /// The label as text, up to the first NUL.
    pub fn label(&self) -> String {
        label_text(&self.label)
    }

    /// Marks the slot as that of a device detached or a volume deleted at `now` (Unix seconds).
    pub fn invalidate(&mut self, now: u32) {
        self.uuid = INVALID_UUID;
        self.invalidated = now;
        self.flags &= !FLAG_FLASH_ONLY;
    }

    /// Numbers of the device's last two registrations, newest first.
    ///
    /// The backing superblock has one of the two, unless the cache device is a copy from before the last registration.
    /// The padding has three words: both numbers, and their exclusive or with every bit inverted. If the third word
    /// does not match, there are no numbers.
    pub fn registrations(&self) -> [Option<RegistrationNr>; 2] {
        let numbers = self.raw_reserved();
        let words = [numbers.newest.get(), numbers.before.get()];
        match numbers.check.get() == !(words[0] ^ words[1]) {
            true => words.map(RegistrationNr::from_word),
            false => [None; 2],
        }
    }

    /// Records the registration `newest` of a device whose superblock has the number `before`.
    pub fn register(&mut self, newest: RegistrationNr, before: Option<RegistrationNr>) {
        let words = [Some(newest), before].map(RegistrationNr::to_word);
        self.reserved = zerocopy::transmute!(RawReserved {
            newest: words[0].into(),
            before: words[1].into(),
            check: (!(words[0] ^ words[1])).into(),
            ..self.raw_reserved()
        });
    }

    /// The role of the set for the dirty data of the device in the slot; `None` if it has no other set.
    pub fn role(&self) -> Option<SlotRole> {
        SlotRole::parse(&self.padding(), self.uuid)
    }

    /// Sets [`UuidEntry::role`].
    pub fn set_role(&mut self, role: Option<SlotRole>) {
        self.set_padding(role.map_or([0; SLOT_PADDING_BYTES], |role| role.encode(self.uuid)));
    }

    /// The bytes of [`UuidEntry::role`]: bytes 96 to 127 of the slot. The kernel preserves them and does not read them (format
    /// section 15).
    ///
    /// The UUID table has no checksum: what is put here has its own. The padding stays behind in the old slot when a device
    /// is detached and attached again, which gives it another slot.
    pub fn padding(&self) -> [u8; SLOT_PADDING_BYTES] {
        self.raw_reserved().padding
    }

    /// Sets [`UuidEntry::padding`].
    pub fn set_padding(&mut self, padding: [u8; SLOT_PADDING_BYTES]) {
        self.reserved = zerocopy::transmute!(RawReserved { padding, ..self.raw_reserved() });
    }

    fn raw_reserved(&self) -> RawReserved {
        zerocopy::transmute!(self.reserved)
    }

    /// Reads a slot.
    pub fn from_bytes(bytes: &[u8; UUID_ENTRY_BYTES]) -> UuidEntry {
        let raw: RawUuidEntry = zerocopy::transmute!(*bytes);
        raw.checked()
    }

    /// The slot's bytes.
    pub fn to_bytes(&self) -> [u8; UUID_ENTRY_BYTES] {
        zerocopy::transmute!(RawUuidEntry {
            uuid: self.uuid.0,
            label: self.label,
            first_reg: self.first_reg.into(),
            last_reg: self.last_reg.into(),
            invalidated: self.invalidated.into(),
            flags: self.flags.into(),
            sectors: self.sectors.0.into(),
            reserved: self.reserved,
        })
    }
}

impl RawUuidEntry {
    fn checked(&self) -> UuidEntry {
        UuidEntry {
            uuid: Uuid(self.uuid),
            label: self.label,
            first_reg: self.first_reg.get(),
            last_reg: self.last_reg.get(),
            invalidated: self.invalidated.get(),
            flags: self.flags.get(),
            sectors: Sectors(self.sectors.get()),
            reserved: self.reserved,
        }
    }
}

impl RawEntryV0 {
    fn checked(&self) -> UuidEntry {
        UuidEntry {
            uuid: Uuid(self.uuid),
            label: self.label,
            first_reg: self.first_reg.get(),
            last_reg: self.last_reg.get(),
            invalidated: self.invalidated.get(),
            ..UuidEntry::FREE
        }
    }
}

/// Reads the UUID table.
///
/// `bytes` are as long as the size in the table's key. `jset_version` is the version of the journal entry
/// that points to the table. With version 0, slots are half as long, and the same number of them takes
/// the first half of `bytes`.
///
/// # Errors
/// If the length is not a multiple of 128 bytes.
pub fn parse_uuid_table(bytes: &[u8], jset_version: u32) -> Result<Vec<UuidEntry>, Corrupt> {
    let Ok(slots) = <[RawUuidEntry]>::ref_from_bytes(bytes) else {
        return Err(Corrupt::new(
            Structure::UuidTable,
            "length",
            0,
            Value::Text("a multiple of 128 bytes"),
            Value::Num(as_u64(bytes.len())),
        ));
    };
    if jset_version > 0 {
        return Ok(slots.iter().map(RawUuidEntry::checked).collect());
    }
    let old = match <[RawEntryV0]>::ref_from_prefix_with_elems(bytes, slots.len()) {
        Ok((old, _)) => old,
        Err(_) => &[],
    };
    Ok(old.iter().map(RawEntryV0::checked).collect())
}

/// Writes the table over all of `bytes`; slots behind the last of `entries` become free.
///
/// # Panics
/// If `entries` do not fit into `bytes`.
pub fn encode_uuid_table(bytes: &mut [u8], entries: &[UuidEntry]) {
    assert!(
        entries.len() <= bytes.len() / UUID_ENTRY_BYTES,
        "{} slots do not fit into {} bytes",
        entries.len(),
        bytes.len()
    );
    bytes.fill(0);
    for (to, from) in bytes.chunks_exact_mut(UUID_ENTRY_BYTES).zip(entries) {
        to.copy_from_slice(&from.to_bytes());
    }
}

/// The slots that are not free, with their inodes. Invalidated slots are included.
pub fn used(entries: &[UuidEntry]) -> impl Iterator<Item = (Inode, &UuidEntry)> {
    (0..).map(Inode).zip(entries).filter(|(_, e)| !e.is_free())
}

/// Checks that no UUID is there twice (except [`INVALID_UUID`]) and that volumes have a size.
///
/// # Errors
/// The first slot that breaks a rule.
pub fn check_uuid_table(entries: &[UuidEntry]) -> Result<(), Corrupt> {
    let mut seen = std::collections::BTreeSet::new();
    for (slot, entry) in entries.iter().enumerate() {
        let at = as_u64(slot.saturating_mul(UUID_ENTRY_BYTES));
        if !entry.is_live() {
            continue;
        }
        if !seen.insert(entry.uuid) {
            return Err(Corrupt::new(
                Structure::UuidTable,
                "uuid",
                at,
                Value::Text("a UUID that no other slot has"),
                Value::Uuid(entry.uuid),
            ));
        }
        if entry.is_flash_only() && entry.sectors == Sectors::ZERO {
            return Err(Corrupt::new(
                Structure::UuidTable,
                "sectors",
                at.saturating_add(as_u64(offset_of!(RawUuidEntry, sectors))),
                Value::AtLeast(1),
                Value::Num(0),
            ));
        }
    }
    Ok(())
}
