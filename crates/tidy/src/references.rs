//! References resolve: cited sections, numbered rules, decisions, files in `docs/` and Rust files exist, and so do link targets.
//!
//! Owns the check. It reads a text as words, so a citation may lie on two lines of a comment. `numbers` knows which numbers
//! the documents have.

use std::collections::BTreeSet;

use crate::numbers::{HEADING, Numbers, number};
use crate::source::{SourceFile, Tree};
use crate::violation::Violation;

/// A word of a file with its line; comment markers are left out.
type Word<'a> = (usize, &'a str);

/// Citations that do not resolve.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let numbers = Numbers::of(tree);
    let names: BTreeSet<&str> = tree.known.iter().filter_map(|p| p.rsplit('/').next()).collect();
    let mut found = Vec::new();
    for file in tree.prose() {
        let words = words(&file.text);
        let citations = Citations { file, words: &words, numbers: &numbers };
        found.extend((0..words.len()).flat_map(|at| citations.at(at)));
        for (at, (_, word)) in words.iter().enumerate() {
            if ["decision", "decisions"].contains(&&*plain(word).to_lowercase()) {
                found.extend(decision(tree, file, &words[at + 1..]));
            }
        }
        found.extend(words.iter().flat_map(|(line, word)| documents(tree, file, *line, word)));
        found.extend(words.iter().filter_map(|(line, word)| unknown_name(&names, file, *line, word)));
        if file.path.ends_with(".md") {
            found.extend(links(tree, file));
            found.extend(words.iter().filter_map(|(line, word)| unknown_source(tree, file, *line, word)));
        }
    }
    found
}

/// A word without the punctuation around it.
fn plain(word: &str) -> &str {
    word.trim_matches(|c: char| !c.is_alphanumeric())
}

/// The name of a document in a word, in lower case: `format` of `format`, `docs/format.md`, and `[format.md](../format.md),`.
fn document(word: &str) -> String {
    let word = plain(word).to_lowercase();
    let name = word.strip_suffix(".md").and_then(|path| path.rsplit(['/', '(']).next());
    name.map_or_else(|| word.clone(), Into::into)
}

fn words(text: &str) -> Vec<Word<'_>> {
    let markers = ["//!", "///", "//", "#", "*"];
    let content = |line: &'_ str| {
        let line = line.trim_start();
        markers.iter().find_map(|m| line.strip_prefix(m)).map_or(0, |rest| line.len() - rest.len())
    };
    let lines = text.lines().enumerate();
    lines
        .flat_map(|(n, l)| l.trim_start()[content(l)..].split_whitespace().map(move |w| (n + 1, w)))
        .collect()
}

/// The list of numbers at the beginning of the words: `3.1, 4 and 5`.
fn list<'a>(words: &[Word<'a>], number: impl Fn(&'a str) -> Option<&'a str>) -> Vec<Word<'a>> {
    let mut numbers = Vec::new();
    let mut words = words.iter().peekable();
    while let Some((line, word)) = words.next() {
        let Some(n) = number(word).filter(|n| word.trim_start_matches('(').starts_with(n)) else { break };
        numbers.push((*line, n));
        let more = words.next_if(|(_, w)| ["and", "to", "or"].contains(w)).is_some();
        // A comma after a parenthesis ends the list: `(section 3), 4 requests`.
        if !more && (!word.ends_with(',') || word.ends_with("),")) {
            break;
        }
    }
    numbers
}

/// The words of a file, and the numbers that they may cite.
struct Citations<'a> {
    file: &'a SourceFile,
    words: &'a [Word<'a>],
    numbers: &'a Numbers,
}

impl Citations<'_> {
    /// The violations of the citation whose first word is at this place.
    fn at(&self, at: usize) -> Vec<Violation> {
        let word = plain(self.words[at].1).to_lowercase();
        let before = at.checked_sub(1).map(|before| document(self.words[before].1)).unwrap_or_default();
        let after = &self.words[at + 1..];
        let next = after.first().map(|(_, w)| plain(w).to_lowercase()).unwrap_or_default();
        let is_section = ["section", "sections"].contains(&&*next);
        let cited = document(self.words[at].1);
        if let Some((document, path)) = self.numbers.document(&cited) {
            // After `semantics` a number alone is a citation.
            if is_section || document == "semantics" {
                return self.missing(path, HEADING, &after[usize::from(is_section)..]);
            }
        }
        // A document cites its own sections without its name.
        if ["section", "sections"].contains(&&*word) && self.numbers.document(&before).is_none() {
            let own = self.numbers.is_document(&self.file.path);
            return own.map_or_else(Vec::new, |path| self.missing(path, HEADING, after));
        }
        match self.numbers.cited_by(&word) {
            // `contract rule 3` is a rule of the contract.
            Some(_) if ["rule", "rules"].contains(&&*word) && before == "contract" => Vec::new(),
            Some((path, what)) => {
                let named = word == "contract" && ["rule", "rules"].contains(&&*next);
                self.missing(path, what, &after[usize::from(named)..])
            }
            None => Vec::new(),
        }
    }

    /// The numbers at the beginning of the words that the document does not have as `what`.
    fn missing(&self, path: &'static str, what: &'static str, words: &[Word]) -> Vec<Violation> {
        // A document that does not exist has no numbers to compare with.
        let Some(numbers) = self.numbers.all(path, what) else { return Vec::new() };
        let missing = list(words, number).into_iter().filter(|(_, n)| !numbers.contains(*n));
        let rule = if what == HEADING { "references.section" } else { "references.number" };
        let violation = |(line, n)| {
            let message = format!("expected {what} {n} in {path}, found none");
            Violation::new(rule, &self.file.path, line, message)
        };
        missing.map(violation).collect()
    }
}

/// Whether a decision with this number exists.
fn is_decision(tree: &Tree, number: &str) -> bool {
    let from = format!("docs/decisions/{number}-");
    tree.known.range(from.clone()..).next().is_some_and(|p| p.starts_with(&from))
}

fn decision(tree: &Tree, file: &SourceFile, after: &[Word]) -> Vec<Violation> {
    let three = |word| {
        let digits = str::trim_matches(word, |c: char| !c.is_ascii_digit());
        (digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit())).then_some(digits)
    };
    let violation = |(line, n)| {
        let message = format!("expected a file docs/decisions/{n}-….md, found none");
        Violation::new("references.decision", &file.path, line, message)
    };
    list(after, three).into_iter().filter(|(_, n)| !is_decision(tree, n)).map(violation).collect()
}

/// Paths in `docs/` in a word. A path with more before `docs/` is an address, or relative to another directory. A decision may be
/// named by its number alone: `docs/decisions/011`.
fn documents(tree: &Tree, file: &SourceFile, line: usize, word: &str) -> Vec<Violation> {
    let is_path = |c: char| c.is_alphanumeric() || "/._-".contains(c);
    let mut found = Vec::new();
    for (at, _) in word.match_indices("docs/") {
        let rest = &word[at..];
        let end = rest.find(|c: char| !is_path(c)).unwrap_or(rest.len());
        let is_pattern = rest[end..].starts_with(['*', '{', '…', '$']);
        let path = rest[..end].trim_end_matches(['.', '/']);
        let begins = !word[..at].ends_with(is_path);
        let decision = path.strip_prefix("docs/decisions/");
        let exists = tree.known.contains(path) || decision.is_some_and(|n| is_decision(tree, n));
        if begins && !is_pattern && !exists {
            let message = format!("expected the file {path}, found none");
            found.push(Violation::new("references.file", &file.path, line, message));
        }
    }
    found
}

/// The name of a page without its directory, such as `durability.md`, that no file has.
fn unknown_name(names: &BTreeSet<&str>, file: &SourceFile, line: usize, word: &str) -> Option<Violation> {
    let name = plain(word);
    let is_name = |c: char| c.is_alphanumeric() || "_-.".contains(c);
    let stem = name.strip_suffix(".md").filter(|stem| !stem.is_empty())?;
    if !stem.chars().all(is_name) || names.contains(name) {
        return None;
    }
    let message = format!("expected a file with the name {name}, found none");
    Some(Violation::new("references.file", &file.path, line, message))
}

/// The path of a Rust file in a document, such as `sim/tests/model.rs`, that no file has. A path may begin at any directory, and
/// may leave out `src`. A path with a pattern, or with a name to be replaced, such as `NAME.rs`, is none.
fn unknown_source(tree: &Tree, file: &SourceFile, line: usize, word: &str) -> Option<Violation> {
    let is_path = |c: char| c.is_alphanumeric() || "/_-.".contains(c);
    let end = word.find(".rs")? + ".rs".len();
    let (before, path) = match word[..end].char_indices().rfind(|(_, c)| !is_path(*c)) {
        Some((at, c)) => (Some(c), &word[at + c.len_utf8()..end]),
        None => (None, &word[..end]),
    };
    let is_pattern =
        before.is_some_and(|c| "*}>…$".contains(c)) || word[end..].starts_with(char::is_alphanumeric);
    let stem = path.rsplit('/').next().and_then(|name| name.strip_suffix(".rs")).unwrap_or_default();
    let is_replaced = !stem.contains(|c: char| c.is_lowercase());
    let path = path.trim_start_matches("./").trim_start_matches("../");
    if is_pattern || is_replaced || tree.known.iter().any(|known| is_end_of(path, known)) {
        return None;
    }
    let message = format!("expected a file {path}, found none");
    Some(Violation::new("references.file", &file.path, line, message))
}

/// Whether a path of the repository ends with `path`, in which directories `src` may be left out.
pub(crate) fn is_end_of(path: &str, known: &str) -> bool {
    let mut known = known.rsplit('/');
    path.rsplit('/').all(|part| known.find(|k| part == "src" || *k != "src") == Some(part))
}

/// Relative targets of links in Markdown, outside code, that do not exist.
fn links(tree: &Tree, file: &SourceFile) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (n, line) in file.text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        for (at, _) in prose.match_indices("](") {
            let target = prose[at + 2..].split([')', ' ']).next().unwrap_or_default();
            let path = target.split('#').next().unwrap_or_default();
            if !path.is_empty() && !path.contains(':') && !tree.known.contains(&beside(&file.path, path)) {
                let message = format!("expected the target of the link ({target}) to exist, found nothing");
                found.push(Violation::new("references.link", &file.path, n + 1, message));
            }
        }
    }
    found
}

/// The path, from the root of the repository, of `relative` in the file at `path`.
fn beside(path: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in relative.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<(&'static str, usize)> {
        let files = [
            (
                "docs/format.md",
                "# The format\n## 3. Superblock\n### 3.2 Fields\n| number | name |\n|---|---|\n| 1 | a |\n| 11a | b |\n",
            ),
            (
                "docs/semantics.md",
                "## 7 Placement\n### 7.4 Streams\n| rule | condition |\n|---|---|\n| 9 | x |\n",
            ),
            (
                "docs/durability.md",
                "# Promises\n1. One.\n   More.\n2. Two.\n\n3. Three.\n## More\n4. No promise.\n",
            ),
            (
                "docs/compat.md",
                "| # | kernel |\n|---|---|\n| 0 | x |\n\n| # | kernel |\n|---|---|\n| 24 | y |\n",
            ),
            ("docs/decisions/011-costs.md", ""),
            ("docs/book/src/a.md", ""),
            (path, text),
        ];
        check(&Tree::of(&files)).into_iter().map(|v| (v.rule, v.line)).collect()
    }

    #[test]
    fn sections_have_headings() {
        let text = "//! See format section 3, and format\n//! sections 3.2 and 3. (runtime semantics 7.4, rule 9)\n\
                    // The kernel's semantics, section 7. The format 9. Semantics of 12.";
        assert_eq!(found("a.rs", text), []);
    }

    #[test]
    fn sections_without_a_heading_are_reported_where_they_are_cited() {
        let text =
            "// format section 3.1, or format\n// sections 3.2 and 4 (runtime semantics 7.4 to 7.6,\n// 8)";
        let rule = "references.section";
        assert_eq!(found("a.rs", text), [(rule, 1), (rule, 2), (rule, 2), (rule, 3)]);
    }

    #[test]
    fn a_document_can_be_cited_by_its_file() {
        let text = "docs/format.md, section 3. [format.md](../docs/format.md) section 3.2, `semantics.md` section 7.";
        assert_eq!(found("docs/a.md", text), []);
        let text = "docs/format.md, section 4. [format.md](format.md) section 3.3, `semantics.md` section 8.";
        assert_eq!(found("docs/a.md", text), [("references.section", 1); 3]);
    }

    #[test]
    fn a_document_cites_its_own_sections() {
        let text =
            "## 1. One\n(section 1), 64 times; sections 1 and 2; format section 3; semantics section 1\n";
        let files = [
            (
                "docs/format.md",
                "## 3. Superblock\nsection 3, section 4; semantics section 1 and format section 3",
            ),
            ("docs/semantics.md", text),
        ];
        let found: Vec<_> = check(&Tree::of(&files)).into_iter().map(|v| (v.path, v.line)).collect();
        assert_eq!(found, [("docs/format.md".into(), 2), ("docs/semantics.md".into(), 2)]);
    }

    #[test]
    fn numbers_of_promises_invariants_rules_and_items_exist() {
        let text = "// Promises 1 and 2 (durability contract 3), contract rule 2; invariants 1, 11a and 1;\n\
                    // semantics section 7, rule 9; docs/compat.md, item 24; the defects 0 and 24; each rule 3 times";
        let rule = "references.number";
        assert_eq!(found("a.rs", text), [(rule, 2)], "a rule of semantics");
        let text = "// promise 4, contract 5, contract rule\n// 6; invariant 11b,\n// invariants 1 to 20, rules 8 and 9; item 25";
        assert_eq!(
            found("a.rs", text),
            [(rule, 1), (rule, 1), (rule, 2), (rule, 2), (rule, 3), (rule, 3), (rule, 3)]
        );
    }

    #[test]
    fn pages_are_files() {
        let text = "docs/decisions/011, `docs/decisions/011-costs.md`, a.md, docs/book/, docs/{name}.md, docs/*.md, {x}.md";
        assert_eq!(found("b.rs", &format!("// {text}")), []);
        let text = "docs/decisions/012, docs/book/src/b, gone.md and\n// `docs/missing/`";
        let rule = "references.file";
        assert_eq!(found("b.rs", &format!("// {text}")), [(rule, 1), (rule, 1), (rule, 2), (rule, 1)]);
    }

    #[test]
    fn rust_files_that_documents_name_are_files() {
        let files = |text| {
            let files =
                [("crates/io/src/disk/mod.rs", ""), ("crates/io/tests/disk.rs", ""), ("docs/a.md", text)];
            check(&Tree::of(&files)).into_iter().map(|v| (v.rule, v.line)).collect::<Vec<_>>()
        };
        let right = "`disk/mod.rs`, `io/src/disk/mod.rs`, (`io/disk/mod.rs: a_test`), crates/io/tests/disk.rs, ../../io/tests/disk.rs, \
                     `*.rs`, `tests/{a,b}.rs`, `crates/io/src/NAME.rs`";
        assert_eq!(files(right), []);
        let wrong = "`io/src/disk.rs`, `disk/tests.rs: a_test` and\n`io/tests/gone.rs`, gone.rs";
        let rule = "references.file";
        assert_eq!(files(wrong), [(rule, 1), (rule, 1), (rule, 2), (rule, 2)]);
    }

    #[test]
    fn sections_of_a_document_that_does_not_exist_are_not_checked() {
        assert_eq!(check(&Tree::of(&[("a.rs", "// runtime semantics 99")])), []);
    }

    #[test]
    fn decisions_and_files_exist() {
        let text = "// decision 011, docs/decisions/011-costs.md, https://a.example/docs/b.md, docs/decisions/NNN-*.md";
        assert_eq!(found("a.rs", text), []);
        let text = "// decisions 011 and 012;\n// `docs/gone.md`.";
        assert_eq!(found("a.rs", text), [("references.decision", 1), ("references.file", 2)]);
    }

    #[test]
    fn links_have_targets() {
        let text = "[a](../book/src/a.md#x) [b](#x) [c](https://a.example/) [d](011-costs.md) `[e](f)` [g](../book)\n";
        assert_eq!(found("docs/decisions/012-b.md", text), []);
        let text = "\n```\n[a](b)\n```\n[b](a.md) [c](../missing/)";
        let rule = "references.link";
        assert_eq!(found("docs/decisions/012-b.md", text), [(rule, 5), (rule, 5)]);
    }
}
