//! The output of an extraction: a stream, or a file with holes.
//!
//! Owns the writing side of an extraction. Must not know the source of the bytes.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use format::Sectors;

/// What an extraction says about a range that was not copied as planned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Remark {
    /// The contents are lost, because a device cannot be read.
    Unreadable,
    /// The contents are lost, because cached data does not have its checksum.
    Damaged,
    /// Clean cached data cannot be read or does not have its checksum: the bytes are those of the backing device.
    FromBacking,
}

/// Receives the contents of a device from its first sector to its last, in order.
pub trait Sink {
    /// Prepares for an output of `total` sectors. Called once, first.
    ///
    /// # Errors
    /// If the output has no room for `total` sectors.
    fn begin(&mut self, total: Sectors) -> io::Result<()>;

    /// Writes the next bytes.
    ///
    /// # Errors
    /// If they cannot be written.
    fn data(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Writes `n` sectors of zeros.
    ///
    /// # Errors
    /// If they cannot be written.
    fn zeros(&mut self, n: Sectors) -> io::Result<()>;

    /// Takes what the bytes of a range are, if they are not what the plan of the extraction says. `start` counts from the start of
    /// the output. It comes before the bytes of the range, and in the order of the ranges.
    fn remark(&mut self, _start: Sectors, _len: Sectors, _remark: Remark) {}

    /// Completes the output, and makes it durable if the sink can. Called once, last.
    ///
    /// # Errors
    /// If any part could not be written.
    fn finish(&mut self) -> io::Result<()>;
}

/// Length of a block of zeros that becomes a hole; file systems allocate in this unit.
const HOLE_BYTES: usize = 4096;

static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];

/// A sink that writes everything, zeros included: for pipes and block devices.
///
/// It flushes its buffer; the caller makes a block device durable.
#[derive(Debug)]
pub struct StreamSink<W> {
    to: W,
}

impl<W: Write> StreamSink<W> {
    /// A sink that writes to `to`.
    pub const fn new(to: W) -> StreamSink<W> {
        StreamSink { to }
    }

    /// The writer.
    pub fn into_inner(self) -> W {
        self.to
    }
}

impl<W: Write> Sink for StreamSink<W> {
    fn begin(&mut self, _total: Sectors) -> io::Result<()> {
        Ok(())
    }

    fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes)
    }

    fn zeros(&mut self, n: Sectors) -> io::Result<()> {
        let mut left = n.bytes();
        while left > 0 {
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(ZEROS.len());
            self.to.write_all(ZEROS.get(..len).unwrap_or_default())?;
            left = left.saturating_sub(u64::try_from(len).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// A sink that writes a regular file, with holes for blocks of zeros. The file loses its old contents.
#[derive(Debug)]
pub struct FileSink {
    file: File,
    at: u64,
}

impl FileSink {
    /// A sink for `file`, a regular file open for writing.
    pub const fn new(file: File) -> FileSink {
        FileSink { file, at: 0 }
    }

    /// Writes `bytes[from..to]`; `bytes` begin at the current position of the output.
    fn write_run(&self, bytes: &[u8], from: usize, to: usize) -> io::Result<()> {
        let run = bytes.get(from..to).unwrap_or_default();
        if run.is_empty() { Ok(()) } else { self.file.write_all_at(run, self.at + len_u64(from)) }
    }
}

impl Sink for FileSink {
    fn begin(&mut self, total: Sectors) -> io::Result<()> {
        // The file is cut to zero bytes first, so that every block that is not written reads as zeros.
        self.file.set_len(0)?;
        self.file.set_len(total.bytes())?;
        self.at = 0;
        Ok(())
    }

    fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (mut at, mut run) = (0, 0);
        // The first block ends at a block border of the file.
        let mut len = HOLE_BYTES - usize::try_from(self.at % HOLE_BYTES as u64).unwrap_or(0);
        while at < bytes.len() {
            let end = bytes.len().min(at + len);
            if bytes.get(at..end).unwrap_or_default().iter().all(|&b| b == 0) {
                self.write_run(bytes, run, at)?;
                run = end;
            }
            (at, len) = (end, HOLE_BYTES);
        }
        self.write_run(bytes, run, at)?;
        self.at += len_u64(bytes.len());
        Ok(())
    }

    fn zeros(&mut self, n: Sectors) -> io::Result<()> {
        self.at = self.at.saturating_add(n.bytes());
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}

fn len_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Data(Vec<u8>),
        Zeros(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        // Whole sectors, each all zero or filled with one byte.
        let data = prop::collection::vec(prop::sample::select(vec![0u8, 0, 0, 1, 255]), 1..40)
            .prop_map(|s| Step::Data(s.iter().flat_map(|&b| [b; 512]).collect()));
        prop_oneof![data, (0u64..300).prop_map(Step::Zeros)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn both_sinks_write_the_same(steps in prop::collection::vec(step(), 0..12)) {
            let total: u64 = steps.iter().map(|s| match s {
                Step::Data(d) => d.len() as u64 / 512,
                Step::Zeros(n) => *n,
            }).sum();
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().write_all_at(&[9; 70_000], 0).unwrap();
            let mut sparse = FileSink::new(file.reopen().unwrap());
            let mut stream = StreamSink::new(Vec::new());
            for sink in [&mut sparse as &mut dyn Sink, &mut stream] {
                sink.begin(Sectors(total)).unwrap();
                for s in &steps {
                    match s {
                        Step::Data(d) => sink.data(d).unwrap(),
                        Step::Zeros(n) => sink.zeros(Sectors(*n)).unwrap(),
                    }
                }
                sink.finish().unwrap();
            }
            prop_assert_eq!(std::fs::read(file.path()).unwrap(), stream.into_inner());
        }
    }

    #[test]
    fn blocks_of_zeros_take_no_space() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut sink = FileSink::new(file.reopen().unwrap());
        sink.begin(Sectors(16384)).unwrap();
        sink.data(&vec![0; 4 << 20]).unwrap();
        sink.zeros(Sectors(8184)).unwrap();
        sink.data(&[1; 4096]).unwrap();
        sink.finish().unwrap();
        let meta = file.path().metadata().unwrap();
        assert_eq!(meta.len(), 8 << 20);
        assert!(meta.blocks() < 2048, "{} blocks", meta.blocks());
    }
}
