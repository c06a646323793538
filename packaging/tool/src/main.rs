//! Writes the manual pages of every command and of the configuration, and completions for bash, zsh and fish, from the
//! definitions in the program, so that they match what the program accepts.
//!
//! Module `names` completes names that only a daemon knows. `ubcache-pages DIR` makes DIR/man/*.8, DIR/man/ubcache.toml.5 and
//! DIR/completions/{ubcache,_ubcache,ubcache.fish}.
#![forbid(unsafe_code)]

mod examples;
mod man;
mod names;

use std::io::Result;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap_complete::Shell;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let (Some(dir), None) = (args.next().map(PathBuf::from), args.next()) else {
        eprintln!("usage: ubcache-pages DIR");
        return ExitCode::from(2);
    };
    match write(&dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ubcache-pages: {}: {e}", dir.display());
            ExitCode::FAILURE
        }
    }
}

fn write(dir: &Path) -> Result<()> {
    let (pages, completions) = (dir.join("man"), dir.join("completions"));
    std::fs::create_dir_all(&pages)?;
    std::fs::create_dir_all(&completions)?;
    let command = cli::command();
    man::write(&pages, &command)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let file = match shell {
            Shell::Bash => "ubcache",
            Shell::Zsh => "_ubcache",
            _ => "ubcache.fish",
        };
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command.clone(), "ubcache", &mut text);
        let text = String::from_utf8_lossy(&text);
        let text = match shell {
            Shell::Bash => format!("{text}{}", names::bash(&command)),
            Shell::Zsh => names::zsh(&text),
            _ => format!("{text}{}", names::fish(&command)),
        };
        std::fs::write(completions.join(file), text)?;
    }
    Ok(())
}
