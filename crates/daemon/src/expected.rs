//! What a parser expected and found, in words that an operator knows.
//!
//! Owns the table of these words. The parsers of the configuration, of the state file and of requests name types of the
//! programming language. Must not know what is parsed.

/// What parsers say, and the plain words.
const WORDS: &[(&str, &str)] = &[
    ("a borrowed string", "a text in quotes"),
    ("a string", "a text in quotes"),
    ("string ", ""),
    ("path string", "a path in quotes"),
    ("a boolean", "true or false"),
    ("boolean ", ""),
    ("a sequence", "a list"),
    ("sequence", "a list"),
    ("a map", "a section of names and values"),
    ("map", "a section"),
    ("integer ", ""),
    ("floating point ", ""),
    ("null", "nothing"),
    ("unit value", "nothing"),
    ("newtype struct", "a value"),
];
/// Types of numbers.
const NUMBERS: [&str; 8] = ["u8", "u16", "u32", "u64", "i32", "i64", "u128", "usize"];

/// One value or type in plain words.
fn word(text: &str) -> String {
    let text = text.trim();
    if NUMBERS.contains(&text) {
        return "a whole number of 0 or more".to_owned();
    }
    if text.starts_with("struct ") || text.starts_with("internally tagged enum") {
        return "a section of names and values".to_owned();
    }
    if let Some(value) = text.strip_prefix("enum ") {
        return format!("one of the words of {value}");
    }
    for (theirs, plain) in WORDS {
        match text.strip_prefix(theirs) {
            Some("") => return (*plain).to_owned(),
            Some(rest) if theirs.ends_with(' ') => return rest.trim_matches('`').to_owned(),
            _ => {}
        }
    }
    text.to_owned()
}

/// Splits a message of a parser into the expected and the found value. None if the message does not name both.
pub(crate) fn expected_and_found(message: &str) -> Option<(String, String)> {
    let rest = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "))?;
    let (found, expected) = rest.rsplit_once(", expected ")?;
    Some((word(expected), word(found)))
}

/// A message of a parser in plain words. The place behind it, such as ` at line 1 column 2`, stays.
pub(crate) fn plain_words(message: &str) -> String {
    let (message, place) = match message.rfind(" at line ") {
        Some(at) => message.split_at(at),
        None => (message, ""),
    };
    let text = if let Some((expected, found)) = expected_and_found(message) {
        format!("expected {expected}, found {found}")
    } else if let Some(rest) = message.strip_prefix("unknown field ") {
        format!("unknown key {rest}")
    } else if let Some((found, expected)) =
        message.strip_prefix("unknown variant ").and_then(|rest| rest.split_once(", "))
    {
        format!("{expected}, found {found}")
    } else if let Some(rest) = message.strip_prefix("missing field ") {
        format!("expected a key {rest}, found none")
    } else if message.starts_with("EOF while parsing") {
        "it ends too early".to_owned()
    } else {
        message.to_owned()
    };
    format!("{text}{place}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_the_language_are_not_named() {
        for (theirs, plain) in [
            ("invalid type: boolean `true`, expected a string", "expected a text in quotes, found true"),
            ("invalid value: integer `-5`, expected u64", "expected a whole number of 0 or more, found -5"),
            (
                "invalid type: string \"5m\", expected u64",
                "expected a whole number of 0 or more, found \"5m\"",
            ),
            ("invalid type: map, expected a sequence", "expected a list, found a section"),
            (
                "invalid type: integer `1`, expected struct Known at line 3 column 9",
                "expected a section of names and values, found 1 at line 3 column 9",
            ),
            ("unknown field `x`, expected `y` or `z`", "unknown key `x`, expected `y` or `z`"),
            ("unknown variant `x`, expected one of `y`, `z`", "expected one of `y`, `z`, found `x`"),
            (
                "missing field `uuid` at line 1 column 2",
                "expected a key `uuid`, found none at line 1 column 2",
            ),
            ("EOF while parsing a value at line 1 column 0", "it ends too early at line 1 column 0"),
        ] {
            assert_eq!(plain_words(theirs), plain);
        }
    }
}
