//! The `--export` option: the places that it names.
//!
//! Owns the values that are parsed by the table of all kinds ([`KINDS`]). Must not know how a kind of export works.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use export_nbd::Endpoint;

use super::{Context, Export, KINDS, Kind, NbdAccess, Work};
use crate::failure::Failure;

/// The reason why a text is no `--export` option.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// It has the form of no kind.
    #[error("expected {}", or(forms))]
    NoForm {
        /// The forms of all kinds.
        forms: Vec<&'static str>,
    },
    /// It has a form of a kind, and names no place of that kind.
    #[error(transparent)]
    Place(Box<dyn Error + Send + Sync>),
}

impl SpecError {
    /// The error of a kind about a place.
    pub(super) fn place(e: impl Error + Send + Sync + 'static) -> SpecError {
        SpecError::Place(Box::new(e))
    }
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

    /// Whether volumes at both places can share it, distinguished by their names.
    fn shares(&self, other: &dyn Place) -> bool {
        let _ = other;
        false
    }

    /// Whether a start takes over the block devices of an earlier process.
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

    /// Whether volumes at both places can share it, distinguished by their names.
    pub fn shares(&self, other: &Spec) -> bool {
        self.0.shares(&*other.0)
    }

    /// Parses an option by a table of kinds.
    pub(super) fn parse(text: &str, kinds: &[Kind]) -> Result<Spec, SpecError> {
        let found = kinds.iter().find_map(|kind| (kind.parse)(text));
        found.unwrap_or_else(|| {
            let forms = kinds.iter().flat_map(|kind| kind.forms).map(|(form, _)| *form);
            Err(SpecError::NoForm { forms: forms.collect() })
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
        let said = "tape".parse::<Spec>().unwrap_err().to_string();
        assert!(said.starts_with("expected auto, ublk, ublk=NUMBER, "), "{said}");
        for (form, _) in KINDS.iter().flat_map(|kind| kind.forms) {
            assert!(said.contains(form), "{form}: {said}");
        }
    }
}
