//! Errors outside of requests. Each has the next step for the operator.
//!
//! Owns the texts of these errors. Must not know the steps in which they occur.

use std::io;
use std::path::PathBuf;

use blockio::users::{User, in_words};

/// Why a file system or a loop device could not be set up or removed.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// The host offers no FUSE, or not to this user.
    #[error("FUSE cannot be used: {why}")]
    NoFuse {
        /// The reason, and what to do.
        why: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The host offers no loop devices, or not to this user.
    #[error("loop devices cannot be used: {why}")]
    NoLoop {
        /// The reason, and what to do.
        why: String,
        /// The error of the system.
        source: io::Error,
    },
    /// A volume's name cannot be a file's name.
    #[error("a volume named {0:?} cannot be a file")]
    BadName(String),
    /// Two volumes have the same name.
    #[error("two volumes are named {0:?}")]
    NameTaken(String),
    /// The mount point cannot be used.
    #[error("cannot mount at {dir}: {source}")]
    Directory {
        /// The mount point.
        dir: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The directory of the mount point has files, which the mount would hide.
    #[error("cannot mount at {0}: the directory is not empty, and its files would be hidden")]
    NotEmpty(PathBuf),
    /// Another file system is mounted at the mount point.
    #[error("cannot mount at {dir}: {what} is mounted there; unmount it first")]
    Occupied {
        /// The mount point.
        dir: PathBuf,
        /// The file system that is mounted there.
        what: String,
    },
    /// The system refused to mount.
    #[error("cannot mount at {dir}: {source}")]
    Mount {
        /// The mount point.
        dir: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The program `fusermount3` refused to mount.
    #[error("cannot mount at {dir}: fusermount3: {message}")]
    Helper {
        /// The mount point.
        dir: PathBuf,
        /// The output of the program, which is all that it tells.
        message: String,
    },
    /// Nothing can be received from the program that mounts for users.
    #[error("cannot mount at {dir}: fusermount3: {source}")]
    HelperLost {
        /// The mount point.
        dir: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The system refused to unmount.
    #[error("cannot unmount {dir}: {source}")]
    Unmount {
        /// The mount point.
        dir: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A step in the setup or removal of a loop device failed.
    #[error("{device}: {step} failed: {source}")]
    Loop {
        /// The loop device, or the file for which one is set up.
        device: PathBuf,
        /// The failed step.
        step: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// A loop device is in use.
    #[error("{device} is in use: {}", in_words(.users))]
    LoopInUse {
        /// The loop device.
        device: PathBuf,
        /// The users.
        users: Vec<User>,
    },
    /// A file of the file system is in use.
    #[error("{dir} is in use: {}", in_words(.users))]
    FilesInUse {
        /// The mount point.
        dir: PathBuf,
        /// The users.
        users: Vec<User>,
    },
    /// The threads that answer requests could not be started, or ended with an error.
    #[error("the FUSE session at {dir} failed: {source}")]
    Session {
        /// The mount point.
        dir: PathBuf,
        /// The error.
        source: io::Error,
    },
}
