//! Images of real devices, unpacked, with what is known about them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, dead_code, unused_imports)]

pub mod fixtures;

pub use fixtures::{ALL, expected};
use format::{Bkey, Gen, Inode, Ptr, Sector, Sectors, SetMagic};
use proptest::prelude::*;

/// A whole device.
pub struct Image(Vec<u8>);

impl Image {
    /// The cache device of an image set.
    pub fn cache(dir: &str) -> Image {
        Image(fixtures::cache(dir))
    }

    /// The backing device of an image set.
    pub fn backing(dir: &str) -> Image {
        Image(fixtures::backing(dir))
    }

    /// Size of the device.
    pub fn sectors(&self) -> Sectors {
        Sectors::from_bytes_floor(self.0.len() as u64)
    }

    /// So many sectors from a place on.
    pub fn at(&self, start: Sector, len: Sectors) -> &[u8] {
        let start = usize::try_from(start.bytes()).unwrap();
        &self.0[start..start + usize::try_from(len.bytes()).unwrap()]
    }

    /// What a key points to.
    pub fn of_key(&self, key: &Bkey) -> &[u8] {
        self.at(key.ptr.offset(), key.size())
    }

    /// The superblock.
    pub fn superblock(&self) -> &[u8] {
        self.at(Sector(8), Sectors(8))
    }
}

/// The set magic of structures made in tests.
pub fn set_magic() -> SetMagic {
    SetMagic(0x0123_4567_89ab_cdef)
}

/// Keys as they may stand in a leaf: extents, holes, placeholders, remains of size 0.
pub fn extent() -> impl Strategy<Value = Bkey> {
    let pointer = prop_oneof![
        3 => (0u64..1 << 40, any::<u8>())
            .prop_map(|(at, generation)| Some(Ptr::new(0, Sector(at), Gen(generation)))),
        1 => Just(None),
        1 => any::<u64>().prop_map(|random| Some(Ptr(random | 4095 << 51))),
    ];
    (0u32..1 << 20, 0u64..1 << 16, 0u64..1 << 40, any::<bool>(), pointer).prop_map(
        |(inode, size, start, dirty, pointer)| {
            let (inode, end, size) = (Inode(inode), Sector(start + size), Sectors(size));
            match pointer {
                Some(ptr) => Bkey::extent(inode, end, size, dirty, ptr),
                None => Bkey::hole(inode, end, size),
            }
        },
    )
}

/// Lists of fewer than `most` keys, in no order.
pub fn keys_strategy(most: usize) -> impl Strategy<Value = Vec<Bkey>> {
    proptest::collection::vec(extent(), 0..most)
}
