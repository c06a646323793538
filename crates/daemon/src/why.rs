//! A failure that a state stores.
//!
//! Owns the sharing: a state is copied into views and answers, and each copy has the error that was the cause. Must not know
//! whose failure it is.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use serve::Failure;

/// The failure of a set, a device or a job. Two with the same message are equal.
#[derive(Clone, Debug)]
pub(crate) struct SharedFailure(Arc<Failure>);

impl SharedFailure {
    /// A failure that the daemon itself decides; no error is its cause.
    pub(crate) fn of_words(why: impl Into<String>) -> SharedFailure {
        SharedFailure::from(Failure::Failed(why.into()))
    }

    /// The message.
    pub(crate) fn text(&self) -> String {
        self.to_string()
    }
}

impl From<Failure> for SharedFailure {
    fn from(failure: Failure) -> SharedFailure {
        SharedFailure(Arc::new(failure))
    }
}

impl fmt::Display for SharedFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Failure::Found => f.write_str("the command found a problem; see the messages before"),
            failure => failure.fmt(f),
        }
    }
}

impl Error for SharedFailure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

impl PartialEq for SharedFailure {
    fn eq(&self, other: &SharedFailure) -> bool {
        self.0.message() == other.0.message()
    }
}

impl Eq for SharedFailure {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::errno;

    /// The state of a set, a device or a job stored only the message of its failure. A failure that is made from the state
    /// has the error of the system again.
    #[test]
    fn a_stored_failure_has_its_cause() {
        let path = std::path::Path::new("/nowhere/ssd");
        let open = || std::fs::File::open(path).expect_err("there is no such file");
        let failure = Failure::at(path, "cannot be opened", open());
        let text = failure.to_string();
        let stored = SharedFailure::from(failure);
        assert_eq!((stored.text(), errno(&stored)), (text.clone(), open().raw_os_error()));
        let again = Failure::because("set x has failed", stored.clone());
        assert_eq!(again.to_string(), format!("set x has failed: {text}"));
        assert_eq!(errno(&again), open().raw_os_error());
        assert_eq!(stored, SharedFailure::of_words(text));
        assert!(SharedFailure::from(Failure::Found).text().contains("see the messages before"));
    }
}
