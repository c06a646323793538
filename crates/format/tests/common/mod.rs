//! Images of real devices, unpacked, with what is known about them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, dead_code)]

use std::path::PathBuf;

use format::{Bkey, Sector, Sectors};
use serde_json::Value as Json;

/// Every image set.
pub const ALL: [&str; 9] = [
    "01-fresh",
    "02-attached-empty",
    "03-writeback-clean-stop",
    "04-writeback-killed",
    "05-clean-only",
    "06-volume-and-backing-killed",
    "07-busy-killed",
    "08-synthetic",
    "09-small-buckets-killed",
];

/// One file of an image set, unpacked if it is compressed.
fn file(dir: &str, name: &str) -> Vec<u8> {
    let mut path = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    path.extend(["..", "..", "tests", "fixtures", dir, name]);
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if !name.ends_with(".zst") {
        return bytes;
    }
    let mut decoder = zstd::stream::read::Decoder::new(&bytes[..]).unwrap();
    decoder.window_log_max(27).unwrap();
    let mut out = Vec::new();
    std::io::Read::read_to_end(&mut decoder, &mut out).unwrap();
    out
}

/// A whole device.
pub struct Image(Vec<u8>);

impl Image {
    /// The cache device of an image set.
    pub fn cache(dir: &str) -> Image {
        Image(file(dir, "cache.img.zst"))
    }

    /// The backing device of an image set.
    pub fn backing(dir: &str) -> Image {
        Image(file(dir, "backing.img.zst"))
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

/// What is known about an image set.
pub fn expected(dir: &str) -> Json {
    serde_json::from_slice(&file(dir, "expected.json")).unwrap()
}
