//! Sizes as people write and read them.
//!
//! Owns the syntax of sizes. Must not know their use.

use format::{SECTOR_BYTES, Sectors};

/// Reads a size in bytes: a number with an optional suffix k, M, G or T for powers of 1024.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        Some(b't' | b'T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err("expected a number with an optional suffix k, M, G or T, such as 512k".into());
    }
    let too_large = || "expected at most 16 EiB".to_owned();
    let number: u64 = digits.parse().map_err(|_| too_large())?;
    number.checked_mul(1 << shift).ok_or_else(too_large)
}

/// Reads a size that is a whole number of sectors and not zero.
pub(crate) fn parse_sectors(text: &str) -> Result<Sectors, String> {
    match parse(text)? {
        0 => Err("expected more than 0 bytes".into()),
        bytes if bytes % SECTOR_BYTES != 0 => {
            Err(format!("expected a multiple of {SECTOR_BYTES} bytes, found {bytes}"))
        }
        bytes => Ok(Sectors(bytes / SECTOR_BYTES)),
    }
}

/// Formats a number of bytes with one decimal and a unit.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes() {
        for (text, bytes) in
            [("512", 512), ("4k", 4096), ("4K", 4096), ("1M", 1 << 20), ("2G", 2 << 30), ("0", 0)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        assert_eq!(parse("3T"), Ok(3 << 40));
        for bad in ["", "k", "1.5k", "-1", "+1", "4kk", "4 k", "0x10", "16777216T", "99999999999999999999"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sectors_are_whole() {
        assert_eq!(parse_sectors("4k"), Ok(Sectors(8)));
        assert!(parse_sectors("1000").unwrap_err().contains("found 1000"));
        assert!(parse_sectors("0").is_err());
    }

    #[test]
    fn people_read_units() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (1536 << 20, "1.5 GiB")]
        {
            assert_eq!(human(bytes), text);
        }
        assert_eq!(human(u64::MAX), "16.0 EiB");
    }
}
