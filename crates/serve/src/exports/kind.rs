//! A kind of export, as a line of a table.
//!
//! Owns the shape of a line: all that the program and the guide know of a kind without starting one. Must not know which kinds
//! there are.

use serde::{Serialize, Serializer};

use super::spec::{Spec, SpecError};

/// A kind of export: one line of the table [`super::KINDS`].
pub struct Kind {
    /// The name of the kind.
    pub name: &'static str,
    /// The forms of its option, each with its meaning, for help and guide.
    pub forms: &'static [(&'static str, &'static str)],
    /// The ways in which clients reach its volumes.
    pub ways: &'static [&'static WayKind],
    /// The place that an option names; `None` if the option is not of this kind.
    pub(super) parse: fn(&str) -> Option<Result<Spec, SpecError>>,
    /// An option with which the conformance suite starts the kind, with its files in this directory; the reason if it cannot
    /// be started here.
    #[cfg(test)]
    pub(super) example: fn(&std::path::Path) -> Result<String, String>,
}

/// A kind of ways in which a client reaches a volume.
#[derive(PartialEq, Eq, Debug)]
pub struct WayKind {
    /// What clients of the API call it.
    pub name: &'static str,
    /// What the client opens.
    pub opens: Opens,
}

/// What a client opens to reach a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opens {
    /// A block device of the kernel.
    BlockDevice {
        /// The beginning of the names of such devices in `/dev`.
        prefix: &'static str,
    },
    /// A file, in a directory of the export.
    File,
    /// A connection to the address, which is a URI.
    Connection,
}

impl Serialize for WayKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}
