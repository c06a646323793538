//! The reasons for which the checks cannot run. What a check finds is a violation, not an error.

use std::io;

use crate::exceptions::ExceptionsError;

/// The reason for which the checks cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory cannot be read.
    #[error("{path}: cannot be read: {source}")]
    Read {
        /// The path.
        path: String,
        /// The error of the system.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("{path}: cannot be written: {source}")]
    Write {
        /// The path.
        path: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The system does not say what the working directory is.
    #[error("the working directory is unknown: {0}")]
    WorkingDirectory(#[source] io::Error),
    /// A file with the ending of Rust is not Rust.
    #[error("{path}:{}: is not Rust that syn can parse: {source}", source.span().start().line)]
    Rust {
        /// The path.
        path: String,
        /// The error of the parser, with its place.
        source: syn::Error,
    },
    /// A manifest is not TOML.
    #[error("{path}: {source}")]
    Manifest {
        /// The path.
        path: String,
        /// The error of the parser, with its place.
        source: Box<toml::de::Error>,
    },
    /// The file of exceptions is not as expected.
    #[error("{path}: {source}")]
    Exceptions {
        /// The path.
        path: String,
        /// The reason.
        source: ExceptionsError,
    },
}
