//! Failures of a command, and their exit codes.
//!
//! Errors of the other crates already name device, sector, expected and found: they become text here, and nothing is added.

use std::fmt::Display;

/// Every exit code of the program and its meaning; the guide has this table.
pub const EXIT_CODES: &[(u8, &str)] = &[
    (0, "The command succeeded."),
    (FAILED, "The command failed, was refused, or found a problem."),
    (Failure::USAGE, "The command was called with wrong arguments; nothing was done."),
    (INTERRUPTED, "A second SIGINT ended the program. Flushed data is safe."),
    (HANDED_OVER, "A second SIGUSR2 ended the program. Flushed data is safe."),
    (TERMINATED, "A second SIGTERM ended the program. Flushed data is safe."),
];

/// Exit code of a command that failed, or that found a problem.
const FAILED: u8 = 1;
/// Exit codes of a program that a second signal ended: 128 and the number of the signal, as shells have it.
pub const INTERRUPTED: u8 = 130;
/// See [`INTERRUPTED`].
pub const HANDED_OVER: u8 = 140;
/// See [`INTERRUPTED`].
pub const TERMINATED: u8 = 143;

/// The end of a command that did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// It failed, or was refused.
    Failed(String),
    /// It was called in a wrong way.
    Usage(String),
    /// A second signal ended it; the exit code is the shell's for programs that a signal ended.
    Signalled(u8),
    /// It worked and found a problem, which it has shown already.
    Found,
}

impl Failure {
    /// Exit code of wrong usage; the same that the argument parser uses.
    pub const USAGE: u8 = 2;

    /// A failure with the message of an error.
    pub fn of(e: impl Display) -> Failure {
        Failure::Failed(e.to_string())
    }

    /// Something about a path failed.
    pub fn at(path: &std::path::Path, what: impl Display, e: impl Display) -> Failure {
        Failure::Failed(format!("{}: {what}: {e}", path.display()))
    }

    /// The message, if it has not been printed already.
    pub fn message(&self) -> Option<&str> {
        match self {
            Failure::Failed(text) | Failure::Usage(text) => Some(text),
            Failure::Found | Failure::Signalled(_) => None,
        }
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Failed(_) | Failure::Found => FAILED,
            Failure::Usage(_) => Failure::USAGE,
            Failure::Signalled(code) => *code,
        }
    }
}

macro_rules! failed {
    ($($error:ty),+ $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(e: $error) -> Failure {
                Failure::of(e)
            }
        })+
    };
}

failed!(
    blockio::OpenError,
    export_fuse::FuseError,
    engine::EngineError,
    export_nbd::EndpointError,
    export_nbd::ExportError,
    export_ublk::UblkError,
    inspect::ExtractError,
    inspect::OpenError,
    inspect::OpenFileError,
    inspect::ReadError,
    io::IoError,
    io::VolumeError,
);
