//! Parsers of written text, as the kernel parses numbers, flags and sizes.
//!
//! Owns the rules by which text is refused before the owner of a tunable gets it. They were observed on a real kernel; the
//! tests have the data. Must not know the ranges of tunables: the tunable itself limits numbers.

use format::{SECTOR_BYTES, Sectors};

use crate::owner::Errno;

/// Parses a decimal number, with an optional plus before it and at most one newline after it.
pub(crate) fn number(text: &str) -> Result<u64, Errno> {
    let text = text.strip_suffix('\n').unwrap_or(text);
    let digits = text.strip_prefix('+').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Errno::EINVAL);
    }
    digits.parse().map_err(|_| Errno::ERANGE)
}

/// Parses a size in bytes, with an optional suffix for powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, Errno> {
    let text = text.trim_end();
    let (digits, unit) = match text.char_indices().find(|(_, c)| !c.is_ascii_digit()) {
        Some((at, _)) => text.split_at(at),
        None => (text, ""),
    };
    let shift = match unit {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        "e" | "E" => 60,
        _ => return Err(Errno::EINVAL),
    };
    let value: u64 = digits.parse().map_err(|_| Errno::EINVAL)?;
    value.checked_mul(1 << shift).ok_or(Errno::EINVAL)
}

/// Parses a size and rounds it down to whole sectors.
pub(crate) fn sectors(text: &str) -> Result<Sectors, Errno> {
    Ok(Sectors(size(text)? / SECTOR_BYTES))
}

/// Parses one of the names, with at most one newline after it.
pub(crate) fn choice(text: &str, names: &[&str]) -> Result<String, Errno> {
    let word = text.strip_suffix('\n').unwrap_or(text);
    names.iter().find(|name| **name == word).map(|name| (*name).to_owned()).ok_or(Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_parsed_as_the_kernel_does() {
        assert_eq!(number("40\n"), Ok(40));
        assert_eq!(number("+5"), Ok(5));
        for bad in ["", "\n", "-1", "4M", "0x10", " 5", "5 ", "5\n\n", "+", "abc"] {
            assert_eq!(number(bad), Err(Errno::EINVAL), "{bad:?}");
        }
        assert_eq!(number("18446744073709551616"), Err(Errno::ERANGE));
    }

    #[test]
    fn sizes_are_parsed_as_the_kernel_does() {
        assert_eq!(size("16M\n"), Ok(16 << 20));
        assert_eq!(sectors("1k"), Ok(Sectors(2)));
        for bad in ["", "M", "1Q", "nonsense", "99999999999999999999", "17E"] {
            assert_eq!(size(bad), Err(Errno::EINVAL), "{bad:?}");
        }
    }

    #[test]
    fn choices_match_whole_words() {
        assert_eq!(choice("lru\n", &["lru", "fifo"]), Ok("lru".into()));
        for bad in ["LRU", " lru", "lru ", "lru\n\n", ""] {
            assert_eq!(choice(bad, &["lru", "fifo"]), Err(Errno::EINVAL), "{bad:?}");
        }
    }
}
