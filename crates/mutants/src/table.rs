//! The table of mutants: the change and the place of each.
//!
//! Owns the identity of a mutant. Invariant: the key of a mutant has no line number, so lists and samples of mutants stay valid
//! when code moves. Must not know how code is rewritten.

use serde::{Deserialize, Serialize};

/// One change of the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mutant {
    /// The value of `UBCACHE_MUTANT` that switches it on.
    pub number: u32,
    /// Path of the file below the engine's `src`.
    pub file: String,
    /// First line of the changed code in the engine's source.
    pub line: usize,
    /// File, function and change.
    pub key: String,
}

impl Mutant {
    /// The part of the engine that has the mutant: a module of the crate.
    pub fn part(&self) -> &str {
        let first = self.file.split('/').next().unwrap_or(&self.file);
        first.strip_suffix(".rs").unwrap_or(first)
    }

    /// The mutant with its line, for reports.
    pub fn describe(&self) -> String {
        let rest = self.key.strip_prefix(&self.file).unwrap_or(&self.key);
        format!("{}:{}{rest}", self.file, self.line)
    }
}

/// The text is no share.
#[derive(Debug, thiserror::Error)]
#[error("{text}: expected K/N with K from 1 to N, for example 1/10")]
pub struct ShareError {
    text: String,
}

/// The part `index` of `parts` equal parts of all mutants, selected by a hash of their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    index: u64,
    parts: u64,
}

impl Share {
    /// Every mutant.
    pub const ALL: Share = Share { index: 1, parts: 1 };

    /// Parses `K/N`.
    pub fn parse(text: &str) -> Result<Share, ShareError> {
        let wrong = || ShareError { text: text.to_owned() };
        let (index, parts) = text.split_once('/').ok_or_else(wrong)?;
        let share =
            Share { index: index.parse().map_err(|_| wrong())?, parts: parts.parse().map_err(|_| wrong())? };
        if share.index == 0 || share.index > share.parts { Err(wrong()) } else { Ok(share) }
    }

    /// Whether the mutant with this key is in the share.
    pub fn has(self, key: &str) -> bool {
        hash(key.as_bytes()) % self.parts == self.index - 1
    }
}

/// FNV-1a with a final step that spreads the hash over all bits. The result does not depend on the compiler's version.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut h = 0xcbf2_9ce4_8422_2325_u64;
    for b in bytes {
        h = (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
    }
    h = (h ^ (h >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    h ^ (h >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_part_the_mutants() {
        let shares: Vec<Share> = (1..=4).map(|k| Share::parse(&format!("{k}/4")).unwrap()).collect();
        let mut sizes = [0; 4];
        for n in 0..4000 {
            let key = format!("journal/ring.rs Ring::take: mutant {n}");
            let of: Vec<usize> = (0..4).filter(|i| shares[*i].has(&key)).collect();
            assert_eq!(of.len(), 1, "{key}");
            sizes[of[0]] += 1;
        }
        assert!(sizes.iter().all(|n| (850..1150).contains(n)), "{sizes:?}");
        assert!(Share::ALL.has("anything"));
    }

    #[test]
    fn wrong_shares_are_refused() {
        for text in ["", "1", "0/4", "5/4", "1/0", "a/b", "1/4/2"] {
            assert!(Share::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_description_has_the_line() {
        let m = Mutant {
            number: 1,
            file: "gc/mod.rs".into(),
            line: 7,
            key: "gc/mod.rs walk: delete `x.y();`".into(),
        };
        assert_eq!(m.part(), "gc");
        assert_eq!(m.describe(), "gc/mod.rs:7 walk: delete `x.y();`");
    }
}
