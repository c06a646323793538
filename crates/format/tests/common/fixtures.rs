//! The files of `tests/fixtures`: images of real devices, and what is known about them. The tests of several crates include it.

use std::path::PathBuf;

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

/// The sets of [`ALL`] whose set was initialised.
pub fn initialised() -> impl Iterator<Item = &'static str> {
    ALL.into_iter().filter(|dir| *dir != "01-fresh")
}

/// One file of an image set, unpacked if it is compressed.
pub fn file(dir: &str, name: &str) -> Vec<u8> {
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

/// The cache device of an image set.
pub fn cache(dir: &str) -> Vec<u8> {
    file(dir, "cache.img.zst")
}

/// The backing device of an image set.
pub fn backing(dir: &str) -> Vec<u8> {
    file(dir, "backing.img.zst")
}

/// What is known about an image set.
pub fn expected(dir: &str) -> Json {
    serde_json::from_slice(&file(dir, "expected.json")).unwrap()
}
