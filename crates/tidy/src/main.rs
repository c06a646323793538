//! A lint of this repository. `make lint` runs it; CONTRIBUTING.md lists its checks.
//!
//! Owns the command line and the order of the steps: read the tracked files, run every check, compare the violations with
//! the counts in `exceptions.toml`, print the difference. Must not know the rules.
#![forbid(unsafe_code)]

mod arrows;
mod circles;
mod commits;
mod error;
mod exceptions;
mod impls;
mod items;
mod layers;
mod named;
mod numbers;
mod references;
mod rust;
mod sizes;
mod source;
mod types;
mod violation;
mod words;

use std::fs;
use std::process::ExitCode;

use clap::Parser;

use crate::error::Error;
use crate::exceptions::Exceptions;
use crate::source::Tree;
use crate::violation::Violation;

/// Path of the allowed counts, relative to the root of the repository.
const EXCEPTIONS: &str = "crates/tidy/exceptions.toml";

/// Checks sizes, imports, references and words of this repository.
#[derive(Parser)]
struct Args {
    /// Print all violations, including those that exceptions.toml allows
    #[arg(long)]
    list: bool,
    /// Lower the numbers in exceptions.toml to what is found; no number rises
    #[arg(long)]
    update: bool,
}

fn main() -> ExitCode {
    match work(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("ubcache-tidy: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every check. Returns true if nothing has to be changed.
fn work(args: &Args) -> Result<bool, Error> {
    let root = source::root()?;
    let tree = Tree::read(&root)?;
    let mut violations = check(&tree)?;
    violations.extend(commits::check(&root));
    violations.sort();
    let file = root.join(EXCEPTIONS);
    let path = || EXCEPTIONS.to_string();
    let text = fs::read_to_string(&file).map_err(|source| Error::Read { path: path(), source })?;
    let parsed = Exceptions::parse(&text);
    let mut exceptions = parsed.map_err(|source| Error::Exceptions { path: path(), source })?;
    if args.update && exceptions.lower(&violations) {
        let written = fs::write(&file, exceptions.render());
        written.map_err(|source| Error::Write { path: path(), source })?;
    }
    let text = exceptions.render();
    let problems = exceptions.compare(&violations);
    if args.list {
        violations.iter().for_each(|v| println!("{v}"));
    } else {
        problems.more.iter().for_each(|v| println!("{v}"));
    }
    for stale in &problems.stale {
        println!("{EXCEPTIONS}:{}: {}", exceptions::line_of(&text, stale), stale.describe());
    }
    let (found, new, lower) = (violations.len(), problems.more.len(), problems.stale.len());
    println!(
        "tidy: {} files, {found} violations, {} allowed, {new} not allowed, {lower} numbers to lower in {EXCEPTIONS}",
        tree.files.len(),
        found - new
    );
    Ok(new == 0 && lower == 0)
}

/// All violations that the checks of files find.
fn check(tree: &Tree) -> Result<Vec<Violation>, Error> {
    let mut all = Vec::new();
    all.extend(sizes::check(tree));
    all.extend(arrows::crates(tree)?);
    all.extend(arrows::components(tree));
    all.extend(circles::check(tree));
    all.extend(impls::check(tree));
    all.extend(types::check(tree));
    all.extend(items::check(tree));
    all.extend(references::check(tree));
    all.extend(words::check(tree));
    Ok(all)
}
