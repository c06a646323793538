//! Failures of a command, and their exit codes.
//!
//! Owns the end of a command that did not succeed: its message, and the error that is its cause. Errors of the other crates
//! already name device, sector, expected and found, so their messages are printed as they are.

use std::error::Error;
use std::fmt;
use std::path::Path;

/// Every exit code of the program and its meaning; the guide has this table.
pub const EXIT_CODES: &[(u8, &str)] = &[
    (0, "The command succeeded."),
    (FAILED, "The command failed, was refused, or found a problem."),
    (Failure::USAGE, "The command was called with wrong arguments; nothing was done."),
    (
        NOT_STORED,
        "The command did its work, and the daemon could not store it: its next start may not know of it.",
    ),
    (
        INTERRUPTED,
        "SIGINT ended the program; if the first one stops its work in order, the second one. Flushed data is safe. A \
         command that the daemon carries out may go on.",
    ),
    (HANDED_OVER, "A second SIGUSR2 ended the program. Flushed data is safe."),
    (TERMINATED, "SIGTERM ended the program, in the cases of 130. Flushed data is safe."),
];

/// Exit code of a command that failed, or that found a problem.
const FAILED: u8 = 1;
/// Exit code of a command whose work is done and not stored.
const NOT_STORED: u8 = 3;
/// Exit code of a program that SIGINT has ended: 128 and the number of the signal, as shells report it.
pub const INTERRUPTED: u8 = 130;
/// Exit code after a second SIGUSR2: 128 and the number of the signal.
pub const HANDED_OVER: u8 = 140;
/// Exit code of a program that SIGTERM has ended: 128 and the number of the signal.
pub const TERMINATED: u8 = 143;

/// The end of a command that did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// The command failed or was refused, and no other error is the cause.
    Failed(String),
    /// The command failed because of an error.
    Caused {
        /// The whole message: what failed, and the message of the cause.
        text: String,
        /// The error that is the cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The command was called in a wrong way.
    Usage(String),
    /// It was called with a value that an error refuses.
    BadValue {
        /// The whole message.
        text: String,
        /// The error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A signal ended the command, with this exit code.
    Signalled(u8),
    /// The command succeeded and found a problem, which it has printed already.
    Found,
    /// The command did its work, and the daemon could not store it.
    NotStored(String),
    /// It failed under the name of a program of bcache-tools, and ends with the exit code of that program.
    OfBcacheTools(u8, String),
}

impl Failure {
    /// Exit code of wrong usage, which the argument parser uses, too.
    pub const USAGE: u8 = 2;

    /// A failure whose message is that of an error.
    pub fn of(e: impl Into<Box<dyn Error + Send + Sync>>) -> Failure {
        let source = e.into();
        Failure::Caused { text: source.to_string(), source }
    }

    /// A failure with a message of its own that contains the text of the error, or says in other words what it means.
    pub fn caused(text: impl Into<String>, e: impl Into<Box<dyn Error + Send + Sync>>) -> Failure {
        Failure::Caused { text: text.into(), source: e.into() }
    }

    /// Wrong usage: the value is refused by an error.
    pub fn bad_value(e: impl Into<Box<dyn Error + Send + Sync>>) -> Failure {
        let source = e.into();
        Failure::BadValue { text: source.to_string(), source }
    }

    /// The failure of `what` because of an error.
    pub fn because(what: impl fmt::Display, e: impl Into<Box<dyn Error + Send + Sync>>) -> Failure {
        let source = e.into();
        Failure::Caused { text: format!("{what}: {source}"), source }
    }

    /// The failure of `what` at a path because of an error.
    pub fn at(path: &Path, what: impl fmt::Display, e: impl Into<Box<dyn Error + Send + Sync>>) -> Failure {
        Failure::because(format_args!("{}: {what}", path.display()), e)
    }

    /// The message; `None` if it has been printed already.
    pub fn message(&self) -> Option<&str> {
        match self {
            Failure::Failed(text)
            | Failure::Caused { text, .. }
            | Failure::Usage(text)
            | Failure::BadValue { text, .. }
            | Failure::NotStored(text)
            | Failure::OfBcacheTools(_, text) => Some(text),
            Failure::Found | Failure::Signalled(_) => None,
        }
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Failed(_) | Failure::Caused { .. } | Failure::Found => FAILED,
            Failure::Usage(_) | Failure::BadValue { .. } => Failure::USAGE,
            Failure::NotStored(_) => NOT_STORED,
            Failure::Signalled(code) | Failure::OfBcacheTools(code, _) => *code,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message().unwrap_or("ended"))
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Failure::Caused { source, .. } | Failure::BadValue { source, .. } => Some(&**source),
            Failure::Failed(_)
            | Failure::Usage(_)
            | Failure::Signalled(_)
            | Failure::Found
            | Failure::NotStored(_)
            | Failure::OfBcacheTools(..) => None,
        }
    }
}

/// Makes errors failures whose message is that of the error. Each kind of export does so for its own errors.
macro_rules! failed {
    ($($error:ty),+ $(,)?) => {
        $(impl From<$error> for $crate::failure::Failure {
            fn from(e: $error) -> $crate::failure::Failure {
                $crate::failure::Failure::of(e)
            }
        })+
    };
}

pub(crate) use failed;

failed!(
    blockio::OpenError,
    engine::EngineError,
    inspect::ExtractError,
    inspect::OpenError,
    inspect::OpenFileError,
    inspect::ReadError,
    io::IoError,
    io::VolumeError,
);

#[cfg(test)]
mod tests {
    use super::*;

    /// The error number of the system in the causes of a failure.
    fn errno(failure: &Failure) -> Option<i32> {
        let mut at: Option<&(dyn Error + 'static)> = failure.source();
        while let Some(e) = at {
            let system = e.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
            let device = e.downcast_ref::<io::IoError>().map(|e| e.errno);
            let engine = match e.downcast_ref::<engine::EngineError>() {
                Some(engine::EngineError::Io(e)) => Some(e.errno),
                _ => None,
            };
            if let Some(errno) = system.or(device).or(engine) {
                return Some(errno);
            }
            at = e.source();
        }
        None
    }

    /// A caller can reach the error number of the system in a failure, however the failure was made.
    #[test]
    fn a_failure_keeps_its_cause() {
        let path = Path::new("/dev/null/missing");
        let opened = || std::fs::File::open(path).expect_err("/dev/null is not a directory");
        let at = Failure::at(path, "cannot be opened", opened());
        assert_eq!(at.message(), Some(&*format!("/dev/null/missing: cannot be opened: {}", opened())));
        let failed = io::FailedOperation {
            device: "ssd".into(),
            op: io::Op::Flush,
            sector: format::Sector(0),
            sectors: format::Sectors(0),
            errno: 5,
        };
        let device = io::IoError::from(failed);
        let (engine, text) = (engine::EngineError::from(device.clone()), device.to_string());
        for (failure, expected) in [
            (at, opened().raw_os_error()),
            (Failure::of(opened()), opened().raw_os_error()),
            (Failure::because("it", device.clone()), Some(5)),
            (Failure::from(engine), Some(5)),
            (Failure::from(device), Some(5)),
            (Failure::Failed("refused".into()), None),
        ] {
            assert_eq!(errno(&failure), expected, "{failure}");
            assert_eq!(failure.exit_code(), FAILED);
        }
        assert_eq!(Failure::because("it", io::VolumeError::no_space("full")).to_string(), "it: full");
        assert_eq!(text, "ssd: flush failed: Input/output error (os error 5)");
    }
}
