//! The copy of the workspace whose engine holds the mutants.
//!
//! Owns the directory `target/mutants/src`. Invariant: a file that has not changed is not written, so a second build of the copy
//! compiles only changed files. The real engine reads no environment variable and has no mutants; only the copy does.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::rewrite::{rewrite, test_modules};
use crate::table::{Mutant, hash};

/// Directory of the engine's sources in the workspace.
pub const ENGINE: &str = "crates/engine/src";

/// The module that tells the rewritten engine which mutant is switched on; see `crates/mutants/src/switch.rs.txt`.
const SWITCH: &str = include_str!("switch.rs.txt");

/// The copy of the workspace.
pub struct Copy {
    /// Root of the real workspace.
    pub from: PathBuf,
    /// Root of the copy.
    pub to: PathBuf,
}

impl Copy {
    /// Copies every file of the workspace except the engine's sources.
    pub fn sync(&self) -> Result<(), Error> {
        let mut kept = BTreeSet::new();
        for file in self.tracked()? {
            kept.insert(file.clone());
            let path = Path::new(&file);
            // The engine's sources contain its unit tests; the sources are rewritten, not copied.
            if !path.starts_with(ENGINE) {
                let bytes = fs::read(self.from.join(path)).map_err(Error::file(path))?;
                self.put(path, &bytes)?;
            }
        }
        for old in files_below(&self.to)? {
            let gone = old.strip_prefix(&self.to).is_ok_and(|p| {
                !kept.contains(&*p.to_string_lossy()) && !p.ends_with("engine/src/mutants.rs")
            });
            if gone {
                fs::remove_file(&old).map_err(Error::file(&old))?;
            }
        }
        Ok(())
    }

    /// Rewrites the engine with every mutant whose key is `wanted`.
    pub fn rewrite(&self, wanted: &dyn Fn(&str) -> bool) -> Result<Vec<Mutant>, Error> {
        let engine = self.from.join(ENGINE);
        let files = files_below(&engine)?;
        let mut of_tests = BTreeSet::new();
        for file in &files {
            let text = fs::read_to_string(file).map_err(Error::file(file))?;
            let dir = directory_of_modules(file);
            for name in test_modules(&text).map_err(Error::syntax(file))? {
                of_tests.insert(dir.join(format!("{name}.rs")));
                // The modules below it are tests too.
                of_tests.insert(dir.join(name));
            }
        }
        let mut mutants: Vec<Mutant> = Vec::new();
        for file in &files {
            // Every file is below the engine.
            let name = file.strip_prefix(&engine).unwrap_or(file);
            let text = fs::read_to_string(file).map_err(Error::file(file))?;
            let of_test = file.ancestors().any(|part| of_tests.contains(part));
            let left_alone = of_test || name == Path::new("canary.rs");
            let mut out = if left_alone {
                text
            } else {
                let first = mutants.last().map_or(1, |m| m.number + 1);
                let rewritten = rewrite(&name.to_string_lossy(), &text, first, wanted);
                let r = rewritten.map_err(Error::syntax(file))?;
                mutants.extend(r.mutants);
                r.text
            };
            if name == Path::new("lib.rs") {
                out = with_switch(&out);
            }
            self.put(&Path::new(ENGINE).join(name), out.as_bytes())?;
        }
        let count = mutants.len() + 1;
        self.put(
            &Path::new(ENGINE).join("mutants.rs"),
            SWITCH.replace("COUNT_OF_MUTANTS", &count.to_string()).as_bytes(),
        )?;
        Ok(mutants)
    }

    /// A hash of everything on which verdicts depend: sources, tests, plans, the lock file.
    pub fn fingerprint(&self) -> Result<String, Error> {
        let mut all = Vec::new();
        for file in self.tracked()? {
            let matters = file == "Cargo.lock"
                || (file.starts_with("crates/")
                    && !file.starts_with("crates/mutants/")
                    && !file.ends_with(".md"));
            if matters {
                let bytes = fs::read(self.from.join(&file)).map_err(Error::file(Path::new(&file)))?;
                all.extend_from_slice(file.as_bytes());
                all.extend_from_slice(&hash(&bytes).to_le_bytes());
            }
        }
        Ok(format!("{:016x}", hash(&all)))
    }

    /// Files of the workspace that are in git, or new and not ignored.
    fn tracked(&self) -> Result<Vec<String>, Error> {
        let out = std::process::Command::new("git")
            .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
            .current_dir(&self.from)
            .output()
            .map_err(|source| {
                let program = format!("git ls-files in {}", self.from.display());
                Error::Process { program, source }
            })?;
        if !out.status.success() {
            let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
            return Err(Error::Git { stderr });
        }
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let exists = |f: &&str| !f.is_empty() && self.from.join(f).is_file();
        Ok(text.split('\0').filter(exists).map(str::to_owned).collect())
    }

    fn put(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        let to = self.to.join(path);
        if fs::read(&to).is_ok_and(|old| old == bytes) {
            return Ok(());
        }
        if let Some(dir) = to.parent() {
            fs::create_dir_all(dir).map_err(Error::file(dir))?;
        }
        fs::write(&to, bytes).map_err(Error::file(&to))
    }
}

/// Adds the switch, and attributes that turn lints off in rewritten code, to the root of the crate.
fn with_switch(lib: &str) -> String {
    let attributes = "#![allow(warnings, unused_must_use, arithmetic_overflow, unconditional_panic, overflowing_literals)]\n";
    format!("{attributes}{lib}\npub mod mutants;\n")
}

/// The directory of the submodules of a file.
fn directory_of_modules(file: &Path) -> PathBuf {
    match file.file_name().and_then(|n| n.to_str()) {
        Some("mod.rs" | "lib.rs") => file.parent().unwrap_or(file).to_path_buf(),
        _ => file.with_extension(""),
    }
}

/// Every file below a directory, in order.
fn files_below(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        if !dir.exists() {
            continue;
        }
        for entry in fs::read_dir(&dir).map_err(Error::file(&dir))? {
            let path = entry.map_err(Error::file(&dir))?.path();
            if path.is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    Ok(found)
}
