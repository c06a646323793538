//! The files of the repository.
//!
//! Owns the selection of the files that are read, and of those that are tests. Must not know the rules.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::rust;

/// Directories that no check reads: inputs of fuzz targets, and files of other projects.
const SKIPPED: &[&str] = &["fuzz/corpus/", "crates/daemon/web/vendor/"];
/// Endings of files that no check reads: generated files and data.
const DATA: &[&str] =
    &[".lock", "package-lock.json", ".svg", ".zst", ".plan", ".json", "proptest-regressions"];
/// The directory of this crate. Its words and its tests are examples of text that other files must not contain.
const OWN: &str = "crates/tidy/";

/// A text file.
pub struct SourceFile {
    /// The path relative to the root of the repository, with `/`.
    pub path: String,
    /// The content.
    pub text: String,
    /// The syntax tree, if the file is Rust.
    pub rust: Option<RustFile>,
}

/// The syntax tree of a Rust file.
pub struct RustFile {
    /// The whole file.
    pub whole: syn::File,
    /// The file without tests; `None` if the whole file is a test.
    pub product: Option<syn::File>,
}

/// All files that the checks read.
pub struct Tree {
    /// The text files, sorted by path.
    pub files: Vec<SourceFile>,
    /// The paths of all tracked files, including those that are not read, and of their directories.
    pub known: BTreeSet<String>,
}

impl Tree {
    /// Reads the tracked files below `root`; without a repository, all files except build directories.
    pub fn read(root: &Path) -> Result<Tree, Error> {
        let paths = tracked(root).map_or_else(|| walk(root), Ok)?;
        let mut files = Vec::new();
        for path in paths.iter().filter(|p| is_read(p)) {
            let file = root.join(path);
            // The path is a file that was deleted in the work tree, or a link to a directory.
            if !file.is_file() {
                continue;
            }
            let bytes = fs::read(&file).map_err(|source| Error::Read { path: path.clone(), source })?;
            let Ok(text) = String::from_utf8(bytes) else { continue };
            if !text.contains('\0') {
                files.push((path.clone(), text));
            }
        }
        let exists = |p: &&String| root.join(p).exists();
        Tree::new(files, &paths.iter().filter(exists).cloned().collect::<Vec<_>>())
    }

    /// A tree of files in memory.
    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Tree {
        let files: Vec<_> = files.iter().map(|(p, t)| ((*p).to_string(), (*t).to_string())).collect();
        let paths: Vec<_> = files.iter().map(|(p, _)| p.clone()).collect();
        Tree::new(files, &paths).expect("Rust that can be parsed")
    }

    fn new(texts: Vec<(String, String)>, paths: &[String]) -> Result<Tree, Error> {
        let mut parsed = Vec::new();
        for (path, text) in texts {
            let whole = match path.ends_with(".rs") {
                true => Some(
                    syn::parse_file(&text).map_err(|source| Error::Rust { path: path.clone(), source })?,
                ),
                false => None,
            };
            parsed.push((path, text, whole));
        }
        let trees = parsed.iter().filter_map(|(p, _, w)| Some((p.as_str(), w.as_ref()?)));
        let tests = rust::test_modules(trees);
        let in_tests = |path: &str| rust::is_test_path(path) || tests.iter().any(|t| t.holds(path));
        let files = parsed
            .into_iter()
            .map(|(path, text, whole)| {
                let rust = whole.map(|whole| {
                    let product = (!in_tests(&path)).then(|| rust::without_tests(&whole));
                    RustFile { whole, product }
                });
                SourceFile { path, text, rust }
            })
            .collect();
        Ok(Tree { files, known: with_directories(paths) })
    }

    /// The content of a file.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|f| f.path == path).map(|f| f.text.as_str())
    }

    /// Rust files that are not tests, without the tests in them.
    pub fn product(&self) -> impl Iterator<Item = (&SourceFile, &syn::File)> {
        self.files.iter().filter_map(|f| Some((f, f.rust.as_ref()?.product.as_ref()?)))
    }

    /// Files whose text is checked for words and references: all but those of this crate.
    pub fn prose(&self) -> impl Iterator<Item = &SourceFile> {
        self.files.iter().filter(|f| !f.path.starts_with(OWN))
    }
}

/// The root of the repository that contains the working directory; without a repository, the working directory.
pub fn root() -> Result<PathBuf, Error> {
    let here = std::env::current_dir().map_err(Error::WorkingDirectory)?;
    Ok(git(&here, &["rev-parse", "--show-toplevel"]).map_or(here, |s| PathBuf::from(s.trim_end())))
}

/// The output of a git command in `dir`, or `None` if git fails or is missing.
pub fn git(dir: &Path, arguments: &[&str]) -> Option<String> {
    let out = Command::new("git").arg("-C").arg(dir).args(arguments).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
}

fn tracked(root: &Path) -> Option<Vec<String>> {
    let list = git(root, &["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
    let mut paths: Vec<String> = list.split('\0').filter(|p| !p.is_empty()).map(Into::into).collect();
    paths.sort();
    paths.dedup();
    Some(paths)
}

fn walk(root: &Path) -> Result<Vec<String>, Error> {
    let mut paths = Vec::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(dir) = open.pop() {
        let cannot_read = |source| Error::Read { path: dir.display().to_string(), source };
        for entry in fs::read_dir(&dir).map_err(cannot_read)? {
            let path = entry.map_err(cannot_read)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir()
                && !path.is_symlink()
                && !["target", ".git", "node_modules"].contains(&name.as_str())
            {
                open.push(path);
            } else if path.is_file() {
                let relative = path.strip_prefix(root).unwrap_or(&path);
                paths.push(relative.to_string_lossy().into_owned());
            }
        }
    }
    paths.sort();
    Ok(paths)
}

fn is_read(path: &str) -> bool {
    !SKIPPED.iter().any(|s| path.starts_with(s)) && !DATA.iter().any(|d| path.ends_with(d))
}

fn with_directories(paths: &[String]) -> BTreeSet<String> {
    let mut all = BTreeSet::from([String::new()]);
    for path in paths {
        all.insert(path.clone());
        all.extend(path.match_indices('/').map(|(at, _)| path[..at].to_string()));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_repository_is_walked_without_target() {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in
            [("src/a.rs", "fn a() {}"), ("target/b.rs", "no Rust"), ("fuzz/corpus/c.rs", "none")]
        {
            fs::create_dir_all(dir.path().join(path).parent().unwrap()).unwrap();
            fs::write(dir.path().join(path), text).unwrap();
        }
        assert_eq!(walk(dir.path()).unwrap(), ["fuzz/corpus/c.rs", "src/a.rs"]);
        let tree =
            Tree::new(vec![("src/a.rs".into(), "fn a() {}".into())], &walk(dir.path()).unwrap()).unwrap();
        assert!(tree.known.contains("fuzz/corpus"));
    }

    #[test]
    fn generated_files_and_data_are_not_read() {
        assert!(is_read("crates/engine/src/lib.rs") && is_read("Makefile"));
        assert!(!is_read("Cargo.lock") && !is_read("fuzz/corpus/jset/a.txt") && !is_read("docs/a.svg"));
    }

    #[test]
    fn a_file_that_cannot_be_parsed_is_named_with_its_line() {
        let tree = Tree::new(vec![("a.rs".into(), "fn a() {}\nfn {".into())], &[]);
        assert!(tree.err().unwrap().to_string().starts_with("a.rs:2: "));
    }
}
