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

/// Whether a character takes no place on a terminal, so that two texts look the same.
fn hides(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
    ) || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}')
        || matches!(c, '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
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

/// Whether a new label can be given: a word of letters, digits, `.`, `_`, `+`, `:`, `@`, `-` and blanks, whose first character
/// is a letter or a digit.
///
/// Such a label is no option, and a shell takes it as it is, but for blanks.
pub fn is_new_label(label: &str) -> bool {
    let is_letter = |c: char| c.is_alphanumeric() && !hides(c);
    let fits = |c: char| is_letter(c) || matches!(c, '.' | '_' | '+' | ':' | '@' | '-' | ' ');
    is_word(label) && label.starts_with(is_letter) && label.chars().all(fits)
}

/// Whether a label can be the name of a link: a word that is no option and looks like no other label.
pub fn is_link_name(label: &str) -> bool {
    is_word(label) && !label.starts_with('-') && !label.contains(hides)
}

/// A label as it is printed: unchanged if it could be given today or is empty, else in quotes and escaped.
pub fn label(label: &str) -> Cow<'_, str> {
    if label.is_empty() || is_new_label(label) {
        return Cow::Borrowed(label);
    }
    let mut shown = String::new();
    for c in escaped(label).chars() {
        match c {
            '"' => shown.push_str("\\\""),
            c if hides(c) => shown.extend(c.escape_unicode()),
            c => shown.push(c),
        }
    }
    Cow::Owned(format!("\"{shown}\""))
}

/// A volume, set or device as messages name it: its label if it has one, then its name, path or UUID.
pub fn named(of: &str, name: impl Display) -> String {
    if of.is_empty() { name.to_string() } else { format!("{}, {name}", label(of)) }
}

/// A message about a volume or set: its label first, unless the text begins with it.
pub fn about(of: &str, text: &str) -> String {
    let label = label(of);
    let rest = text.strip_prefix(&*label).unwrap_or("x");
    match label.is_empty() || rest.is_empty() || rest.starts_with([',', ':', ' ']) {
        true => text.to_owned(),
        false => format!("{label}: {text}"),
    }
}

/// What an operator types for a volume or set: its label if a shell takes that as one word, else its name or UUID.
pub fn typed<'a>(label: &'a str, name: &'a str) -> &'a str {
    if (is_new_label(label) || is_volume_name(label)) && !label.contains(' ') { label } else { name }
}

/// A word as an operator types it in a shell: in quotes if the shell would read it as something else.
pub fn in_shell(word: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_alphanumeric() || "/._+:@%=,-".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => Cow::Borrowed(word),
        false => Cow::Owned(format!("'{}'", word.replace('\'', "'\\''"))),
    }
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
        assert_eq!(about("fast", "scrub done"), "fast: scrub done");
        assert_eq!(about("fast", "fast, set s is served"), "fast, set s is served");
        assert_eq!(about("fast", "faster is better"), "fast: faster is better");
        assert_eq!(about("", "scrub done"), "scrub done");
        assert_eq!(
            [typed("data", "bcache0"), typed("my data", "bcache0"), typed("", "u")],
            ["data", "bcache0", "u"]
        );
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
            ("--force", "\"--force\""),
            ("$(id)", "\"$(id)\""),
            ("da\u{200b}ta", "\"da\\u{200b}ta\""),
        ] {
            assert_eq!(label(text), shown, "{text:?}");
        }
        for good in ["data", "my data", "films-2", "übung", "データ", "7", "a.b_c+d:e@f"] {
            assert!(is_new_label(good) && is_link_name(good), "{good:?}");
        }
        for bad in [
            "--force",
            "-x",
            "$(id)",
            "`id`",
            "a;b",
            "a&b",
            "a|b",
            "a*",
            "~",
            "a'b",
            "a#b",
            "a=b",
            "!x",
            "a\u{200b}",
            "\u{feff}a",
            "a\u{3164}",
            "\u{1f4be}",
            ".hidden",
            "a\tb",
            "a ",
            "a/b",
            "bcache0",
            "",
        ] {
            assert!(!is_new_label(bad), "{bad:?}");
        }
        // A label that a disk has stays a name.
        assert!(is_word("--force") && is_word("$(id)") && is_word("a\u{200b}") && is_link_name("a#b"));
        assert!(!is_link_name("--force") && !is_link_name("a\u{200b}"));
        assert!(is_volume_name("bcache17") && !is_volume_name("bcache") && !is_volume_name("bcache1x"));
    }
}
