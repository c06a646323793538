//! The settings of `set`, as they are typed or pasted.
//!
//! Owns their syntax. Must not know which tunables there are.

/// The settings of a command line, where `KEY = VALUE` may be three words.
pub(super) fn joined(words: &[String]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        match (word.as_str(), words.peek(), all.last_mut()) {
            ("=", Some(_), Some(key)) if !key.contains('=') => {
                let value = words.next().map_or("", String::as_str);
                *key = format!("{key} = {value}");
            }
            _ => all.push(word.clone()),
        }
    }
    all
}

/// A tunable and its value. A line that `get` has printed has blanks around `=`, and may have notes behind the value.
pub(super) fn split(text: &str) -> Option<(&str, &str)> {
    let (key, value) = text.split_once('=').filter(|(key, _)| !key.trim().is_empty())?;
    if !key.ends_with(' ') && !value.starts_with(' ') {
        return Some((key, value));
    }
    let (key, value) = (key.trim(), value.trim());
    let end = match key {
        "label" => None,
        _ => [" (default ", " (not limited)"].iter().filter_map(|note| value.find(note)).min(),
    };
    Some((key, end.and_then(|end| value.get(..end)).unwrap_or(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line that `get` printed is accepted as a setting, blanks included.
    #[test]
    fn a_line_of_get_is_a_setting() {
        let words = |words: &[&str]| joined(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        for (given, expected) in [
            (&["label = data"][..], ("label", "data")),
            (&["label= two words "], ("label", "two words")),
            (&["label=two words "], ("label", "two words ")),
            (&["writeback_percent", "=", "20"], ("writeback_percent", "20")),
            (&["writeback_delay = 10 s (default 30)"], ("writeback_delay", "10 s")),
            (
                &["writeback_rate = 2147483647 sectors/s (not limited)"],
                ("writeback_rate", "2147483647 sectors/s"),
            ),
            (&["writeback_percent=20"], ("writeback_percent", "20")),
        ] {
            let given = words(given);
            assert_eq!(given.len(), 1);
            assert_eq!(split(&given[0]), Some(expected));
        }
        assert_eq!(words(&["a", "=", "1", "b=2"]), ["a = 1", "b=2"]);
        assert_eq!(words(&["a=1", "="]), ["a=1", "="]);
        assert_eq!(["writeback_percent", "=3", " = 3"].map(split), [None; 3]);
    }
}
