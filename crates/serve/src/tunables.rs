//! `KEY=VALUE`: finds the tunable and checks the value, before any device is opened.
//!
//! Owns the syntax. Names, units and ranges are the engine's. A few names exist for the set and for its devices; those need
//! a prefix. Must not know how a tunable is applied.

use std::fmt;
use std::str::FromStr;

use engine::tunables::{DeviceTunables, SetTunables, TunableError, nearest};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::plain;

/// Whose tunable it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// The cache set.
    Set,
    /// Every cached device.
    Device,
}

/// Refuses a label that could not be used as a name.
///
/// # Errors
/// If commands would read it as something else.
pub fn label_is_fit(label: &str) -> Result<(), Failure> {
    if plain::is_new_label(label) {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "label: expected a letter or digit, then letters, digits, . _ + : @ - and inner blanks, such as films-2, and neither a \
         UUID nor a volume's name such as bcache0; found {label:?}"
    )))
}

impl Owner {
    fn plural(self) -> &'static str {
        match self {
            Owner::Set => "sets",
            Owner::Device => "devices",
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Owner::Set => "set",
            Owner::Device => "device",
        })
    }
}

/// What becomes of a number out of range.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Beyond {
    /// It is refused, and nothing changes.
    #[default]
    Refused,
    /// The nearest number in the range is set, as the kernel does it.
    Clamped,
}

/// Sets values whose ranges can depend on each other: those that are refused are tried again after the others. Returns the
/// values that are refused in the end.
pub async fn in_any_order<T, E>(
    wishes: Vec<T>,
    mut set: impl AsyncFnMut(&T) -> Result<(), E>,
) -> Vec<(T, E)> {
    let mut left = wishes;
    loop {
        let (before, mut refused) = (left.len(), Vec::new());
        for wish in left {
            if let Err(e) = set(&wish).await {
                refused.push((wish, e));
            }
        }
        if refused.is_empty() || refused.len() == before {
            return refused;
        }
        left = refused.into_iter().map(|(wish, _)| wish).collect();
    }
}

/// Whether `name` is a tunable of sets, and of devices.
pub fn owners(name: &str) -> (bool, bool) {
    (SetTunables::default().get(name).is_ok(), DeviceTunables::default().get(name).is_ok())
}

/// What a name of a tunable, given for a set or a volume, is meant to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meant {
    /// A tunable of it.
    Own,
    /// A tunable of the other kind of owner.
    Other,
    /// Its tunable that is spelled nearly so.
    Near(&'static str),
    /// The tunable of the other kind of owner that is spelled nearly so.
    NearOfOther(&'static str),
    /// No tunable is spelled nearly so.
    Unknown,
}

/// What `name`, given for a set or a volume, is meant to be.
pub fn meant(name: &str, owner: Owner) -> Meant {
    let (of_set, of_device) = owners(name);
    let (sets, devices) = (SetTunables::default(), DeviceTunables::default());
    let near_set = || nearest(name, sets.iter().map(|k| k.name));
    let near_device = || nearest(name, devices.iter().map(|k| k.name));
    let (is_own, is_other) = match owner {
        Owner::Set => (of_set, of_device),
        Owner::Device => (of_device, of_set),
    };
    let near = |own: bool| if own == (owner == Owner::Set) { near_set() } else { near_device() };
    match (is_own, is_other) {
        (true, _) => Meant::Own,
        (false, true) => Meant::Other,
        _ => match (near(true), near(false)) {
            (Some(own), _) => Meant::Near(own),
            (None, Some(other)) => Meant::NearOfOther(other),
            (None, None) => Meant::Unknown,
        },
    }
}

/// What to say of a name that none of `names` is: the name that is spelled nearly so, or all of them.
pub fn unknown(name: &str, names: Vec<&'static str>) -> String {
    match nearest(name, names.iter().copied()) {
        Some(nearest) => format!("unknown tunable {name}; did you mean {nearest}?"),
        None => format!("unknown tunable {name}; known are {}", names.join(", ")),
    }
}

/// A tunable and its value; as text `KEY=VALUE`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Setting {
    /// The owner of the tunable.
    pub owner: Owner,
    /// Name of the tunable, without a prefix.
    pub key: String,
    /// Value of the tunable, as text.
    pub value: String,
}

/// The reason why a text is no setting.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SettingError {
    /// There is no `=`.
    #[error("expected KEY=VALUE")]
    NoValue,
    /// Both the set and its devices have a tunable of this name.
    #[error("{key} is a tunable of sets and of devices: write set.{key} or device.{key}")]
    Ambiguous {
        /// The name.
        key: String,
    },
    /// The name has the prefix of the other owner.
    #[error("{key} is a tunable of {}: write {right}.{key}", right.plural())]
    OfOther {
        /// The name.
        key: String,
        /// Whose it is.
        right: Owner,
    },
    /// Nothing has a tunable of this name.
    #[error("{}", unknown(name, names()))]
    Unknown {
        /// The name.
        name: String,
    },
    /// The tunable cannot have the value.
    #[error(transparent)]
    Value(#[from] TunableError),
}

impl TryFrom<String> for Setting {
    type Error = SettingError;

    fn try_from(text: String) -> Result<Setting, SettingError> {
        text.parse()
    }
}

impl From<Setting> for String {
    fn from(s: Setting) -> String {
        format!("{}.{}={}", s.owner, s.key, s.value)
    }
}

impl FromStr for Setting {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Setting, SettingError> {
        let (name, value) = text.split_once('=').ok_or(SettingError::NoValue)?;
        let (wanted, key) = match name.split_once('.') {
            Some(("set", key)) => (Some(Owner::Set), key),
            Some(("device", key)) => (Some(Owner::Device), key),
            _ => (None, name),
        };
        let (of_set, of_device) = owners(key);
        let owner = match (wanted, of_set, of_device) {
            (None, true, true) => {
                return Err(SettingError::Ambiguous { key: key.to_owned() });
            }
            (Some(Owner::Set) | None, true, _) => Owner::Set,
            (Some(Owner::Device) | None, _, true) => Owner::Device,
            (Some(_), true, _) => {
                return Err(SettingError::OfOther { key: key.to_owned(), right: Owner::Set });
            }
            (Some(_), _, true) => {
                return Err(SettingError::OfOther { key: key.to_owned(), right: Owner::Device });
            }
            (_, false, false) => return Err(SettingError::Unknown { name: key.to_owned() }),
        };
        match owner {
            Owner::Set => SetTunables::check_alone(key, value)?,
            Owner::Device => DeviceTunables::check_alone(key, value)?,
        }
        Ok(Setting { owner, key: key.to_owned(), value: value.to_owned() })
    }
}

/// The names of all tunables, in order.
pub fn names() -> Vec<&'static str> {
    let devices = DeviceTunables::default();
    let set = SetTunables::default();
    let mut names: Vec<&'static str> =
        devices.iter().map(|k| k.name).chain(set.iter().map(|k| k.name)).collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_find_their_owner() {
        let owner = |text: &str| text.parse::<Setting>().map(|s| s.owner).map_err(|e| e.to_string());
        assert_eq!(owner("sequential_cutoff=0"), Ok(Owner::Device));
        assert_eq!(owner("journal_delay_ms=5"), Ok(Owner::Set));
        assert_eq!(owner("set.io_error_limit=5"), Ok(Owner::Set));
        assert_eq!(owner("device.io_error_limit=5"), Ok(Owner::Device));
        assert!(owner("io_error_limit=5").unwrap_err().contains("set.io_error_limit"));
        let other = owner("set.sequential_cutoff=5").unwrap_err();
        assert_eq!(other, "sequential_cutoff is a tunable of devices: write device.sequential_cutoff");
        let other = owner("device.journal_delay_ms=5").unwrap_err();
        assert_eq!(other, "journal_delay_ms is a tunable of sets: write set.journal_delay_ms");
        assert!(owner("nothing=5").unwrap_err().contains("writeback_percent"));
        assert!(owner("writeback_percent=x").is_err());
        assert!(owner("cache_mode=sideways").unwrap_err().contains("writeback"));
        assert!(owner("cache_mode").is_err());
    }

    /// A name with a spelling mistake was answered with a list of fifty names.
    #[test]
    fn a_spelling_mistake_is_answered_with_the_name() {
        for (name, nearest) in [
            ("writeback_precent", "writeback_percent"),
            ("set.journal_delayms", "journal_delay_ms"),
            ("cachemode", "cache_mode"),
        ] {
            let said = format!("{name}=5").parse::<Setting>().expect_err(name).to_string();
            let (_, plain) = name.split_once('.').unwrap_or(("", name));
            assert_eq!(said, format!("unknown tunable {plain}; did you mean {nearest}?"));
        }
    }

    /// A misspelled tunable of a volume, given to a set, was answered with a list of all tunables of the set.
    #[test]
    fn a_tunable_of_the_other_owner_is_found() {
        for (name, owner, expected) in [
            ("journal_delay_ms", Owner::Set, Meant::Own),
            ("journal_delay_ms", Owner::Device, Meant::Other),
            ("io_disable", Owner::Device, Meant::Own),
            ("journal_dealy_ms", Owner::Set, Meant::Near("journal_delay_ms")),
            ("journal_dealy_ms", Owner::Device, Meant::NearOfOther("journal_delay_ms")),
            ("writeback_precent", Owner::Set, Meant::NearOfOther("writeback_percent")),
            ("colour", Owner::Set, Meant::Unknown),
        ] {
            assert_eq!(meant(name, owner), expected, "{name} of {owner}");
        }
    }

    /// 99 was taken as 40 without a word. A value that depends on another tunable is checked when that is known.
    #[test]
    fn a_value_out_of_range_is_refused() {
        let said = |text: &str| text.parse::<Setting>().map(drop).map_err(|e| e.to_string());
        assert!(said("writeback_percent=99").unwrap_err().contains("expected 0 to 70 %, found 99"));
        assert!(said("journal_delay_ms=70000").unwrap_err().contains("expected 0 to 65535 ms, found 70000"));
        assert_eq!(said("writeback_percent=50"), Ok(()));
    }
}
