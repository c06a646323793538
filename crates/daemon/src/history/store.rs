//! The file of the history in the state directory.
//!
//! Owns the encoding: a line with the version, the series, and a CRC-64 of all before it. The file is replaced as a whole, so
//! after a crash it is the old or the new one. A file that is damaged is ignored, because the history is not needed to serve.

use std::collections::BTreeMap;
use std::path::Path;

use format::checksum::crc64;

use super::SeriesOf;
use super::series::{Part, RESOLUTIONS, Series};

/// Name of the file in the state directory.
pub(super) const NAME: &str = "history";
const MAGIC: &[u8] = b"ubcache history 1\n";
/// Limits of a file that is read: series, columns of a series, bytes of a name.
const MOST: (u32, u32, u32) = (65_536, 256, 4096);
/// Limit of the bytes of a file.
const MOST_BYTES: u64 = 1 << 30;

/// Series by their subject and its name.
pub(super) type All = BTreeMap<(SeriesOf, String), Series>;

/// Why a file is ignored.
#[derive(Debug, thiserror::Error)]
pub(super) enum Damage {
    /// The file cannot be read.
    #[error("cannot be read")]
    Unreadable(#[source] std::io::Error),
    /// The file is larger than a history can be.
    #[error("expected at most {MOST_BYTES} bytes, found {0}")]
    TooLarge(u64),
    /// The file is of another version, or of another program.
    #[error("expected the first line \"ubcache history 1\"")]
    Version,
    /// The checksum does not match.
    #[error("checksum does not match")]
    Checksum,
    /// The contents contradict themselves.
    #[error("contents cannot be parsed")]
    Contents,
}

fn put_u32(out: &mut Vec<u8>, value: usize) {
    out.extend(u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_u32(out, text.len());
    out.extend(text.as_bytes());
}

pub(super) fn encode(all: &All) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    put_u32(&mut out, all.len());
    for ((of, name), series) in all {
        out.push(of.code());
        put_text(&mut out, name);
        put_u32(&mut out, series.columns.len());
        series.columns.iter().for_each(|column| put_text(&mut out, column));
        for part in &series.parts {
            put_u32(&mut out, part.times_ms.len());
            part.times_ms.iter().for_each(|time| out.extend(time.to_le_bytes()));
            part.values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
    let sum = crc64(&out);
    out.extend(sum.to_le_bytes());
    out
}

/// The bytes that are not parsed yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn number(&mut self, most: u32) -> Option<usize> {
        let value = u32::from_le_bytes(self.array()?);
        if value > most { None } else { usize::try_from(value).ok() }
    }

    fn text(&mut self) -> Option<String> {
        let bytes = self.number(MOST.2)?;
        String::from_utf8(self.take(bytes)?.to_vec()).ok()
    }

    fn part(&mut self, most: usize, width: usize) -> Option<Part> {
        let samples = self.number(u32::try_from(most).ok()?)?;
        let mut part = Part::default();
        for _ in 0..samples {
            part.times_ms.push_back(u64::from_le_bytes(self.array()?));
        }
        for _ in 0..samples * width {
            part.values.push_back(f32::from_le_bytes(self.array()?));
        }
        Some(part)
    }

    fn series(&mut self) -> Option<((SeriesOf, String), Series)> {
        let [code] = self.array()?;
        let key = (SeriesOf::of_code(code)?, self.text()?);
        let width = self.number(MOST.1)?;
        let columns = (0..width).map(|_| self.text()).collect::<Option<Vec<_>>>()?;
        let mut series = Series { columns, ..Series::default() };
        for (part, resolution) in series.parts.iter_mut().zip(&RESOLUTIONS) {
            *part = self.part(resolution.samples, width)?;
        }
        // The oldest part first: all times ascend.
        let times = series.parts.iter().rev().flat_map(|part| &part.times_ms);
        times.is_sorted_by(|a, b| a < b).then_some((key, series))
    }
}

pub(super) fn decode(bytes: &[u8]) -> Result<All, Damage> {
    let contents = bytes.strip_prefix(MAGIC).ok_or(Damage::Version)?;
    let (contents, sum) = contents.split_last_chunk::<8>().ok_or(Damage::Checksum)?;
    if crc64(&bytes[..bytes.len() - sum.len()]) != u64::from_le_bytes(*sum) {
        return Err(Damage::Checksum);
    }
    let mut rest = Rest(contents);
    let number = rest.number(MOST.0).ok_or(Damage::Contents)?;
    let all = (0..number).map(|_| rest.series()).collect::<Option<All>>().ok_or(Damage::Contents)?;
    if rest.0.is_empty() { Ok(all) } else { Err(Damage::Contents) }
}

/// Reads a file; `None` if there is none.
pub(super) fn read(path: &Path) -> Result<Option<All>, Damage> {
    let size = match std::fs::metadata(path) {
        Ok(found) => found.len(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Damage::Unreadable(e)),
    };
    if size > MOST_BYTES {
        return Err(Damage::TooLarge(size));
    }
    let bytes = std::fs::read(path).map_err(Damage::Unreadable)?;
    decode(&bytes).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> All {
        let mut all = All::new();
        for (of, name) in [(SeriesOf::Host, ""), (SeriesOf::Set, "a"), (SeriesOf::Volume, "bcache0")] {
            let series = all.entry((of, name.to_owned())).or_default();
            for n in 0..1500u64 {
                let reads = (n % 3 > 0).then_some(n as f32);
                series.add(1000 * n, &[("reads", reads), ("read_p99_us", Some(7.5))]);
            }
        }
        all
    }

    #[test]
    fn stored_series_are_read_again() {
        let all = some();
        let again = decode(&encode(&all)).unwrap();
        assert!(again.keys().eq(all.keys()));
        for (key, series) in &all {
            assert_eq!(again[key].after(0), series.after(0));
        }
    }

    /// Every file that a crash or a bad sector has changed is refused without a panic.
    #[test]
    fn damage_is_noticed_at_every_byte() {
        let mut all = some();
        all.values_mut().for_each(|series| {
            *series = Series::default();
            series.add(1000, &[("reads", Some(1.0))]);
        });
        let whole = encode(&all);
        for n in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[n] ^= 0x10;
            assert!(decode(&damaged).is_err(), "byte {n}");
            assert!(decode(&whole[..n]).is_err(), "the first {n} bytes");
        }
        // A right checksum over wrong contents.
        for n in MAGIC.len()..whole.len() - 8 {
            let mut damaged = whole[..whole.len() - 8].to_vec();
            damaged[n] = 0xff;
            damaged.extend(crc64(&damaged).to_le_bytes());
            let _ = decode(&damaged);
        }
    }
}
