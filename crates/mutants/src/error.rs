//! The reasons for which a run of the mutants ends early.

use std::io;
use std::path::{Path, PathBuf};

/// The reason for which a text is no list of keys with reasons.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The first reason stands before the first key.
    #[error("line {line}: a reason without a mutant")]
    NoMutant {
        /// The number of the line.
        line: usize,
    },
    /// The last keys have no reason.
    #[error("no reason for {mutants}")]
    NoReason {
        /// The keys.
        mutants: String,
    },
}

/// The reason for which a run of the mutants ends early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or a directory cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The system does not say what the working directory is.
    #[error("the working directory is unknown: {0}")]
    WorkingDirectory(#[source] io::Error),
    /// The working directory has no engine.
    #[error("{}: run it in the root of the workspace", .0.display())]
    NotTheRoot(PathBuf),
    /// A program cannot be started, or its end cannot be seen.
    #[error("{program}: {source}")]
    Process {
        /// The program.
        program: String,
        /// The error of the system.
        source: io::Error,
    },
    /// Git does not list the files.
    #[error("git ls-files: {stderr}")]
    Git {
        /// The output of git on standard error.
        stderr: String,
    },
    /// A file of the engine is not Rust.
    #[error("{}: {source}", path.display())]
    Syntax {
        /// The path.
        path: PathBuf,
        /// The error of the parser, with its place.
        source: syn::Error,
    },
    /// A result cannot be written as JSON.
    #[error("{}: {source}", path.display())]
    Json {
        /// The path of the file of the result.
        path: PathBuf,
        /// The error of the serializer.
        source: serde_json::Error,
    },
    /// A list of mutants is not as expected.
    #[error("{}: {source}", path.display())]
    List {
        /// The path.
        path: PathBuf,
        /// The line and the reason.
        source: ListError,
    },
    /// The compiler refuses the copy, and no mutant is the cause.
    #[error("the rewritten engine does not compile, and no mutant is to blame:\n{messages}")]
    NoMutantToBlame {
        /// The messages of the compiler.
        messages: String,
    },
    /// The compiler refuses the copy after all rounds.
    #[error("the rewritten engine does not compile after {rounds} rounds")]
    Rounds {
        /// The number of rounds.
        rounds: usize,
    },
    /// The compiler refuses the tests of the copy.
    #[error("the tests of the rewritten engine do not build:\n{messages}")]
    Tests {
        /// The messages of the compiler.
        messages: String,
    },
    /// Cargo fails for another reason than the code.
    #[error("cargo check failed without an error in the code")]
    Check,
    /// A suite fails without a mutant, so it would kill every mutant.
    #[error("{suite} fails without a mutant: {outcome}; see {job}")]
    SuiteFails {
        /// The name of the suite.
        suite: String,
        /// The outcome.
        outcome: String,
        /// The run that fails.
        job: String,
    },
    /// A thread that runs mutants has panicked.
    #[error("a worker panicked")]
    WorkerPanicked,
}

impl Error {
    /// Adds a path to an error of the system.
    pub fn file(path: &Path) -> impl Fn(io::Error) -> Error {
        move |source| Error::File { path: path.to_path_buf(), source }
    }

    /// Adds a path to an error of the parser.
    pub fn syntax(path: &Path) -> impl Fn(syn::Error) -> Error {
        move |source| Error::Syntax { path: path.to_path_buf(), source }
    }

    /// Adds a path to an error of the serializer.
    pub fn json(path: &Path) -> impl Fn(serde_json::Error) -> Error {
        move |source| Error::Json { path: path.to_path_buf(), source }
    }
}
