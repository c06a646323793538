//! Writes the man pages of every command, and completions for bash, zsh and fish, from the definition of the command line, so
//! that they match the arguments that the program accepts.
//!
//! Module `names` completes names that only a daemon knows. `ubcache-pages DIR` makes DIR/man/*.1 and DIR/completions/{ubcache,_ubcache,ubcache.fish}.
#![forbid(unsafe_code)]

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
    let (man, completions) = (dir.join("man"), dir.join("completions"));
    std::fs::create_dir_all(&man)?;
    std::fs::create_dir_all(&completions)?;
    let command = cli::command();
    clap_mangen::generate_to(command.clone(), &man)?;
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
