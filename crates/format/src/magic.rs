//! Magic numbers that bind journal entries, prio sets and bsets to one cache set.
//!
//! Each is a constant xored with the first eight bytes of the set's UUID, so that a parser never takes
//! structures of an earlier set on the same device for this set's. For this reason formatting need not
//! erase anything.

use crate::units::Uuid;

/// Magic of a superblock (the same for every set).
pub const SUPERBLOCK_MAGIC: [u8; 16] =
    [0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81];

const JSET_MAGIC: u64 = 0x2452_35c1_a362_5032;
const PSET_MAGIC: u64 = 0x6750_e15f_8733_7f91;
const BSET_MAGIC: u64 = 0x9013_5c78_b99e_07f5;
/// Of ubcache; the kernel has no footers.
const FOOTER_MAGIC: u64 = 0x7562_6361_6368_6531;

/// The part of a set's UUID that the magics of its structures contain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetMagic(pub u64);

impl SetMagic {
    /// The set magic of the set with this UUID.
    pub const fn of(set_uuid: Uuid) -> SetMagic {
        let Some(head) = set_uuid.0.first_chunk::<8>() else { return SetMagic(0) };
        SetMagic(u64::from_le_bytes(*head))
    }

    /// Magic of a journal entry.
    pub const fn jset(self) -> u64 {
        JSET_MAGIC ^ self.0
    }

    /// Magic of a prio set.
    pub const fn pset(self) -> u64 {
        PSET_MAGIC ^ self.0
    }

    /// Magic of a bset.
    pub const fn bset(self) -> u64 {
        BSET_MAGIC ^ self.0
    }

    /// Magic of a footer ([`crate::footer`]).
    pub const fn footer(self) -> u64 {
        FOOTER_MAGIC ^ self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magics_of_one_set_agree_with_each_other() {
        // The three magics of one real set. All must follow from the same set magic.
        let set = SetMagic(0x2f1c_b16d_98b3_3c9f ^ JSET_MAGIC);
        assert_eq!(set.jset(), 0x2f1c_b16d_98b3_3c9f);
        assert_eq!(set.bset(), 0x9b5d_d8d4_824f_6b58);
        assert_eq!(set.pset(), 0x6c1e_65f3_bce2_133c);
    }

    #[test]
    fn the_uuid_is_read_little_endian() {
        let mut u = [0u8; 16];
        u[0] = 1;
        u[7] = 0x80;
        assert_eq!(SetMagic::of(Uuid(u)), SetMagic(0x8000_0000_0000_0001));
    }
}
