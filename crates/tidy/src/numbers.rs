//! The numbers that documents have: of headings, of the items of lists, and of the rows of tables.
//!
//! Owns the list of what is cited by a number, and the words that cite it. Must not know where citations are.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::Tree;

/// Documents whose sections are cited, by the word that cites them.
const DOCUMENTS: &[(&str, &str)] = &[("format", "docs/format.md"), ("semantics", "docs/semantics.md")];

/// The kind of the numbers of sections.
pub const HEADING: &str = "a heading";

/// Words that cite something by its number, with the document that has it and what it is there.
const CITED: &[(&[&str], &str, &str)] = &[
    (&["promise", "promises", "contract"], "docs/durability.md", "the promise"),
    (&["invariant", "invariants"], "docs/format.md", "the invariant"),
    (&["rule", "rules"], "docs/semantics.md", "the rule"),
    (&["item", "items", "defect", "defects"], "docs/compat.md", "the item"),
];

/// The numbers of each kind in each document, by its path and the kind.
pub struct Numbers(BTreeMap<(&'static str, &'static str), BTreeSet<String>>);

impl Numbers {
    /// The numbers of the documents that exist.
    pub fn of(tree: &Tree) -> Numbers {
        let headings = DOCUMENTS.iter().map(|(_, path)| (*path, HEADING));
        let others = CITED.iter().map(|(_, path, what)| (*path, *what));
        let read = |(path, what): (&'static str, &'static str)| {
            let text = tree.text(path)?;
            let numbers = match what {
                HEADING => headings_of(text),
                "the promise" => items(text),
                "the invariant" => rows(text, "number"),
                "the rule" => rows(text, "rule"),
                _ => rows(text, "#"),
            };
            Some(((path, what), numbers))
        };
        Numbers(headings.chain(others).filter_map(read).collect())
    }

    /// The document whose sections this word cites, and its path.
    pub fn document(&self, word: &str) -> Option<(&'static str, &'static str)> {
        DOCUMENTS.iter().find(|(name, _)| *name == word).copied()
    }

    /// The path, if it is that of a document whose sections are cited.
    pub fn is_document(&self, path: &str) -> Option<&'static str> {
        DOCUMENTS.iter().map(|(_, document)| *document).find(|document| *document == path)
    }

    /// What a number after this word cites: the path of the document, and what it is there.
    pub fn cited_by(&self, word: &str) -> Option<(&'static str, &'static str)> {
        CITED.iter().find(|(words, ..)| words.contains(&word)).map(|(_, path, what)| (*path, *what))
    }

    /// All numbers of a kind in a document; `None` if the document does not exist.
    pub fn all(&self, path: &'static str, what: &'static str) -> Option<&BTreeSet<String>> {
        self.0.get(&(path, what))
    }
}

/// The number `N`, `N.N` or `Na` in a word, without punctuation.
pub fn number(word: &str) -> Option<&str> {
    let word = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    let digits = word.strip_suffix(['a', 'b']).unwrap_or(word);
    let mut parts = digits.split('.');
    let is_number = |p: &str| !p.is_empty() && p.len() <= 2 && p.bytes().all(|b| b.is_ascii_digit());
    (parts.clone().count() <= 2 && parts.all(is_number)).then_some(word)
}

/// The numbers at the beginning of headings: `7.4` of `### 7.4 Placement`.
fn headings_of(text: &str) -> BTreeSet<String> {
    let titles = text.lines().filter_map(|l| l.strip_prefix('#')).map(|l| l.trim_start_matches('#').trim());
    titles.filter_map(|t| number(t.split_whitespace().next()?)).map(Into::into).collect()
}

/// The numbers of the list above the first section: `3` of `3. After a crash`.
fn items(text: &str) -> BTreeSet<String> {
    let lines = text.lines().take_while(|l| !l.starts_with("##"));
    let first = lines.filter_map(|l| l.split_whitespace().next().filter(|_| !l.starts_with(' ')));
    first.filter_map(|w| number(w.strip_suffix('.')?)).map(Into::into).collect()
}

/// The first cells of all tables whose first column has this title.
fn rows(text: &str, title: &str) -> BTreeSet<String> {
    let cell =
        |line: &str| line.strip_prefix('|').and_then(|l| l.split('|').next()).map(|c| c.trim().to_owned());
    let mut numbers = BTreeSet::new();
    let mut before: Option<String> = None;
    let mut is_wanted = false;
    for line in text.lines() {
        let first = cell(line);
        if before.is_none() {
            is_wanted = first.as_deref() == Some(title);
        } else if is_wanted {
            numbers.extend(first.as_deref().and_then(number).map(Into::into));
        }
        before = first;
    }
    numbers
}
