//! Units of the format and of all code that uses it.
//!
//! Owns the newtypes that several modules use: positions, lengths, bucket numbers, generations and
//! journal sequence numbers. Must not know any structure. A *sector* is always 512 bytes, independent of
//! a device's logical block size. The operators are for numbers that were already checked: they overflow
//! as integers do (a panic in debug builds). Code that reads untrusted numbers uses the `checked_`
//! methods.
#![allow(clippy::arithmetic_side_effects, reason = "the operators are integer arithmetic, by design")]

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

/// Bytes in a sector.
pub const SECTOR_BYTES: u64 = 512;

/// A position on a device or in a volume, in 512-byte sectors.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Sector(pub u64);

/// A length in 512-byte sectors.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Sectors(pub u64);

/// Number of a bucket on the cache device; bucket 0 begins at sector 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct BucketNr(pub u32);

/// Generation of a bucket. It wraps at 256, so code compares generations with [`Gen::age_of`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Gen(pub u8);

/// Sequence number of a journal entry; the first entry after format is 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct JournalSeq(pub u64);

/// Index of a device (backing device or volume) in the set's UUID table; the high part of a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Inode(pub u32);

/// Random number of one registration of a backing device.
///
/// It is random so that two states of a cache device have different numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RegistrationNr(u64);

impl RegistrationNr {
    /// This bit is set in every number. A word without it is not a registration number.
    const MARK: u64 = 1 << 63;

    /// A number made of random bits.
    pub const fn from_random(bits: u64) -> RegistrationNr {
        RegistrationNr(bits | RegistrationNr::MARK)
    }

    /// The number in a word from a device; `None` if the word is not a registration number.
    pub const fn from_word(word: u64) -> Option<RegistrationNr> {
        if word & RegistrationNr::MARK == 0 { None } else { Some(RegistrationNr(word)) }
    }

    /// The word to store on a device; 0 if there is no number.
    pub const fn to_word(number: Option<RegistrationNr>) -> u64 {
        match number {
            Some(RegistrationNr(word)) => word,
            None => 0,
        }
    }
}

impl fmt::Display for RegistrationNr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The number of a copy: a backing device and the second set that has its dirty data have the same one.
///
/// It is random, so that a set that has missed a change of the copy has another number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CopyNr(u64);

impl CopyNr {
    /// A number made of random bits.
    pub const fn from_random(bits: u64) -> CopyNr {
        CopyNr(bits)
    }

    /// The number in a word from a device.
    pub(crate) const fn from_word(word: u64) -> CopyNr {
        CopyNr(word)
    }

    /// The word to store on a device.
    pub(crate) const fn to_word(self) -> u64 {
        self.0
    }
}

/// A UUID, in the byte order in which it is stored and printed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// The all-zero UUID, which means "none".
    pub const NIL: Uuid = Uuid([0; 16]);

    /// True for the all-zero UUID.
    pub fn is_nil(&self) -> bool {
        *self == Uuid::NIL
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error for a text that is not a UUID.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a UUID: 32 hexadecimal digits expected, hyphens may separate them")]
pub struct ParseUuidError;

impl FromStr for Uuid {
    type Err = ParseUuidError;

    /// Reads 32 hexadecimal digits; hyphens are skipped wherever they stand.
    fn from_str(text: &str) -> Result<Uuid, ParseUuidError> {
        let mut out = [0u8; 16];
        let mut digits = text.chars().filter(|&c| c != '-').map(|c| c.to_digit(16));
        for byte in &mut out {
            let (Some(Some(high)), Some(Some(low))) = (digits.next(), digits.next()) else {
                return Err(ParseUuidError);
            };
            *byte = u8::try_from((high << 4) | low).map_err(|_| ParseUuidError)?;
        }
        if digits.next().is_some() { Err(ParseUuidError) } else { Ok(Uuid(out)) }
    }
}

impl Sector {
    /// Byte offset of this position. It saturates, so that a position from untrusted bytes stays out of range.
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(SECTOR_BYTES)
    }

    /// The length from `start` to this position; `None` if `start` is behind it.
    pub const fn checked_since(self, start: Sector) -> Option<Sectors> {
        match self.0.checked_sub(start.0) {
            Some(n) => Some(Sectors(n)),
            None => None,
        }
    }

    /// This position advanced by `n`; `None` on overflow.
    pub const fn checked_add(self, n: Sectors) -> Option<Sector> {
        match self.0.checked_add(n.0) {
            Some(n) => Some(Sector(n)),
            None => None,
        }
    }
}

impl Sectors {
    /// No sectors.
    pub const ZERO: Sectors = Sectors(0);

    /// Length in bytes. Saturates.
    pub const fn bytes(self) -> u64 {
        self.0.saturating_mul(SECTOR_BYTES)
    }

    /// The number of whole sectors in `bytes`, rounded down.
    pub const fn from_bytes_floor(bytes: u64) -> Sectors {
        Sectors(bytes / SECTOR_BYTES)
    }

    /// The number of sectors that hold `bytes`, rounded up.
    pub const fn from_bytes_ceil(bytes: u64) -> Sectors {
        Sectors(bytes.div_ceil(SECTOR_BYTES))
    }
}

impl Gen {
    /// Largest age at which the 8-bit wrap-around stays unambiguous (format section 4.5).
    pub const MAX_AGE: u8 = 128;

    /// How many generations `pointer` is behind this current generation (format section 4.5).
    ///
    /// The age is `(self - pointer) mod 256`, or 0 if that exceeds 128. A pointer is stale if and only if
    /// its age is above 0.
    pub const fn age_of(self, pointer: Gen) -> u8 {
        let age = self.0.wrapping_sub(pointer.0);
        if age > Gen::MAX_AGE { 0 } else { age }
    }

    /// The generation after this one.
    #[must_use]
    pub const fn next(self) -> Gen {
        Gen(self.0.wrapping_add(1))
    }

    /// The newer of two generations, compared modulo 256.
    ///
    /// A loader raises stored generations by this rule (format section 5).
    #[must_use]
    pub const fn raised_by(self, pointer: Gen) -> Gen {
        if self.age_of(pointer) == 0 { pointer } else { self }
    }
}

impl JournalSeq {
    /// The sequence number after this one.
    #[must_use]
    pub const fn next(self) -> JournalSeq {
        JournalSeq(self.0 + 1)
    }
}

impl Add<Sectors> for Sector {
    type Output = Sector;
    fn add(self, n: Sectors) -> Sector {
        Sector(self.0 + n.0)
    }
}

impl Sub<Sector> for Sector {
    type Output = Sectors;
    fn sub(self, start: Sector) -> Sectors {
        Sectors(self.0 - start.0)
    }
}

impl Sub<Sectors> for Sector {
    type Output = Sector;
    fn sub(self, n: Sectors) -> Sector {
        Sector(self.0 - n.0)
    }
}

impl AddAssign<Sectors> for Sector {
    fn add_assign(&mut self, n: Sectors) {
        self.0 += n.0;
    }
}

impl Add for Sectors {
    type Output = Sectors;
    fn add(self, n: Sectors) -> Sectors {
        Sectors(self.0 + n.0)
    }
}

impl Sub for Sectors {
    type Output = Sectors;
    fn sub(self, n: Sectors) -> Sectors {
        Sectors(self.0 - n.0)
    }
}

impl AddAssign for Sectors {
    fn add_assign(&mut self, n: Sectors) {
        self.0 += n.0;
    }
}

impl SubAssign for Sectors {
    fn sub_assign(&mut self, n: Sectors) {
        self.0 -= n.0;
    }
}

macro_rules! plain_display {
    ($($t:ty),*) => {$(
        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    )*};
}
plain_display!(Sector, Sectors, BucketNr, Gen, JournalSeq, Inode);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn age_wraps_and_is_zero_for_newer_pointers() {
        assert_eq!(Gen(5).age_of(Gen(5)), 0);
        assert_eq!(Gen(5).age_of(Gen(3)), 2);
        assert_eq!(Gen(1).age_of(Gen(255)), 2);
        assert_eq!(Gen(3).age_of(Gen(5)), 0, "a newer pointer is not stale");
        assert_eq!(Gen(0).age_of(Gen(128)), 128);
        assert_eq!(Gen(0).age_of(Gen(127)), 0);
    }

    #[test]
    fn uuid_text_round_trips() {
        let text = "945cfb77-beed-47ba-922a-d07f1eb0a9c5";
        let uuid: Uuid = text.parse().unwrap();
        assert_eq!(uuid.0[0], 0x94);
        assert_eq!(uuid.0[15], 0xc5);
        assert_eq!(uuid.to_string(), text);
        assert_eq!("945cfb77beed47ba922ad07f1eb0a9c5".parse(), Ok(uuid));
        for bad in
            ["", "945cfb77", "945cfb77-beed-47ba-922a-d07f1eb0a9c5a", "x45cfb77beed47ba922ad07f1eb0a9c5"]
        {
            assert_eq!(bad.parse::<Uuid>(), Err(ParseUuidError), "{bad}");
        }
        assert!(Uuid::NIL.is_nil() && !uuid.is_nil());
    }

    #[test]
    fn raising_follows_the_newer_generation() {
        assert_eq!(Gen(255).raised_by(Gen(0)), Gen(0));
        assert_eq!(Gen(7).raised_by(Gen(6)), Gen(7));
        assert_eq!(Gen(7).raised_by(Gen(7)), Gen(7));
    }
}
