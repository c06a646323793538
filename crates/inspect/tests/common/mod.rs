//! Images of real devices, unpacked, with what is known about them.
#![allow(clippy::unwrap_used, dead_code, unused_imports, reason = "test code")]

pub mod build;
pub mod edit;
#[path = "../../../format/tests/common/fixtures.rs"]
pub mod fixtures;

pub use fixtures::{ALL, backing, cache, expected, file, initialised};
use inspect::{Mode, SetView, SliceSource};

/// A source that is called `cache`.
pub fn cache_source(bytes: &[u8]) -> SliceSource<'_> {
    SliceSource::new("cache", bytes)
}

/// A source that is called `backing`.
pub fn backing_source(bytes: &[u8]) -> SliceSource<'_> {
    SliceSource::new("backing", bytes)
}

/// The set on an image that is in order.
pub fn open(bytes: &[u8]) -> SetView {
    SetView::open(&cache_source(bytes), Mode::Strict).unwrap_or_else(|e| panic!("{e}"))
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
