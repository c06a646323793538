//! Devices for unit tests.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use format::superblock::{BackingFormat, CacheFormat};
use format::{BackingState, BackingSuper, CacheMode, CacheSuper, Replacement, Sector, Sectors, Uuid};

/// Makes a file with the superblock of a new cache device of 8 MiB, of a set whose UUID is all `n`.
pub(crate) fn cache_device(dir: &Path, n: u8) -> PathBuf {
    let path = dir.join(format!("cache-{n}"));
    let want = CacheFormat {
        uuid: Uuid([n ^ 0x80; 16]),
        set_uuid: Uuid([n; 16]),
        device_sectors: Sectors(16384),
        block_sectors: Sectors(8),
        bucket_sectors: Sectors(16),
        replacement: Replacement::Lru,
        discard: false,
    };
    write(&path, &CacheSuper::format(&want).unwrap().encode());
    path
}

/// Makes a file with the superblock of a new backing device of 8 MiB, for the set whose UUID is all `n`.
pub(crate) fn backing_device(dir: &Path, n: u8) -> PathBuf {
    let path = dir.join(format!("backing-{n}"));
    write(&path, &BackingSuper::format(&backing_format(n)).unwrap().encode());
    path
}

/// Makes a file with the superblock of a backing device in this state, of the set whose UUID is all `n`. Its own UUID is all
/// `own`.
pub(crate) fn backing_device_in(dir: &Path, n: u8, own: u8, state: BackingState) -> PathBuf {
    let path = dir.join(format!("backing-{n}-{own}"));
    let mut superblock =
        BackingSuper::format(&BackingFormat { uuid: Uuid([own; 16]), ..backing_format(n) }).unwrap();
    superblock.set_state(state);
    write(&path, &superblock.encode());
    path
}

fn backing_format(n: u8) -> BackingFormat {
    BackingFormat {
        uuid: Uuid([n ^ 0x40; 16]),
        set_uuid: Uuid([n; 16]),
        device_sectors: Sectors(16384),
        block_sectors: Sectors(8),
        bucket_sectors: Sectors(16),
        data_offset: Sector(16),
        cache_mode: CacheMode::Writethrough,
        label: [0; 32],
    }
}

/// Writes a file of 8 MiB with this superblock.
fn write(path: &Path, superblock: &[u8]) {
    let mut bytes = vec![0; 4096];
    bytes.extend(superblock);
    std::fs::write(path, bytes).unwrap();
    File::options().write(true).open(path).unwrap().set_len(8 << 20).unwrap();
}

/// Makes a pipe in the place of a file: who opens it to write it waits for a reader.
pub(crate) fn block_writes_of(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

/// Lets a writer of such a pipe go on. The result keeps the pipe open.
pub(crate) fn reader_of(pipe: &Path) -> File {
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    File::options().read(true).custom_flags(flags).open(pipe).unwrap()
}

/// The error number of the system that is the cause of an error.
pub(crate) fn errno(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut at = Some(error);
    while let Some(e) = at {
        if let Some(number) = e.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error) {
            return Some(number);
        }
        at = e.source();
    }
    None
}
