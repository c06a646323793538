//! Sizes as people write and read them.
//!
//! Owns the checks of sizes in options, and their output; the syntax is that of tunables. Must not know their use.

use engine::tunables::parse_bytes;
use format::{SECTOR_BYTES, Sectors};
pub(crate) use serve::amount::human;

/// The reason why a text is no size.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum SizeError {
    /// It is no number with a suffix.
    #[error(
        "expected a number with an optional unit k, M, G or T, also KiB, MiB, GiB or TiB, such as 512k or 4MiB"
    )]
    NoNumber,
    /// The number does not fit.
    #[error("expected at most 16 EiB")]
    TooLarge,
    /// It is zero.
    #[error("expected more than 0 bytes")]
    Zero,
    /// It is a part of a sector.
    #[error("expected a multiple of {SECTOR_BYTES} bytes, found {bytes}")]
    NotSectors {
        /// The size.
        bytes: u64,
    },
}

/// Reads a size in bytes: a number with an optional unit k, M, G or T, also KiB, MiB, GiB or TiB, for powers of 1024. A size
/// is read as it is printed: with a blank and one point (`1.5 GiB`), rounded down to bytes.
pub(crate) fn parse(text: &str) -> Result<u64, SizeError> {
    match parse_bytes(text).filter(|_| !text.starts_with('+')) {
        None => Err(SizeError::NoNumber),
        // The parser of tunables takes a larger number as the largest one.
        Some(u64::MAX) => Err(SizeError::TooLarge),
        Some(bytes) => Ok(bytes),
    }
}

/// Reads an amount in a second, as [`parse`] reads a size; `/s` may follow.
pub(crate) fn parse_rate(text: &str) -> Result<u64, SizeError> {
    parse(text.strip_suffix("/s").unwrap_or(text))
}

/// Reads a size that is a whole number of sectors, other than none.
pub(crate) fn parse_sectors(text: &str) -> Result<Sectors, SizeError> {
    match parse(text)? {
        0 => Err(SizeError::Zero),
        bytes if bytes % SECTOR_BYTES != 0 => Err(SizeError::NotSectors { bytes }),
        bytes => Ok(Sectors(bytes / SECTOR_BYTES)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_suffixes() {
        for (text, bytes) in
            [("512", 512), ("4k", 4096), ("4K", 4096), ("1M", 1 << 20), ("2G", 2 << 30), ("0", 0)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        assert_eq!(parse("3T"), Ok(3 << 40));
        assert_eq!((parse_rate("10 MiB/s"), parse_rate("10M")), (Ok(10 << 20), Ok(10 << 20)));
        for (text, bytes) in [
            ("4KiB", 4096),
            ("4.0 KiB", 4096),
            ("1.5 GiB", 1536 << 20),
            ("512 B", 512),
            ("512B", 512),
            ("4 k", 4096),
            ("0.3k", 307),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for bad in [
            "",
            "k",
            "1.5",
            "1.5B",
            "1.k",
            ".5k",
            "-1",
            "+1",
            "4kk",
            "4kB",
            "4iB",
            "iB",
            "B",
            "0x10",
            "16777216T",
            "99999999999999999999",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sectors_are_whole() {
        assert_eq!(parse_sectors("4k"), Ok(Sectors(8)));
        assert!(parse_sectors("1000").unwrap_err().to_string().contains("found 1000"));
        assert!(parse_sectors("0").is_err());
    }
}
