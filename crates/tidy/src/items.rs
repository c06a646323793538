//! Names in Rust files that documents cite: functions, types and tests.
//!
//! A document cites a name as `file.rs: name` in one pair of backticks, or as a file and a name in two pairs beside each other. Owns the
//! check. Whether the file exists is the business of `references`.

use crate::references::is_end_of;
use crate::source::Tree;
use crate::violation::Violation;

/// Citations of names that the file does not have.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in tree.prose().filter(|f| f.path.ends_with(".md")) {
        for (path, name, line) in citations(&file.text) {
            let files: Vec<_> = tree.files.iter().filter(|f| is_end_of(&path, &f.path)).collect();
            let has = |text: &str| name.split("::").all(|part| has_word(text, part));
            if !files.is_empty() && !files.iter().any(|f| has(&f.text)) {
                let message = format!("expected {name} in {path}, found none");
                found.push(Violation::new("references.item", &file.path, line, message));
            }
        }
    }
    found
}

/// File, name and line of each citation.
fn citations(text: &str) -> Vec<(String, String, usize)> {
    let mut found = Vec::new();
    // Every second part is code.
    let parts: Vec<&str> = text.split('`').collect();
    let mut line = 1;
    for (i, part) in parts.iter().enumerate() {
        if i % 2 == 1 {
            let (path, own) = match part.split_once(".rs: ") {
                Some((path, name)) => (format!("{path}.rs"), Some(name)),
                None => ((*part).to_owned(), None),
            };
            let beside = || match (parts.get(i + 1), parts.get(i + 2)) {
                (Some(between), Some(name)) if !between.is_empty() && between.trim().is_empty() => {
                    Some(*name)
                }
                _ => None,
            };
            if let Some(name) = own.or_else(beside)
                && is_file(&path)
                && is_name(name)
            {
                found.push((path, name.to_owned(), line));
            }
        }
        line += part.matches('\n').count();
    }
    found
}

fn is_file(path: &str) -> bool {
    let is_path = |c: char| c.is_alphanumeric() || "/_-.".contains(c);
    path.ends_with(".rs") && path.chars().all(is_path)
}

/// Whether this is one name. A name that ends with an ellipsis is a part of several.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == ':')
}

fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(document: &str) -> Vec<(usize, String)> {
        let files = [
            ("crates/io/src/disk.rs", "pub fn read() {}\nimpl Disk { fn write_all(&self) {} }"),
            ("docs/a.md", document),
        ];
        check(&Tree::of(&files)).into_iter().map(|v| (v.line, v.message)).collect()
    }

    #[test]
    fn cited_names_are_in_their_file() {
        let right = "`io/disk.rs: read`, `disk.rs` `Disk::write_all` and\n`disk.rs`, `missing`; `disk.rs: write_…`; `gone.rs: x`; \
                     `cargo test`, `disk.rs`\n`read`";
        assert_eq!(found(right), []);
        let wrong = "`io/disk.rs: write`\n`disk.rs`\n`Disk::flush`";
        let message = |name: &str, path: &str| format!("expected {name} in {path}, found none");
        assert_eq!(
            found(wrong),
            [(1, message("write", "io/disk.rs")), (2, message("Disk::flush", "disk.rs"))]
        );
    }
}
