//! References resolve: cited sections, decisions and files in `docs/` exist, and so do the targets of links.
//!
//! Owns the check. It reads a text as words, so a citation may lie on two lines of a comment.

use std::collections::BTreeSet;

use crate::source::{SourceFile, Tree};
use crate::violation::Violation;

/// A word of a file with its line; comment markers are left out.
type Word<'a> = (usize, &'a str);

/// Documents whose sections are cited, by the word that cites them. After `semantics` a number alone is a citation.
const DOCUMENTS: &[(&str, &str)] = &[("format", "docs/format.md"), ("semantics", "docs/semantics.md")];

/// Citations that do not resolve.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let sections: Vec<_> =
        DOCUMENTS.iter().map(|(word, file)| (*word, tree.text(file).map(headings))).collect();
    let mut found = Vec::new();
    for file in tree.prose() {
        let words = words(&file.text);
        for (at, (_, word)) in words.iter().enumerate() {
            let name = word.trim_start_matches(|c: char| !c.is_alphanumeric()).to_lowercase();
            for (document, numbers) in &sections {
                // A document that does not exist has no sections to compare with.
                if let Some(numbers) = numbers.as_ref().filter(|_| name.trim_end_matches(',') == *document) {
                    found.extend(section(file, &words[at + 1..], (document, numbers)));
                }
            }
            if ["decision", "decisions"].contains(&name.as_str()) {
                found.extend(decision(tree, file, &words[at + 1..]));
            }
        }
        found.extend(words.iter().flat_map(|(line, word)| documents(tree, file, *line, word)));
        if file.path.ends_with(".md") {
            found.extend(links(tree, file));
        }
    }
    found
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

/// The numbers at the beginning of headings: `7.4` of `### 7.4 Placement`.
fn headings(text: &str) -> BTreeSet<String> {
    let titles = text.lines().filter_map(|l| l.strip_prefix('#')).map(|l| l.trim_start_matches('#').trim());
    titles.filter_map(|t| number(t.split_whitespace().next()?)).map(Into::into).collect()
}

/// The number `N` or `N.N` in a word, without punctuation.
fn number(word: &str) -> Option<&str> {
    let word = word.trim_matches(|c: char| !c.is_ascii_digit());
    let mut parts = word.split('.');
    let is_number = |p: &str| !p.is_empty() && p.len() <= 2 && p.bytes().all(|b| b.is_ascii_digit());
    (parts.clone().count() <= 2 && parts.all(is_number)).then_some(word)
}

/// The list of numbers at the beginning of the words: `3.1, 4 and 5`.
fn list<'a>(words: &[Word<'a>], number: impl Fn(&'a str) -> Option<&'a str>) -> Vec<Word<'a>> {
    let mut numbers = Vec::new();
    let mut words = words.iter().peekable();
    while let Some((line, word)) = words.next() {
        let Some(n) = number(word).filter(|n| word.trim_start_matches('(').starts_with(n)) else { break };
        numbers.push((*line, n));
        let more = words.next_if(|(_, w)| ["and", "to", "or"].contains(w)).is_some();
        if !more && !word.ends_with(',') {
            break;
        }
    }
    numbers
}

fn section(file: &SourceFile, after: &[Word], cited: (&str, &BTreeSet<String>)) -> Vec<Violation> {
    let (document, numbers) = cited;
    let named = after.first().is_some_and(|(_, w)| ["section", "sections"].contains(w));
    if !named && document != "semantics" {
        return Vec::new();
    }
    let missing =
        list(&after[usize::from(named)..], number).into_iter().filter(|(_, n)| !numbers.contains(*n));
    let violation = |(line, n)| {
        let message = format!("expected a heading {n} in docs/{document}.md, found none");
        Violation::new("references.section", &file.path, line, message)
    };
    missing.map(violation).collect()
}

fn decision(tree: &Tree, file: &SourceFile, after: &[Word]) -> Vec<Violation> {
    let three = |word| {
        let digits = str::trim_matches(word, |c: char| !c.is_ascii_digit());
        (digits.len() == 3 && digits.bytes().all(|b| b.is_ascii_digit())).then_some(digits)
    };
    let exists = |n: &str| {
        let from = format!("docs/decisions/{n}-");
        tree.known.range(from.clone()..).next().is_some_and(|p| p.starts_with(&from))
    };
    let violation = |(line, n)| {
        let message = format!("expected a file docs/decisions/{n}-….md, found none");
        Violation::new("references.decision", &file.path, line, message)
    };
    list(after, three).into_iter().filter(|(_, n)| !exists(n)).map(violation).collect()
}

/// Paths in `docs/` in a word. A path with more before `docs/` is an address, or relative to another directory.
fn documents(tree: &Tree, file: &SourceFile, line: usize, word: &str) -> Vec<Violation> {
    let is_path = |c: char| c.is_alphanumeric() || "/._-".contains(c);
    let mut found = Vec::new();
    for (at, _) in word.match_indices("docs/") {
        let rest = &word[at..];
        let end = rest.find(|c: char| !is_path(c)).unwrap_or(rest.len());
        let path = rest[..end].trim_end_matches('.');
        let begins = !word[..at].ends_with(is_path);
        if begins && path.ends_with(".md") && !tree.known.contains(path) {
            let message = format!("expected the file {path}, found none");
            found.push(Violation::new("references.file", &file.path, line, message));
        }
    }
    found
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
            ("docs/format.md", "# The format\n## 3. Superblock\n### 3.2 Fields\n"),
            ("docs/semantics.md", "## 7 Placement\n### 7.4 Streams\n"),
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
