//! Counts in messages of all crates: a number with its noun, and the verb that follows.
//!
//! Owns the plural of the nouns that messages count. Must not know what is counted.

use std::fmt::Display;

/// A number with its noun, such as `1 block` or `2 blocks`.
pub fn counted(n: impl Display, noun: &str) -> String {
    let n = n.to_string();
    if n == "1" {
        return format!("1 {noun}");
    }
    let vowel = |c: char| "aeiou".contains(c);
    match noun.strip_suffix('y').filter(|stem| !stem.ends_with(vowel)) {
        Some(stem) => format!("{n} {stem}ies"),
        None if noun.ends_with("ch") || noun.ends_with("sh") || noun.ends_with(['s', 'x']) => {
            format!("{n} {noun}es")
        }
        None => format!("{n} {noun}s"),
    }
}

/// The form of a word that agrees with a count: `form(n, "is", "are")`.
pub fn form(n: u64, one: &'static str, several: &'static str) -> &'static str {
    if n == 1 { one } else { several }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_noun_agrees_with_its_number() {
        for (n, noun, text) in [
            (0, "block", "0 blocks"),
            (1, "block", "1 block"),
            (2, "dirty block", "2 dirty blocks"),
            (1, "entry", "1 entry"),
            (3, "entry", "3 entries"),
            (2, "day", "2 days"),
            (2, "batch", "2 batches"),
        ] {
            assert_eq!(counted(n, noun), text);
        }
        assert_eq!((form(1, "is", "are"), form(0, "is", "are")), ("is", "are"));
    }
}
