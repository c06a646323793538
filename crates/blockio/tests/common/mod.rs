//! What the integration tests share.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs::File;
use std::path::{Path, PathBuf};

use blockio::{Backend, Driver, DriverOptions};
use format::Sectors;
use tempfile::TempDir;

/// A directory on a disk's file system: the default temporary directory may be a tmpfs.
pub fn dir() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A driver of each backend that can be had here.
pub fn drivers() -> Vec<Driver> {
    let pool = DriverOptions { backend: Backend::Pool, ..DriverOptions::default() };
    // A small ring, so that the overflow queue is used.
    let ring = DriverOptions { ring_entries: 32, ..DriverOptions::default() };
    [ring, pool].map(|options| Driver::new(options).unwrap()).into()
}

/// A file full of holes.
pub fn sparse_file(dir: &Path, name: &str, sectors: Sectors) -> PathBuf {
    let path = dir.join(name);
    File::create(&path).unwrap().set_len(sectors.bytes()).unwrap();
    path
}
