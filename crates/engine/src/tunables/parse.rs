//! Parsing of numbers in settings.
//!
//! Owns the syntax. A number is typed in the unit of its setting, or with a unit, as the program prints it. A number too large
//! for 64 bits becomes the largest one, because the caller clamps to a smaller range anyway.

use format::SECTOR_BYTES;

use super::tunable::Unit;

/// Parses the number of a setting: a plain number in the unit of the setting, or a number with a unit of its kind. `None` if
/// the text is neither, or not a whole number of the setting's unit.
pub(super) fn number(text: &str, unit: Unit) -> Option<u64> {
    if let Some(plain) = decimal(text) {
        return Some(plain);
    }
    match unit {
        Unit::Bytes => text.strip_suffix("bytes").map_or_else(|| bytes(text), |n| decimal(n.trim_end())),
        Unit::BytesPerSecond => number(text.strip_suffix("/s").unwrap_or(text), Unit::Bytes),
        Unit::Sectors => {
            text.strip_suffix("sectors").and_then(|n| decimal(n.trim_end())).or_else(|| sectors(text))
        }
        Unit::SectorsPerSecond => {
            let amount = text.strip_suffix("/s")?;
            number(amount, Unit::Sectors)
        }
        Unit::Seconds => {
            in_units(text, &[("ms", 1, 1000), ("min", 60, 1), ("m", 60, 1), ("s", 1, 1), ("h", 3600, 1)])
        }
        Unit::Millis => in_units(text, &[("ms", 1, 1), ("min", 60_000, 1), ("m", 60_000, 1), ("s", 1000, 1)]),
        Unit::Micros => in_units(text, &[("us", 1, 1), ("µs", 1, 1), ("ms", 1000, 1), ("s", 1_000_000, 1)]),
        Unit::Percent => in_units(text, &[("%", 1, 1)]),
        Unit::Ios => in_units(text, &[("I/Os", 1, 1)]),
        Unit::None => None,
    }
}

/// Parses a number of bytes with a unit, as a number of sectors; kernels take no letter for sectors. An amount of bytes has
/// to be whole sectors. One of a larger unit is rounded down, because it is printed with one digit after the point.
fn sectors(text: &str) -> Option<u64> {
    let bytes = text.ends_with('B').then(|| bytes(text))??;
    (text.ends_with("iB") || bytes.is_multiple_of(SECTOR_BYTES)).then_some(bytes / SECTOR_BYTES)
}

/// Parses a number with one of these units, each with its factor and divisor.
fn in_units(text: &str, units: &[(&str, u64, u64)]) -> Option<u64> {
    let (digits, factor, divisor) =
        units.iter().find_map(|(unit, factor, divisor)| Some((text.strip_suffix(unit)?, factor, divisor)))?;
    let product = decimal(digits.trim_end())?.saturating_mul(*factor);
    product.is_multiple_of(*divisor).then_some(product / divisor)
}

/// Parses a plain decimal number; `None` if the text is not one. One leading `+` is allowed, as in the kernel.
pub(super) fn decimal(text: &str) -> Option<u64> {
    let digits = text.strip_prefix('+').unwrap_or(text);
    all_digits(digits).then(|| saturating(digits))
}

/// Parses a number of bytes: plain decimal, or a number with at most one point and a suffix k, M, G or T (also KiB, MiB,
/// GiB, TiB) for powers of 1024, so that a value that was printed can be written back. The result is rounded down to bytes.
pub fn bytes(text: &str) -> Option<u64> {
    let text = match (text.strip_suffix("iB"), text.strip_suffix('B')) {
        (Some(with_letter), _) if with_letter.ends_with(|c: char| c.is_ascii_alphabetic()) => with_letter,
        (None, Some(number)) => return decimal(number.trim_end()),
        _ => text,
    };
    let shift = match text.as_bytes().last()? {
        b'k' | b'K' => 10,
        b'm' | b'M' => 20,
        b'g' | b'G' => 30,
        b't' | b'T' => 40,
        _ => return decimal(text),
    };
    let number = text[..text.len() - 1].trim_end();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if !all_digits(whole) || !all_digits(fraction) {
        return None;
    }
    let total = (u128::from(saturating(whole)) << shift) + u128::from(binary(fraction, shift));
    Some(u64::try_from(total).unwrap_or(u64::MAX))
}

/// The first `bits` bits behind the binary point of `0.fraction`, exact for any number of digits: even the 16th digit
/// can change a byte.
fn binary(fraction: &str, bits: u32) -> u64 {
    let mut digits: Vec<u8> = fraction.bytes().map(|b| b - b'0').collect();
    let mut value = 0;
    for _ in 0..bits {
        let mut carry = 0;
        for digit in digits.iter_mut().rev() {
            let doubled = *digit * 2 + carry;
            (*digit, carry) = (doubled % 10, doubled / 10);
        }
        value = value * 2 + u64::from(carry);
    }
    value
}

fn all_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn saturating(digits: &str) -> u64 {
    digits.parse().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::tunable::Unit;
    use super::{bytes, decimal, number};

    /// A value could not be typed as it was printed: `10 s`, `4.0 MiB`, `2048 sectors/s`.
    #[test]
    fn a_printed_value_can_be_typed() {
        for (text, unit, value) in [
            ("10", Unit::Seconds, Some(10)),
            ("10s", Unit::Seconds, Some(10)),
            ("10 s", Unit::Seconds, Some(10)),
            ("2min", Unit::Seconds, Some(120)),
            ("1h", Unit::Seconds, Some(3600)),
            ("3000ms", Unit::Seconds, Some(3)),
            ("500ms", Unit::Seconds, None),
            ("500ms", Unit::Millis, Some(500)),
            ("2s", Unit::Millis, Some(2000)),
            ("2ms", Unit::Micros, Some(2000)),
            ("20000 us", Unit::Micros, Some(20_000)),
            ("10%", Unit::Percent, Some(10)),
            ("10 %", Unit::Percent, Some(10)),
            ("88 I/Os", Unit::Ios, Some(88)),
            ("4MiB", Unit::Bytes, Some(4 << 20)),
            ("4.0 MiB", Unit::Bytes, Some(4 << 20)),
            ("512KiB", Unit::Bytes, Some(512 << 10)),
            ("512 B", Unit::Bytes, Some(512)),
            ("4194304 bytes", Unit::Bytes, Some(4 << 20)),
            ("4194304bytes", Unit::Bytes, Some(4 << 20)),
            ("1.5 bytes", Unit::Bytes, None),
            ("10 MiB/s", Unit::BytesPerSecond, Some(10 << 20)),
            ("10M", Unit::BytesPerSecond, Some(10 << 20)),
            ("512 bytes/s", Unit::BytesPerSecond, Some(512)),
            ("10 MiB/s", Unit::Bytes, None),
            ("8 sectors", Unit::Sectors, Some(8)),
            ("4.3 MiB", Unit::Sectors, Some(8806)),
            ("4KiB", Unit::Sectors, Some(8)),
            ("513B", Unit::Sectors, None),
            ("1MiB/s", Unit::SectorsPerSecond, Some(2048)),
            ("2048 sectors/s", Unit::SectorsPerSecond, Some(2048)),
            ("4k", Unit::SectorsPerSecond, None),
            ("4k", Unit::Sectors, None),
            ("5s", Unit::None, None),
            ("5s", Unit::Bytes, None),
            ("4MiB", Unit::Seconds, None),
            ("s", Unit::Seconds, None),
            ("99999999999999999999h", Unit::Seconds, Some(u64::MAX)),
        ] {
            assert_eq!(number(text, unit), value, "{text} as {unit:?}");
        }
    }

    #[test]
    fn decimals_are_plain() {
        for (text, value) in
            [("0", Some(0)), ("+7", Some(7)), ("007", Some(7)), ("18446744073709551616", Some(u64::MAX))]
        {
            assert_eq!(decimal(text), value, "{text}");
        }
        for junk in ["", "+", "-1", "4k", "0x10", "1.5", "1 2", "++1", "٣"] {
            assert_eq!(decimal(junk), None, "{junk:?}");
        }
    }

    #[test]
    fn bytes_take_suffixes() {
        for (text, value) in [
            ("0", 0),
            ("512", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4M", 4 << 20),
            ("2g", 2 << 30),
            ("1T", 1 << 40),
            ("4.0M", 4 << 20),
            ("0.5k", 512),
            ("0.9M", 943_718),
            ("1.00000000000000000000000000001k", 1024),
            ("0.0000000000009094947017729282379150390625T", 1),
            ("0.0000000000009094947017729282379150390624T", 0),
            ("0.99999999999999999999T", (1 << 40) - 1),
            ("99999999999999999999T", u64::MAX),
            ("16777216T", u64::MAX),
        ] {
            assert_eq!(bytes(text), Some(value), "{text}");
        }
        for junk in ["", "k", "-1k", "4kk", "1.k", ".5k", "1.5", "1.2.3k", "4MB", "iB", "4iB", "1.5B", "é"] {
            assert_eq!(bytes(junk), None, "{junk:?}");
        }
    }
}
