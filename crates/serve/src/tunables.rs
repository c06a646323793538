//! `KEY=VALUE`: finds the tunable and checks the value, before any device is opened.
//!
//! Names, units and ranges are the engine's. A few names exist for the set and for its devices; those need a prefix.

use std::str::FromStr;

use engine::tunables::{DeviceTunables, SetTunables, TunableError};
use serde::{Deserialize, Serialize};

/// Whose tunable it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// The cache set's.
    Set,
    /// That of every cached device.
    Device,
}

/// A tunable and its value; as text `KEY=VALUE`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Setting {
    /// Whose it is.
    pub owner: Owner,
    /// Its name, without a prefix.
    pub key: String,
    /// Its value, as text.
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
    /// Nothing has a tunable of this name.
    #[error("{name}: no such tunable; known are {}", names().join(", "))]
    Unknown {
        /// The name with its prefix.
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
        let owner = match s.owner {
            Owner::Set => "set",
            Owner::Device => "device",
        };
        format!("{owner}.{}={}", s.key, s.value)
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
        let of_set = SetTunables::default().get(key).is_ok();
        let of_device = DeviceTunables::default().get(key).is_ok();
        let owner = match (wanted, of_set, of_device) {
            (None, true, true) => {
                return Err(SettingError::Ambiguous { key: key.to_owned() });
            }
            (Some(Owner::Set) | None, true, _) => Owner::Set,
            (Some(Owner::Device) | None, _, true) => Owner::Device,
            _ => return Err(SettingError::Unknown { name: name.to_owned() }),
        };
        match owner {
            Owner::Set => SetTunables::default().set(key, value)?,
            Owner::Device => DeviceTunables::default().set(key, value)?,
        }
        Ok(Setting { owner, key: key.to_owned(), value: value.to_owned() })
    }
}

fn names() -> Vec<String> {
    let devices = DeviceTunables::default();
    let set = SetTunables::default();
    let mut names: Vec<String> =
        devices.iter().map(|k| k.name).chain(set.iter().map(|k| k.name)).map(str::to_owned).collect();
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
        assert!(owner("set.sequential_cutoff=5").unwrap_err().contains("no such tunable"));
        assert!(owner("nothing=5").unwrap_err().contains("writeback_percent"));
        assert!(owner("writeback_percent=x").is_err());
        assert!(owner("cache_mode=sideways").unwrap_err().contains("writeback"));
        assert!(owner("cache_mode").is_err());
    }
}
