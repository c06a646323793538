//! Mistakes in the configuration file.
//!
//! Owns one variant for each mistake, with its message, the line, and the error that found it. Must not know where the file is.

use std::net::{AddrParseError, SocketAddr};
use std::path::PathBuf;

use blockio::BusyPollError;
use engine::tunables::TunableError;
use serve::exports::SpecError;
use serve::ram::MemoryLimitError;
use serve::tunables::{names, unknown};

use super::MOST_ADDRESSES;
use super::keys::{CONFIG_KEYS, ConfigKey};
use super::presets::PRESETS;
use crate::expected::{expected_and_found, plain_words};

/// A mistake in the file, and its line.
#[derive(Debug, thiserror::Error)]
#[error("{}{why}", in_line(*line))]
pub(crate) struct ConfigError {
    /// Counted from 1; none if the whole file is meant.
    pub(crate) line: Option<usize>,
    #[source]
    pub(crate) why: Mistake,
}

/// What a mistake is.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Mistake {
    /// It is no TOML, or has an unknown key or a value of another type.
    #[error("{}", plain_words(.0.message()))]
    Syntax(#[source] toml::de::Error),
    /// A key has a value of another type.
    #[error("{}: expected {}{}, found {found}", key.name, key.values, example(key))]
    Type { key: &'static ConfigKey, found: String, source: Box<toml::de::Error> },
    /// A directory that the daemon makes, empties or covers.
    #[error("{key}: expected {expected}, found {found:?}")]
    Directory { key: &'static str, expected: &'static str, found: PathBuf },
    /// A setting needs another one.
    #[error("{setting}: expected {missing} as well")]
    Alone { setting: String, missing: String },
    #[error("listen: expected at most {MOST_ADDRESSES} addresses")]
    TooManyAddresses,
    #[error("listen: expected token_file as well: TCP requires a token")]
    NoToken,
    #[error(
        "listen: {found:?}: expected ADDRESS:PORT with an address in numbers, such as 127.0.0.1:9420 or [::1]:9420"
    )]
    Address { found: String, source: AddrParseError },
    #[error("listen: {0}: can be reached from other hosts: expected tls_certificate and tls_key as well")]
    OpenAddress(SocketAddr),
    #[error("busy_poll: expected \"auto\", \"never\" or microseconds")]
    BusyPollType,
    #[error("busy_poll: {0}")]
    BusyPoll(#[source] BusyPollError),
    #[error("memory_limit: {0}")]
    MemoryLimit(#[source] MemoryLimitError),
    #[error("preset {found:?}: expected one of {}", PRESETS.iter().map(|p| p.0).collect::<Vec<_>>().join(", "))]
    Preset { found: String },
    #[error("{found:?}: {source}")]
    Export { found: String, source: SpecError },
    #[error(
        "{found:?}: {place} stands for nothing: expected {{volume}}, which stands for the name of the volume"
    )]
    Placeholder { found: String, place: String },
    /// An export that the configuration does not allow. The rule is of crate `serve`, which says it in words only.
    #[error("{0}")]
    OpenExport(String),
    /// Two volumes would have one place. The rule has no error of its own.
    #[error("{0}")]
    SharedPlace(String),
    #[error("{}", unknown(name, names()))]
    NoTunable { name: String },
    #[error("{name} is a tunable of volumes: write it in [tunables] or [volume.ID.tunables]")]
    OfVolumes { name: String },
    #[error("{name} is a tunable of sets: write it in [tunables] or [set.ID.tunables]")]
    OfSets { name: String },
    /// The file would give a label without the check that no other device has it, and to every volume at once.
    #[error(
        "label is stored on the device and names one device of the host: set it with `ubcache set-label`"
    )]
    Label,
    #[error("{name}: {found} cannot be the value of a tunable")]
    TunableType { name: String, found: &'static str },
    #[error(transparent)]
    Tunable(TunableError),
}

impl Mistake {
    /// Why a text is no configuration. A value of another type is named by its key, whose values the manual has.
    pub(super) fn of(text: &str, error: toml::de::Error) -> Mistake {
        let line = error.span().and_then(|span| text.get(..span.start)?.lines().next_back());
        let name = line.and_then(|line| line.split_once('=')).map(|(name, _)| name.trim());
        let key = CONFIG_KEYS.iter().find(|key| Some(key.name) == name);
        match (key, expected_and_found(error.message())) {
            (Some(key), Some((_, found))) => Mistake::Type { key, found, source: Box::new(error) },
            _ => Mistake::Syntax(error),
        }
    }
}

/// An example of a key, if it has a default that is written as it is.
fn example(key: &ConfigKey) -> String {
    let is_bare = |text: &str| text.parse::<toml::Value>().is_ok();
    match key.default {
        "" => String::new(),
        bare if is_bare(bare) => format!(", such as `{} = {bare}`", key.name),
        text => format!(", such as `{} = \"{text}\"`", key.name),
    }
}

fn in_line(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!("line {line}: "))
}
