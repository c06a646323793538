//! Escapes foreign text for output: labels, and error texts with labels in them.
//!
//! Owns the list of characters that a terminal or a log interprets, and their escapes. A label comes from a disk of any
//! origin: it must neither end a line nor look like a path or a name of a volume. Must not know what is printed.

use std::borrow::Cow;
use std::fmt::Display;

/// Whether a terminal or a log interprets a character instead of showing it.
fn is_interpreted(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text in which every character that a terminal or a log interprets is an escape, such as `\u{1b}`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_interpreted) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::new();
    for c in text.chars() {
        match c {
            '\n' => safe.push_str("\\n"),
            c if is_interpreted(c) => safe.extend(c.escape_unicode()),
            c => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

/// JSON text in which these characters are JSON escapes; line ends between values stay.
pub fn escaped_json(json: &str) -> Cow<'_, str> {
    let is_interpreted = |c: char| c != '\n' && is_interpreted(c);
    if !json.contains(is_interpreted) {
        return Cow::Borrowed(json);
    }
    let mut safe = String::new();
    for c in json.chars() {
        // Each of these characters is one UTF-16 unit.
        if is_interpreted(c) { safe.push_str(&format!("\\u{:04x}", u32::from(c))) } else { safe.push(c) }
    }
    Cow::Owned(safe)
}

/// Whether a label can be used as a name: a word that is no path, no UUID and no name of a volume.
pub fn is_word(label: &str) -> bool {
    let seen =
        !is_uuid(label) && !label.is_empty() && !label.chars().any(is_interpreted) && label.trim() == label;
    seen && !label.contains(['/', '"', '\\']) && !matches!(label, "." | "..") && !is_volume_name(label)
}

/// A label as it is printed: unchanged if it is a word or empty, else in quotes and escaped.
pub fn label(label: &str) -> Cow<'_, str> {
    if label.is_empty() || is_word(label) {
        return Cow::Borrowed(label);
    }
    Cow::Owned(format!("\"{}\"", escaped(label).replace('"', "\\\"")))
}

/// A volume, set or device as messages name it: its label if it has one, then its name, path or UUID.
pub fn named(of: &str, name: impl Display) -> String {
    if of.is_empty() { name.to_string() } else { format!("{}, {name}", label(of)) }
}

/// Whether a text has the form of a UUID.
pub fn is_uuid(text: &str) -> bool {
    let lengths = text.split('-').map(str::len);
    lengths.eq([8, 4, 4, 4, 12]) && text.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
}

/// Whether this is a name as volumes get it: `bcache` and a number.
pub fn is_volume_name(text: &str) -> bool {
    let number = text.strip_prefix("bcache").unwrap_or_default();
    !number.is_empty() && number.len() <= 10 && number.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_acts_upon_a_terminal() {
        assert_eq!(escaped("plain ä"), "plain ä");
        assert_eq!(
            escaped("a\nb\u{1b}[2J\u{9b}c\u{202e}d\u{7f}"),
            "a\\nb\\u{1b}[2J\\u{9b}c\\u{202e}d\\u{7f}"
        );
        assert_eq!(escaped_json("{\n \"a\": \"\u{9b}\u{202e}\"\n}"), "{\n \"a\": \"\\u009b\\u202e\"\n}");
    }

    #[test]
    fn labels_come_first() {
        assert_eq!(named("", "bcache0"), "bcache0");
        assert_eq!(named("data", "bcache0"), "data, bcache0");
        assert_eq!(named("/dev/sda", "bcache0"), "\"/dev/sda\", bcache0");
    }

    #[test]
    fn labels_do_not_look_like_what_they_are_not() {
        for (text, shown) in [
            ("data", "data"),
            ("my data", "my data"),
            ("", ""),
            ("/dev/sda", "\"/dev/sda\""),
            ("bcache0", "\"bcache0\""),
            ("..", "\"..\""),
            (" x", "\" x\""),
            ("a\"b", "\"a\\\"b\""),
            ("x\nerror: y", "\"x\\nerror: y\""),
        ] {
            assert_eq!(label(text), shown, "{text:?}");
        }
        assert!(is_volume_name("bcache17") && !is_volume_name("bcache") && !is_volume_name("bcache1x"));
    }
}
