//! Human-readable sizes: the kernel's "h" format (semantics section 16).
//!
//! Owns the format in which control files show bytes: one decimal, truncated and not rounded, powers of 1024, and at
//! most three digits before the point, so that 1000k is shown as `0.9M`. The smallest unit is k: 512 bytes are `0.5k`.

use std::fmt;

/// Letters for the powers of 1024; 64 bits end in E.
const UNITS: [char; 6] = ['k', 'M', 'G', 'T', 'P', 'E'];

/// A number of bytes whose `Display` is the "h" format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Human(pub i64);

impl Human {
    /// `bytes`, saturated.
    pub fn bytes(bytes: u64) -> Human {
        Human(i64::try_from(bytes).unwrap_or(i64::MAX))
    }
}

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut whole = self.0.unsigned_abs();
        let mut rest = 0;
        let mut unit = UNITS[0];
        for letter in UNITS {
            unit = letter;
            rest = whole % 1024;
            whole /= 1024;
            if whole < 1000 {
                break;
            }
        }
        let sign = if self.0 < 0 { "-" } else { "" };
        write!(f, "{sign}{whole}.{}{unit}", rest * 10 / 1024)
    }
}

#[cfg(test)]
mod tests {
    use super::Human;

    #[test]
    fn sizes_are_shown_as_the_kernel_shows_them() {
        for (bytes, text) in [
            (0, "0.0k"),
            (51, "0.0k"),
            (103, "0.1k"),
            (512, "0.5k"),
            (1023, "0.9k"),
            (1024, "1.0k"),
            (1 << 19, "512.0k"),
            (999 << 10, "999.0k"),
            ((1000 << 10) - 1, "999.9k"),
            (1000 << 10, "0.9M"),
            (4 << 20, "4.0M"),
            (4 << 20 | 600 << 10, "4.5M"),
            (1 << 30, "1.0G"),
            (3 << 40, "3.0T"),
            (3 << 50, "3.0P"),
            (1 << 60, "1.0E"),
            (i64::MAX, "7.9E"),
            (i64::MIN, "-8.0E"),
            (-512, "-0.5k"),
            (-(4 << 20), "-4.0M"),
        ] {
            assert_eq!(Human(bytes).to_string(), text, "{bytes}");
        }
        assert_eq!(Human::bytes(u64::MAX).to_string(), "7.9E");
    }
}
