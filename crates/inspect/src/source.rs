//! Sources of bytes: devices, image files, and slices in tests.
//!
//! Owns [`ReadAt`], the only interface by which this crate reads a device, and its implementations. No method writes, and
//! files are opened for reading only. Must not know any structure.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use format::{SECTOR_BYTES, Sector, Sectors};
use thiserror::Error;

/// A device or image that can be read at any sector.
pub trait ReadAt {
    /// Fills `into` with the contents from sector `at` on.
    ///
    /// # Errors
    /// If the range reaches beyond the end, or the device fails. The contents of `into` are then undefined.
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError>;

    /// Size of the device, in whole sectors.
    fn sectors(&self) -> Sectors;

    /// Name for messages: the path as the operator gave it.
    fn name(&self) -> &str;

    /// The first position from `from` on that may have data other than zeros; the end of the device if there is none.
    ///
    /// Callers use it to skip holes of sparse files. To return `from` is always correct.
    fn next_data(&self, from: Sector) -> Sector {
        from
    }

    /// Logical block size of the device in bytes, if it is known.
    fn logical_block_bytes(&self) -> Option<u32> {
        None
    }
}

/// The error of a read that failed.
#[derive(Debug, Error)]
#[error("{device}: cannot read {} at sector {at}: {reason}", format::counted(sectors, "sector"))]
pub struct ReadError {
    /// Name of the device.
    pub device: String,
    /// First sector of the read.
    pub at: Sector,
    /// Length of the read.
    pub sectors: Sectors,
    /// The error.
    #[source]
    pub reason: ReadFailure,
}

/// Why a read failed.
#[derive(Debug, Error)]
pub enum ReadFailure {
    /// The range is not inside the device.
    #[error("the device ends at sector {end}")]
    PastEnd {
        /// Size of the device.
        end: Sectors,
    },
    /// The system reported an error.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl ReadError {
    fn new(source: &(impl ReadAt + ?Sized), at: Sector, len: usize, reason: ReadFailure) -> ReadError {
        let sectors = Sectors::from_bytes_ceil(u64::try_from(len).unwrap_or(u64::MAX));
        ReadError { device: source.name().to_owned(), at, sectors, reason }
    }
}

/// A device or image that cannot be opened for reading.
#[derive(Debug, Error)]
#[error("{path}: cannot open: {reason}")]
pub struct OpenFileError {
    /// The path as given.
    pub path: String,
    /// The error.
    #[source]
    pub reason: io::Error,
}

/// A block device or a regular file.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    name: String,
    sectors: Sectors,
    logical_block_bytes: Option<u32>,
}

impl FileSource {
    /// Opens `path` for reading. A size that is not a whole number of sectors is rounded down.
    ///
    /// # Errors
    /// If it cannot be opened, or is neither a block device nor a regular file.
    pub fn open(path: impl AsRef<Path>) -> Result<FileSource, OpenFileError> {
        let path = path.as_ref();
        FileSource::open_inner(path)
            .map_err(|reason| OpenFileError { path: path.display().to_string(), reason })
    }

    fn open_inner(path: &Path) -> io::Result<FileSource> {
        // The type is checked before the open, because the open of a pipe would wait for a writer.
        let usable = |t: std::fs::FileType| t.is_file() || t.is_block_device();
        let refuse = || io::Error::other("neither a block device nor a regular file");
        if !usable(std::fs::metadata(path)?.file_type()) {
            return Err(refuse());
        }
        let file = File::open(path)?;
        let meta = file.metadata()?;
        if !usable(meta.file_type()) {
            return Err(refuse());
        }
        let (bytes, logical_block_bytes) = if meta.file_type().is_block_device() {
            // The metadata of a device node has length zero; a seek to the end gives the size of the device.
            let bytes = io::Seek::seek(&mut &file, io::SeekFrom::End(0))?;
            (bytes, logical_block_bytes(meta.rdev()))
        } else {
            (meta.len(), None)
        };
        let name = path.display().to_string();
        Ok(FileSource { file, name, sectors: Sectors::from_bytes_floor(bytes), logical_block_bytes })
    }
}

/// Logical block size of the block device with number `rdev`, from sysfs. `None` if sysfs does not have it.
fn logical_block_bytes(rdev: u64) -> Option<u32> {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    // A partition has no queue directory; the directory of its disk, one level up, has one.
    ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/logical_block_size");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

impl ReadAt for FileSource {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        check_inside(self, at, into.len())?;
        self.file
            .read_exact_at(into, at.bytes())
            .map_err(|e| ReadError::new(self, at, into.len(), ReadFailure::Io(e)))
    }

    fn sectors(&self) -> Sectors {
        self.sectors
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn next_data(&self, from: Sector) -> Sector {
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(from.bytes())) {
            Ok(bytes) => Sector((bytes / SECTOR_BYTES).max(from.0).min(self.sectors.0)),
            // The file has no data from `from` to its end.
            Err(rustix::io::Errno::NXIO) => Sector(self.sectors.0),
            // The file system cannot find data.
            Err(_) => from,
        }
    }

    fn logical_block_bytes(&self) -> Option<u32> {
        self.logical_block_bytes
    }
}

/// Bytes in memory.
#[derive(Clone, Copy, Debug)]
pub struct SliceSource<'a> {
    bytes: &'a [u8],
    name: &'a str,
}

impl<'a> SliceSource<'a> {
    /// A device with this name and these contents. Bytes after the last whole sector are ignored.
    pub const fn new(name: &'a str, bytes: &'a [u8]) -> SliceSource<'a> {
        SliceSource { bytes, name }
    }
}

impl ReadAt for SliceSource<'_> {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        check_inside(self, at, into.len())?;
        let range = usize::try_from(at.bytes()).ok().and_then(|start| {
            let end = start.checked_add(into.len())?;
            self.bytes.get(start..end)
        });
        match range {
            Some(bytes) => {
                into.copy_from_slice(bytes);
                Ok(())
            }
            None => {
                let reason = ReadFailure::PastEnd { end: self.sectors() };
                Err(ReadError::new(self, at, into.len(), reason))
            }
        }
    }

    fn sectors(&self) -> Sectors {
        Sectors::from_bytes_floor(u64::try_from(self.bytes.len()).unwrap_or(u64::MAX))
    }

    fn name(&self) -> &str {
        self.name
    }
}

fn check_inside(source: &impl ReadAt, at: Sector, len: usize) -> Result<(), ReadError> {
    let end = source.sectors();
    let wanted = Sectors::from_bytes_ceil(u64::try_from(len).unwrap_or(u64::MAX));
    match at.checked_add(wanted) {
        Some(past) if past.0 <= end.0 => Ok(()),
        _ => Err(ReadError::new(source, at, len, ReadFailure::PastEnd { end })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_read_inside_and_refuse_past_the_end() {
        let bytes: Vec<u8> = (0..1300u32).map(|i| i as u8).collect();
        let s = SliceSource::new("img", &bytes);
        assert_eq!(s.sectors(), Sectors(2));
        let mut buf = [0; 512];
        s.read_at(Sector(1), &mut buf).unwrap();
        assert_eq!(buf[..], bytes[512..1024]);
        let e = s.read_at(Sector(2), &mut buf).unwrap_err();
        assert_eq!(e.to_string(), "img: cannot read 1 sector at sector 2: the device ends at sector 2");
        assert!(s.read_at(Sector(u64::MAX), &mut buf).is_err());
    }

    #[test]
    fn files_read_and_tell_their_holes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        file.as_file().write_all_at(&[7; 512], 1 << 20).unwrap();
        let s = FileSource::open(file.path()).unwrap();
        assert_eq!(s.sectors(), Sectors(8192));
        let mut buf = [0; 512];
        s.read_at(Sector(2048), &mut buf).unwrap();
        assert_eq!(buf, [7; 512]);
        // A file system without holes returns the position itself.
        assert!([Sector(0), Sector(2048)].contains(&s.next_data(Sector(0))));
        assert_eq!(s.next_data(Sector(2048)), Sector(2048));
        assert!(s.next_data(Sector(4096)).0 >= 4096);
    }

    #[test]
    fn directories_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let e = FileSource::open(dir.path()).unwrap_err();
        assert!(e.to_string().contains("neither a block device nor a regular file"), "{e}");
        let e = FileSource::open(dir.path().join("none")).unwrap_err();
        assert!(e.to_string().contains("none: cannot open"), "{e}");
    }
}
