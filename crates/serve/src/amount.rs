//! Amounts of data in messages.
//!
//! Owns the form in which people read a number of bytes. Must not know what is counted.

/// Formats a number of bytes with one decimal and a unit.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = UNITS[0];
    for next in &UNITS[1..] {
        // From 1023.95 on, one decimal would be 1024.0.
        if value < 1023.95 {
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
    fn people_read_units() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (1536 << 20, "1.5 GiB")]
        {
            assert_eq!(human(bytes), text);
        }
        assert_eq!(human(u64::MAX), "16.0 EiB");
        assert_eq!(
            (human((1 << 30) - 8192), human((1023 << 20) + 900_000)),
            ("1.0 GiB".into(), "1023.9 MiB".into())
        );
    }
}
