//! The command line: operator commands and offline tools around the engine and its exports.
//!
//! Owns the syntax and output of the commands, and the exit codes: 0 success, 1 failed or problem found, 2 usage, 3 done and not
//! stored. Data goes to stdout, messages go to stderr, and progress is shown on a terminal only. Connects devices, sets and
//! exports. Must not know the format beyond building superblocks, nor how a request is served.
//!
//! Modules: `commands` has one file per command; crate `serve` starts and serves sets; `client` sends requests to the
//! daemon, `remote` connects to it over TCP; `console` reads commands for a running set; `multicall` translates the
//! arguments of bcache-tools.
#![forbid(unsafe_code)]

mod client;
mod commands;
mod console;
mod interrupt;
mod multicall;
pub mod nbd_client;
mod out;
mod remote;
mod size;
mod when;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
pub use daemon::{CONFIG_KEYS, ConfigKey};
pub use serve::failure::EXIT_CODES;
use serve::{crash_log, events, exports, failure, read_only, session, superblock, takeover, tunables};

use commands::Command;
use failure::Failure;

/// bcache in userspace: a persistent cache on a fast device in front of a slow one.
///
/// A DEV is a block device or a regular file, which may be sparse. Sizes take 512, 4k, 1M, 2G. Exit code: 0
/// success, 1 failed or problem found, 2 wrong usage, 3 done and not stored by the daemon.
#[derive(Parser, Debug)]
#[command(name = "ubcache", version, propagate_version = true, disable_help_subcommand = true)]
#[command(max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The definition of the command line, for generators of man pages and completions.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the program with these arguments, the first of which is the name that it was called by.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args = match multicall::translate(args.collect()) {
        Ok(multicall::Call::Own(args)) => args,
        Ok(multicall::Call::Help(text)) => return end(out::print(text)),
        Err(failure) => return end(Err(failure)),
    };
    match Cli::try_parse_from(&args) {
        Ok(cli) => end(cli.command.run()),
        Err(e) if e.use_stderr() && e.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            out::wrong_usage(&wrong_usage(&e, &args));
            ExitCode::from(Failure::USAGE)
        }
        Err(e) => {
            // Help and version are no errors and go to stdout. A failed print cannot be reported.
            let _ = e.print();
            ExitCode::from(if e.use_stderr() { Failure::USAGE } else { 0 })
        }
    }
}

/// What the parser says of wrong arguments, and the command that explains them.
fn wrong_usage(error: &clap::Error, args: &[OsString]) -> String {
    let mut command = Cli::command();
    let mut words = vec!["ubcache".to_owned()];
    for arg in args.iter().skip(1) {
        let Some(sub) = arg.to_str().and_then(|arg| command.find_subcommand(arg)).cloned() else { break };
        words.push(sub.get_name().to_owned());
        command = sub;
    }
    let help = format!("`{} --help` explains the arguments", words.join(" "));
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    let text = text.strip_suffix("For more information, try '--help'.").unwrap_or(text).trim_end();
    let blank = if text.contains('\n') { "\n\n" } else { "; " };
    format!("{text}{blank}{help}")
}

fn end(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(text) = failure.message() {
                out::message("error", text);
            }
            ExitCode::from(failure.exit_code())
        }
    }
}
