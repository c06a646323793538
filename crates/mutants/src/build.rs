//! Builds the copy without the mutants that do not compile.
//!
//! Owns the runs of cargo and the list of mutants that the compiler refuses. Invariant: a round that drops no mutant is the last
//! round or an error.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::blame::{Places, Role, Span};
use crate::copy::{Copy, ENGINE};
use crate::error::Error;
use crate::table::Mutant;

/// Maximum number of rounds; the phases of the compiler need fewer.
const ROUNDS: usize = 60;

/// A program that cargo has built.
#[derive(Clone, Debug)]
pub struct Program {
    /// Cargo's name of the program.
    pub name: String,
    /// `bin`, `test` or `lib`.
    pub kind: String,
    /// Name of the package.
    pub package: String,
    /// Directory of the package.
    pub directory: PathBuf,
    /// Path of the program.
    pub path: PathBuf,
}

/// Rewrites the copy until it compiles, and returns its mutants.
///
/// `refused` has the refused mutants of earlier runs, and gets those of this run.
pub fn rewrite_until_it_compiles(
    copy: &Copy,
    build_dir: &Path,
    refused: &mut BTreeSet<String>,
    excluded: &dyn Fn(&str) -> bool,
) -> Result<Vec<Mutant>, Error> {
    for round in 1..=ROUNDS {
        let mutants = copy.rewrite(&|key| !refused.contains(key) && !excluded(key))?;
        let errors = check(copy, build_dir)?;
        if errors.is_empty() {
            return Ok(mutants);
        }
        let blamed = blame(copy, &errors)?;
        let before = refused.len();
        refused.extend(mutants.iter().filter(|m| blamed.contains(&m.number)).map(|m| m.key.clone()));
        eprintln!(
            "round {round}: {} compiler errors, {} mutants dropped",
            errors.len(),
            refused.len() - before
        );
        if refused.len() == before {
            let texts: Vec<&str> = errors.iter().map(|e| e.rendered.as_str()).collect();
            return Err(Error::NoMutantToBlame { messages: texts.join("\n") });
        }
    }
    Err(Error::Rounds { rounds: ROUNDS })
}

/// Builds the simulator and the tests, or only the unit tests of the engine.
pub fn programs(copy: &Copy, build_dir: &Path, unit: bool) -> Result<Vec<Program>, Error> {
    let all: &[&str] = &[
        "test",
        "--no-run",
        "-p",
        "ubcache-sim",
        "-p",
        "ubcache-engine",
        "--features",
        "ubcache-sim/canary",
    ];
    let alone: &[&str] = &["test", "--no-run", "--lib", "-p", "ubcache-engine", "--features", "canary"];
    let (ok, messages) = cargo(copy, build_dir, if unit { alone } else { all })?;
    if !ok {
        let texts: Vec<String> = messages.iter().filter_map(error).map(|e| e.rendered).collect();
        return Err(Error::Tests { messages: texts.join("\n") });
    }
    Ok(messages.iter().filter_map(program).collect())
}

struct CompilerError {
    rendered: String,
    spans: Vec<(String, Span)>,
}

fn check(copy: &Copy, build_dir: &Path) -> Result<Vec<CompilerError>, Error> {
    let (ok, messages) = cargo(copy, build_dir, &["check", "-p", "ubcache-engine", "--features", "canary"])?;
    let errors: Vec<CompilerError> =
        messages.iter().filter_map(error).filter(|e| !e.spans.is_empty()).collect();
    if ok || !errors.is_empty() { Ok(errors) } else { Err(Error::Check) }
}

fn blame(copy: &Copy, errors: &[CompilerError]) -> Result<BTreeSet<u32>, Error> {
    let mut places: BTreeMap<&str, Places> = BTreeMap::new();
    let mut blamed = BTreeSet::new();
    for e in errors {
        let Some((file, _)) = e.spans.iter().find(|(f, s)| f.contains(ENGINE) && s.role == Role::Primary)
        else {
            continue;
        };
        if !places.contains_key(file.as_str()) {
            let path = copy.to.join(file);
            let text = fs::read_to_string(&path).map_err(Error::file(&path))?;
            places.insert(file, Places::of(&text).map_err(Error::syntax(&path))?);
        }
        let spans: Vec<Span> = e.spans.iter().filter(|(f, _)| f == file).map(|(_, s)| s.clone()).collect();
        blamed.extend(places.get(file.as_str()).and_then(|p| p.blame(&spans)));
    }
    Ok(blamed)
}

fn cargo(copy: &Copy, build_dir: &Path, args: &[&str]) -> Result<(bool, Vec<Value>), Error> {
    let out = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(args)
        .args(["--message-format=json", "--quiet", "--target-dir"])
        .arg(build_dir)
        .current_dir(&copy.to)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|source| Error::Process { program: "cargo".into(), source })?;
    let text = String::from_utf8_lossy(&out.stdout);
    Ok((out.status.success(), text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()))
}

fn error(message: &Value) -> Option<CompilerError> {
    let m = message.get("message")?;
    if m.get("level")?.as_str()? != "error" {
        return None;
    }
    let of = |m: &Value| m.get("spans").and_then(Value::as_array).cloned().unwrap_or_default();
    let mut spans: Vec<(String, Span)> = of(m).iter().filter_map(|s| span(s, false)).collect();
    for note in m.get("children")?.as_array()? {
        if note.get("message").is_some_and(names_skipped) {
            spans.extend(of(note).iter().filter_map(|s| span(s, true)));
        }
    }
    Some(CompilerError { rendered: m.get("rendered")?.as_str()?.to_owned(), spans })
}

/// Whether the compiler's text states that an assignment may be skipped.
fn names_skipped(text: &Value) -> bool {
    text.as_str().is_some_and(|t| t.contains("might get skipped"))
}

fn span(value: &Value, skipped: bool) -> Option<(String, Span)> {
    let number = |name: &str| value.get(name)?.as_u64().map(|n| n as usize);
    let bytes = number("byte_start")?..number("byte_end")?;
    let role = if skipped || value.get("label").is_some_and(names_skipped) {
        Role::Skipped
    } else if value.get("is_primary")?.as_bool()? {
        Role::Primary
    } else {
        Role::Other
    };
    Some((value.get("file_name")?.as_str()?.to_owned(), Span { bytes, role }))
}

fn program(message: &Value) -> Option<Program> {
    let path = PathBuf::from(message.get("executable")?.as_str()?);
    let target = message.get("target")?;
    let text = |v: &Value| v.as_str().map(str::to_owned);
    let directory = Path::new(message.get("manifest_path")?.as_str()?).parent()?.to_path_buf();
    let is_test = message.get("profile")?.get("test")?.as_bool()?;
    let kind = target.get("kind")?.get(0).and_then(text)?;
    // The unit tests of a binary are not used here; the binary itself is.
    if kind == "bin" && is_test {
        return None;
    }
    let package = directory.file_name()?.to_string_lossy().into_owned();
    Some(Program { name: target.get("name").and_then(text)?, kind, package, directory, path })
}
