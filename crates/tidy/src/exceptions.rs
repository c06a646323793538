//! The violations that are allowed at present, as counts that only go down.
//!
//! Owns the format of `exceptions.toml`. Each group has a rule, a reason and counts. The key of a count is a path, or a
//! path and an item with a space between them; a count with an item takes the violations of that item. The number is the
//! weight of all violations under the key. More violations fail, because the code got worse. Fewer fail too, so that the
//! number is lowered.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;

use crate::violation::Violation;

/// The reason for which the text is no list of exceptions.
#[derive(Debug, thiserror::Error)]
pub enum ExceptionsError {
    /// The text is not TOML of this form.
    #[error(transparent)]
    Toml(#[from] Box<toml::de::Error>),
    /// A group has no reason.
    #[error("{rule}: expected a reason, found none")]
    NoReason {
        /// The rule of the group.
        rule: String,
    },
    /// Two groups of a rule have the same key.
    #[error("{rule}: expected {key} once, found it in two groups")]
    Twice {
        /// The rule of the groups.
        rule: String,
        /// The key.
        key: String,
    },
}

/// All groups, and the comment at the beginning of the file.
#[derive(Debug)]
pub struct Exceptions {
    head: String,
    groups: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    allowed: Vec<Group>,
}

/// Exceptions from one rule for one reason.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct Group {
    rule: String,
    reason: String,
    #[serde(default)]
    counts: BTreeMap<String, usize>,
}

/// A rule and the key of a count.
type Key = (String, String);

/// The differences between the violations and the exceptions.
pub struct Problems {
    /// Violations under keys with more violations than allowed.
    pub more: Vec<Violation>,
    /// Counts with fewer violations than allowed.
    pub stale: Vec<Stale>,
}

/// A count that has to be lowered.
#[derive(PartialEq, Eq, Debug)]
pub struct Stale {
    rule: String,
    key: String,
    allowed: usize,
    found: usize,
}

impl Stale {
    /// The line of text that names the count and the next step.
    pub fn describe(&self) -> String {
        let Stale { rule, key, allowed, found } = self;
        format!(
            "{rule}: {key}: {allowed} allowed, {found} found: lower the number in exceptions (ubcache-tidy --update)"
        )
    }
}

impl Exceptions {
    /// Parses the text of the file.
    pub fn parse(text: &str) -> Result<Exceptions, ExceptionsError> {
        let head: String =
            text.lines().take_while(|l| l.starts_with('#')).fold(String::new(), |h, l| h + l + "\n");
        let file: File = toml::from_str(text).map_err(Box::new)?;
        let mut keys = BTreeMap::new();
        for group in &file.allowed {
            if group.reason.trim().is_empty() {
                return Err(ExceptionsError::NoReason { rule: group.rule.clone() });
            }
            for key in group.counts.keys() {
                if keys.insert((group.rule.clone(), key.clone()), ()).is_some() {
                    let (rule, key) = (group.rule.clone(), key.clone());
                    return Err(ExceptionsError::Twice { rule, key });
                }
            }
        }
        Ok(Exceptions { head, groups: file.allowed })
    }

    /// The text of the file: groups in their order, counts sorted; counts of zero and empty groups are left out.
    pub fn render(&self) -> String {
        let mut text = self.head.clone();
        for group in &self.groups {
            if group.counts.values().all(|n| *n == 0) {
                continue;
            }
            let _ = writeln!(text, "\n[[allowed]]\nrule = {}", quoted(&group.rule));
            let _ = writeln!(text, "reason = {}\n[allowed.counts]", quoted(&group.reason));
            for (key, number) in group.counts.iter().filter(|(_, n)| **n > 0) {
                let _ = writeln!(text, "{} = {number}", quoted(key));
            }
        }
        text
    }

    /// The violations that are not allowed, and the counts that are too high.
    pub fn compare(&self, violations: &[Violation]) -> Problems {
        let found = self.sums(violations);
        let number = |key: &Key| found.get(key).copied().unwrap_or(0);
        let too_many = |v: &&Violation| {
            let key = self.key(v);
            number(&key) > self.allowed(&key.0, &key.1).unwrap_or(0)
        };
        let counts =
            self.groups.iter().flat_map(|g| g.counts.iter().map(|(k, n)| (g.rule.clone(), k.clone(), *n)));
        let stale = counts.filter_map(|(rule, key, allowed)| {
            let found = number(&(rule.clone(), key.clone()));
            (found < allowed).then_some(Stale { rule, key, allowed, found })
        });
        Problems { more: violations.iter().filter(too_many).cloned().collect(), stale: stale.collect() }
    }

    /// Lowers counts to the number of violations found. Returns whether one changed.
    pub fn lower(&mut self, violations: &[Violation]) -> bool {
        let stale = self.compare(violations).stale;
        for s in &stale {
            for group in self.groups.iter_mut().filter(|g| g.rule == s.rule) {
                group.counts.entry(s.key.clone()).and_modify(|n| *n = (*n).min(s.found));
            }
        }
        self.groups.iter_mut().for_each(|g| g.counts.retain(|_, n| *n > 0));
        !stale.is_empty()
    }

    fn allowed(&self, rule: &str, key: &str) -> Option<usize> {
        self.groups.iter().filter(|g| g.rule == rule).find_map(|g| g.counts.get(key)).copied()
    }

    /// The key under which a violation counts: that of its item, if there is a count for it.
    fn key(&self, v: &Violation) -> Key {
        let of_item = format!("{} {}", v.path, v.item);
        let key = match self.allowed(v.rule, &of_item) {
            Some(_) => of_item,
            None => v.path.clone(),
        };
        (v.rule.into(), key)
    }

    fn sums(&self, violations: &[Violation]) -> BTreeMap<Key, usize> {
        let mut sums = BTreeMap::new();
        for v in violations {
            *sums.entry(self.key(v)).or_default() += v.weight;
        }
        sums
    }
}

/// The line of a count in the text of the file.
pub fn line_of(text: &str, stale: &Stale) -> usize {
    let rule = format!("rule = {}", quoted(&stale.rule));
    let key = format!("{} = ", quoted(&stale.key));
    let mut in_rule = false;
    for (n, line) in text.lines().enumerate() {
        if line.starts_with("rule = ") {
            in_rule = line == rule;
        }
        if in_rule && line.starts_with(&key) {
            return n + 1;
        }
    }
    1
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Comment.\n\n[[allowed]]\nrule = \"impls\"\nreason = \"A \\\"reason\\\".\"\n[allowed.counts]\n\
                        \"a.rs\" = 3\n\"a.rs Core\" = 2\n";

    fn violations(weights: &[(&str, usize)]) -> Vec<Violation> {
        let one =
            |(item, n): &(&str, usize)| Violation::new("impls", "a.rs", 7, "x".into()).of(item).weighing(*n);
        weights.iter().map(one).collect()
    }

    fn compare(weights: &[(&str, usize)]) -> (usize, Vec<String>) {
        let problems = Exceptions::parse(TEXT).unwrap().compare(&violations(weights));
        (problems.more.len(), problems.stale.iter().map(Stale::describe).collect())
    }

    #[test]
    fn the_allowed_number_passes() {
        assert_eq!(compare(&[("Core", 2), ("A", 1), ("B", 2)]), (0, vec![]));
    }

    #[test]
    fn a_higher_number_fails_with_all_violations_of_the_key() {
        assert_eq!(compare(&[("Core", 2), ("A", 2), ("B", 2)]), (2, vec![]));
        assert_eq!(compare(&[("Core", 3), ("A", 3)]), (1, vec![]));
        let other = Violation::new("sizes.file", "a.rs", 1, "x".into());
        assert_eq!(Exceptions::parse("").unwrap().compare(&[other]).more.len(), 1);
    }

    #[test]
    fn a_lower_number_fails_with_what_to_do() {
        let (more, stale) = compare(&[("Core", 2), ("A", 1)]);
        let message =
            "impls: a.rs: 3 allowed, 1 found: lower the number in exceptions (ubcache-tidy --update)";
        assert_eq!((more, stale), (0, vec![message.to_string()]));
    }

    #[test]
    fn an_update_lowers_numbers_and_raises_none() {
        let mut exceptions = Exceptions::parse(TEXT).unwrap();
        assert!(exceptions.lower(&violations(&[("Core", 9), ("A", 1)])));
        assert_eq!(exceptions.render(), TEXT.replace("\"a.rs\" = 3", "\"a.rs\" = 1"));
        assert!(exceptions.lower(&[]));
        assert_eq!(exceptions.render(), "# Comment.\n");
    }

    #[test]
    fn a_text_that_is_not_changed_stays_as_it_is() {
        let exceptions = Exceptions::parse(TEXT).unwrap();
        assert_eq!(exceptions.render(), TEXT);
        let stale = Stale { rule: "impls".into(), key: "a.rs Core".into(), allowed: 2, found: 1 };
        assert_eq!(line_of(TEXT, &stale), 8);
    }

    #[test]
    fn a_group_without_a_reason_is_refused() {
        let error = Exceptions::parse(&TEXT.replace("A \\\"reason\\\".", " ")).unwrap_err();
        assert_eq!(error.to_string(), "impls: expected a reason, found none");
        let twice = Exceptions::parse(&format!("{TEXT}{}", &TEXT[10..])).unwrap_err();
        assert!(matches!(twice, ExceptionsError::Twice { .. }), "{twice}");
    }
}
