//! What a load runs against: a file or block device past the page cache, or an NBD server.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use cli::nbd_client::Client;

use super::stamp::SECTOR;
use crate::said::TIMEOUT;

/// Something with sectors. Each worker has one of its own.
pub trait Target {
    /// Reads whole sectors.
    ///
    /// # Errors
    /// Those of the device.
    fn read(&mut self, sector: u64, sectors: u32) -> io::Result<Vec<u8>>;
    /// Writes whole sectors.
    ///
    /// # Errors
    /// Those of the device.
    fn write(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes durable what was written before.
    ///
    /// # Errors
    /// Those of the device.
    fn flush(&mut self) -> io::Result<()>;
}

/// A block device or file.
pub struct FileTarget {
    file: File,
    /// Has room to be aligned in, as `O_DIRECT` demands.
    buffer: Vec<u8>,
}

const ALIGNMENT: usize = 4096;

impl FileTarget {
    /// Opens a device, past the page cache.
    ///
    /// # Errors
    /// If that is impossible.
    pub fn open(path: &Path, write: bool) -> io::Result<FileTarget> {
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).map_err(io::Error::other)?;
        let file = OpenOptions::new().read(true).write(write).custom_flags(direct).open(path)?;
        Ok(FileTarget { file, buffer: Vec::new() })
    }

    fn aligned(&mut self, len: usize) -> io::Result<(&File, &mut [u8])> {
        if self.buffer.len() < len + ALIGNMENT {
            self.buffer = vec![0; len + ALIGNMENT];
        }
        let at = self.buffer.as_ptr().align_offset(ALIGNMENT);
        let bytes = self.buffer.get_mut(at..at + len).ok_or_else(|| io::Error::other("not to be aligned"))?;
        Ok((&self.file, bytes))
    }
}

impl Target for FileTarget {
    fn read(&mut self, sector: u64, sectors: u32) -> io::Result<Vec<u8>> {
        let (file, bytes) = self.aligned(sectors as usize * SECTOR)?;
        file.read_exact_at(bytes, sector * SECTOR as u64)?;
        Ok(bytes.to_vec())
    }

    fn write(&mut self, sector: u64, data: &[u8]) -> io::Result<()> {
        let (file, bytes) = self.aligned(data.len())?;
        bytes.copy_from_slice(data);
        file.write_all_at(bytes, sector * SECTOR as u64)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// A connection to an NBD server.
pub struct NbdTarget(Client);

impl NbdTarget {
    /// Connects over a unix socket.
    ///
    /// # Errors
    /// If no server listens.
    pub fn connect(socket: &Path, name: &str) -> io::Result<NbdTarget> {
        let client = Client::connect(socket, name)?;
        client.set_timeout(Some(TIMEOUT))?;
        Ok(NbdTarget(client))
    }

    /// The size of the volume in sectors.
    pub fn sectors(&self) -> u64 {
        self.0.size_bytes() / SECTOR as u64
    }
}

impl Target for NbdTarget {
    fn read(&mut self, sector: u64, sectors: u32) -> io::Result<Vec<u8>> {
        self.0.read(sector * SECTOR as u64, sectors * SECTOR as u32)
    }

    fn write(&mut self, sector: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write(sector * SECTOR as u64, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
