//! Parsing of numbers in settings.
//!
//! Owns the syntax. A number too large for 64 bits becomes the largest one, because the caller clamps to a smaller
//! range anyway.

/// Parses a plain decimal number; `None` if the text is not one. One leading `+` is allowed, as in the kernel.
pub(super) fn decimal(text: &str) -> Option<u64> {
    let digits = text.strip_prefix('+').unwrap_or(text);
    all_digits(digits).then(|| saturating(digits))
}

/// Parses a number of bytes: plain decimal, or a number with at most one point and a suffix k, M, G or T for powers of
/// 1024, so that a value in the "h" format can be written back. The result is rounded down to bytes.
pub(super) fn bytes(text: &str) -> Option<u64> {
    let shift = match text.as_bytes().last()? {
        b'k' | b'K' => 10,
        b'm' | b'M' => 20,
        b'g' | b'G' => 30,
        b't' | b'T' => 40,
        _ => return decimal(text),
    };
    let number = &text[..text.len() - 1];
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
    use super::{bytes, decimal};

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
        for junk in ["", "k", "-1k", "4kk", "4 k", "1.k", ".5k", "1.5", "1.2.3k", "4MB", "é"] {
            assert_eq!(bytes(junk), None, "{junk:?}");
        }
    }
}
