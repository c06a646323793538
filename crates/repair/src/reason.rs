//! The reasons why a structure cannot be rebuilt.
//!
//! Owns the error type of the modules that rebuild structures. Must not know any structure.

use format::Corrupt;
use inspect::ReadError;

/// The reason why a structure is not rebuilt. It becomes a line of the report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unrepairable {
    /// What the devices have does not say what the structure was.
    #[error("{0}")]
    Evidence(String),
    /// A part of a device that has the evidence cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A structure on a device breaks a rule of the format.
    #[error(transparent)]
    Format(#[from] Corrupt),
    /// A node is damaged.
    #[error("the node in bucket {bucket} is damaged, too: {source}")]
    Node {
        /// The bucket of the node.
        bucket: format::BucketNr,
        source: Corrupt,
    },
}

impl From<&str> for Unrepairable {
    fn from(why: &str) -> Unrepairable {
        Unrepairable::Evidence(why.to_owned())
    }
}

impl From<String> for Unrepairable {
    fn from(why: String) -> Unrepairable {
        Unrepairable::Evidence(why)
    }
}
