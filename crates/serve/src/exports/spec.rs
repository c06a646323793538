//! The `--export` option: the table of the kinds of exports, and the places that the option names.
//!
//! Owns the table ([`KINDS`]), which is the only list of all kinds, and the values that are parsed by it. Must not know how
//! a kind of export works.

use std::any::Any;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use export_nbd::Endpoint;

use super::{Context, Export, NbdAccess, Work, auto, fuse, nbd, ublk};
use crate::failure::Failure;

/// All kinds of exports.
pub(super) const KINDS: &[Kind] = &[auto::KIND, ublk::KIND, nbd::KIND, fuse::KIND];

/// A kind of export: one line of a table.
pub(super) struct Kind {
    /// The forms of its option, for the operator.
    pub(super) forms: &'static [&'static str],
    /// The place that an option names; `None` if the option is not of this kind.
    pub(super) parse: fn(&str) -> Option<Result<Spec, SpecError>>,
}

/// The reason why a text is no `--export` option.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// It has the form of no kind.
    #[error("expected {}", or(forms))]
    NoForm {
        /// The forms of all kinds.
        forms: Vec<&'static str>,
    },
    /// It has no number of a block device.
    #[error("{found}: expected a device number below {most}")]
    Number {
        /// The text in the place of the number.
        found: String,
        /// All numbers are below this one.
        most: u32,
        /// The reason if it is no number at all.
        source: Option<std::num::ParseIntError>,
    },
    /// It names no socket and no port.
    #[error(transparent)]
    Endpoint(export_nbd::EndpointError),
}

/// The last form after an `or`.
fn or(forms: &[&str]) -> String {
    match forms {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// The place of an export, as an option names it. It is displayed as that option.
pub trait Place: Any + fmt::Debug + fmt::Display + Send + Sync {
    /// Starts an export at this place for all volumes of the context.
    ///
    /// It continues devices that an earlier process left there, if the kind can do that ([`Place::recovers`]).
    fn start<'a>(&'a self, context: &'a Context<'_>) -> Work<'a, Result<Box<dyn Export>, Failure>>;

    /// Refuses a place that this host does not offer or the operator has not permitted, before any device is opened.
    ///
    /// # Errors
    /// If the export cannot be started.
    fn check(&self, nbd: &NbdAccess) -> Result<(), Failure> {
        let _ = nbd;
        Ok(())
    }

    /// Makes what a start needs, such as a directory, for a caller without an operator.
    ///
    /// # Errors
    /// If that fails.
    fn prepare(&self) -> Result<(), Failure> {
        Ok(())
    }

    /// Whether exports cannot be at both places at the same time. Blocks while names of hosts are resolved.
    fn overlaps(&self, other: &dyn Place) -> bool {
        let _ = other;
        false
    }

    /// Whether volumes at both places can share it, told apart by their names.
    fn shares(&self, other: &dyn Place) -> bool {
        let _ = other;
        false
    }

    /// Whether a start goes on with the block devices of an earlier process.
    fn recovers(&self) -> bool {
        false
    }

    /// The socket or port on which the export listens, if it does.
    fn endpoint(&self) -> Option<&Endpoint> {
        None
    }
}

/// The place that the operator has named, of any kind.
#[derive(Clone, Debug)]
pub struct Spec(Arc<dyn Place>);

impl Spec {
    pub(super) fn new(place: impl Place) -> Spec {
        Spec(Arc::new(place))
    }

    /// Whether exports cannot be at both places at the same time. Blocks while names of hosts are resolved.
    pub fn overlaps(&self, other: &Spec) -> bool {
        self.0.overlaps(&*other.0)
    }

    /// Whether volumes at both places can share it, told apart by their names.
    pub fn shares(&self, other: &Spec) -> bool {
        self.0.shares(&*other.0)
    }

    /// Parses an option by a table of kinds.
    pub(super) fn parse(text: &str, kinds: &[Kind]) -> Result<Spec, SpecError> {
        let found = kinds.iter().find_map(|kind| (kind.parse)(text));
        found.unwrap_or_else(|| {
            Err(SpecError::NoForm { forms: kinds.iter().flat_map(|kind| kind.forms).copied().collect() })
        })
    }
}

impl std::ops::Deref for Spec {
    type Target = dyn Place;

    fn deref(&self) -> &dyn Place {
        &*self.0
    }
}

impl FromStr for Spec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Spec, SpecError> {
        Spec::parse(text, KINDS)
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_told_apart() {
        for text in ["auto", "ublk", "ublk=7", "fuse=/mnt", "nbd=/run/x", "nbd=localhost:1"] {
            let spec: Spec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(spec.overlaps(&spec), !matches!(text, "auto" | "ublk"), "{text}");
            assert_eq!(spec.recovers(), matches!(text, "auto" | "ublk" | "ublk=7"), "{text}");
            assert_eq!(spec.endpoint().is_some(), text.starts_with("nbd="), "{text}");
        }
        let parsed = |text: &str| text.parse::<Spec>().unwrap();
        for (one, other) in [("ublk=7", "ublk=8"), ("fuse=/mnt", "fuse=/srv"), ("nbd=/run/x", "fuse=/run/x")]
        {
            assert!(!parsed(one).overlaps(&parsed(other)), "{one}, {other}");
        }
        for bad in [
            "",
            "nbd",
            "nbd=",
            "fuse",
            "fuse=",
            "ublk=",
            "ublk=x",
            "ublk=-1",
            "ublk=1048576",
            "auto=x",
            "nbd=host:",
        ] {
            assert!(bad.parse::<Spec>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_socket_can_be_shared_and_a_device_number_cannot() {
        let parsed = |text: &str| text.parse::<Spec>().unwrap();
        for (one, other, expected) in [
            ("nbd=/run/x", "nbd=/run/x", true),
            ("nbd=/run/x", "nbd=/run/y", false),
            ("nbd=127.0.0.1:9", "nbd=127.0.0.1:9", true),
            ("nbd=127.0.0.1:9", "nbd=0.0.0.0:9", false),
            ("ublk=7", "ublk=7", false),
            ("fuse=/mnt", "fuse=/mnt", false),
        ] {
            assert_eq!(parsed(one).shares(&parsed(other)), expected, "{one}, {other}");
        }
    }

    #[test]
    fn an_unknown_option_is_answered_with_all_forms() {
        let expected = "expected auto, ublk, ublk=NUMBER, nbd=SOCKET, nbd=HOST:PORT or fuse=DIR";
        assert_eq!("tape".parse::<Spec>().unwrap_err().to_string(), expected);
    }
}
