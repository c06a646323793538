//! The configuration file: settings of the host, of single sets and of single volumes.
//!
//! Owns the syntax of the file, the presets, and the precedence of settings: preset < `[tunables]` < the section of a set
//! or volume. An unknown key, an unknown tunable or an impossible value is an error with its line. TCP requires a token,
//! and on an address that other hosts reach also TLS; a file without them is refused. Must not know what is running.

mod access;
mod directory;
mod key;
mod keys;
mod list;
mod mistake;
mod places;
mod presets;
mod tunables;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use blockio::BusyPoll;
use serde::Deserialize;
use serve::Failure;
use serve::exports::{Endpoint, SaidBy, Spec, is_remote, why_not, why_not_remote};
use serve::ram::MemoryLimit;
use serve::tunables::{Owner, owners};
use toml::Spanned;

pub(crate) use access::{NamedFile, Nbd, Tcp};
pub(crate) use key::Key;
pub use keys::{CONFIG_KEYS, ConfigKey};
pub(crate) use mistake::ConfigError;
pub(crate) use tunables::present_word;

use mistake::Mistake;
use presets::PRESETS;

/// Path of the configuration, if no other is given.
pub const DEFAULT_CONFIG: &str = "/etc/ubcache/ubcache.toml";
/// Values of tunables as text, by name.
pub(crate) type Values = BTreeMap<String, String>;

/// The whole file, before its checks.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct File {
    socket: Option<PathBuf>,
    group: Option<String>,
    state_dir: Option<Spanned<PathBuf>>,
    links: Option<Spanned<PathBuf>>,
    sysfs_view: Option<Spanned<PathBuf>>,
    #[serde(deserialize_with = "list::listen")]
    listen: Vec<Spanned<String>>,
    token_file: Option<Spanned<PathBuf>>,
    tls_certificate: Option<Spanned<PathBuf>>,
    tls_key: Option<Spanned<PathBuf>>,
    metrics_without_token: bool,
    nbd_tls_certificate: Option<Spanned<PathBuf>>,
    nbd_tls_key: Option<Spanned<PathBuf>>,
    nbd_tls_client_ca: Option<Spanned<PathBuf>>,
    nbd_allow_unauthenticated_tcp: bool,
    scan: bool,
    scan_on_events: bool,
    #[serde(deserialize_with = "list::devices")]
    devices: Vec<PathBuf>,
    #[serde(deserialize_with = "list::exports")]
    exports: Option<Vec<Spanned<String>>>,
    preset: Option<Spanned<String>>,
    drain_on_stop: bool,
    drain_deadline_s: Option<u64>,
    takeover_after_s: Option<u64>,
    busy_poll: Option<Spanned<toml::Value>>,
    memory_limit: Option<Spanned<toml::Value>>,
    tunables: BTreeMap<String, Spanned<toml::Value>>,
    set: BTreeMap<String, SetSection>,
    volume: BTreeMap<String, VolumeSection>,
}

impl File {
    /// The exports of the sections of volumes that name any.
    fn volumes_with_exports(&self) -> impl Iterator<Item = (&str, &[Spanned<String>])> {
        self.volume.iter().filter_map(|(id, section)| Some((&**id, section.exports.as_deref()?)))
    }
}

/// A section `[set.…]`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct SetSection {
    tunables: BTreeMap<String, Spanned<toml::Value>>,
}

/// A section `[volume.…]`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct VolumeSection {
    preset: Option<Spanned<String>>,
    #[serde(deserialize_with = "list::exports")]
    exports: Option<Vec<Spanned<String>>>,
    tunables: BTreeMap<String, Spanned<toml::Value>>,
}

#[derive(Clone, PartialEq, Debug, Default)]
struct Section {
    exports: Option<Vec<String>>,
    preset: Values,
    tunables: Values,
}

/// The contents of a configuration file; [`Config::default`] applies without a file.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Config {
    pub(crate) socket: Option<PathBuf>,
    pub(crate) group: Option<String>,
    pub(crate) state_dir: Option<PathBuf>,
    /// Directory of the links to block devices; an empty path for no links.
    pub(crate) links: Option<PathBuf>,
    /// Directory of the sysfs view, if the view is enabled.
    pub(crate) sysfs_view: Option<PathBuf>,
    /// TCP, if it is enabled.
    pub(crate) tcp: Option<Tcp>,
    pub(crate) nbd: Nbd,
    pub(crate) scan: bool,
    /// Whether devices that are plugged in later are registered, too.
    pub(crate) scan_on_events: bool,
    pub(crate) devices: Vec<PathBuf>,
    pub(crate) drain_on_stop: bool,
    pub(crate) drain_deadline_s: u64,
    /// Seconds for which a disk waits for its own set before another set of the group takes it over.
    pub(crate) takeover_after_s: u64,
    /// Whether the threads of sets poll for work before they sleep.
    pub(crate) busy_poll: BusyPoll,
    /// The memory for which the process sizes its reserves, buffers and caches, if it is limited.
    pub(crate) memory_limit: Option<MemoryLimit>,
    exports: Vec<String>,
    everywhere: Section,
    sets: BTreeMap<String, Section>,
    volumes: BTreeMap<String, Section>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            socket: None,
            group: None,
            state_dir: None,
            links: None,
            sysfs_view: None,
            tcp: None,
            nbd: Nbd::default(),
            scan: false,
            scan_on_events: false,
            devices: Vec::new(),
            drain_on_stop: false,
            drain_deadline_s: 300,
            takeover_after_s: 30,
            busy_poll: BusyPoll::Auto,
            memory_limit: None,
            exports: vec![serve::exports::DEFAULT.into()],
            everywhere: Section::default(),
            sets: BTreeMap::new(),
            volumes: BTreeMap::new(),
        }
    }
}

/// Limit of the addresses of TCP.
const MOST_ADDRESSES: usize = 16;

impl Config {
    /// Reads a configuration. Without a file at the default path, the defaults apply.
    ///
    /// # Errors
    /// If the file cannot be read or is not valid; the message names file and line.
    pub(crate) fn read(path: &Path) -> Result<Config, Failure> {
        match std::fs::read_to_string(path) {
            Ok(text) => Config::parse(&text).map_err(|e| Failure::because(path.display(), e)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && path == Path::new(DEFAULT_CONFIG) => {
                Ok(Config::default())
            }
            Err(e) => Err(Failure::at(path, "cannot be read", e)),
        }
    }

    pub(crate) fn parse(text: &str) -> Result<Config, ConfigError> {
        let file: File = toml::from_str(text).map_err(|e| ConfigError {
            line: e.span().map(|span| line_of(text, span.start)),
            why: Mistake::of(text, e),
        })?;
        let parser = Parser { text };
        let tcp = parser.tcp(&file)?;
        let nbd = parser.nbd(&file)?;
        if let Some((spec, why)) = places::shared(file.exports.as_deref(), file.volumes_with_exports()) {
            return Err(parser.at(spec, Mistake::SharedPlace(why)));
        }
        let mut config = Config {
            socket: file.socket.clone(),
            group: file.group.clone(),
            state_dir: parser
                .path(file.state_dir.as_ref(), |path| directory::check_own("state_dir", path))?,
            links: parser.path(file.links.as_ref(), directory::check_links)?,
            sysfs_view: parser
                .path(file.sysfs_view.as_ref(), |path| directory::check_own("sysfs_view", path))?,
            tcp,
            nbd,
            scan: file.scan,
            scan_on_events: file.scan_on_events,
            devices: file.devices.clone(),
            drain_on_stop: file.drain_on_stop,
            ..Config::default()
        };
        config.set_times(&file);
        if let Some(busy_poll) = &file.busy_poll {
            config.busy_poll = parser.busy_poll(busy_poll)?;
        }
        if let Some(limit) = &file.memory_limit {
            let parsed = match limit.get_ref() {
                toml::Value::String(text) => text.parse(),
                toml::Value::Integer(bytes) => bytes.to_string().parse(),
                toml::Value::Boolean(value) => value.to_string().parse(),
                other => other.type_str().parse(),
            };
            config.memory_limit = Some(parsed.map_err(|e| parser.at(limit, Mistake::MemoryLimit(e)))?);
        }
        if let Some(exports) = &file.exports {
            config.exports = parser.exports(exports, &config.nbd)?;
        }
        config.everywhere.preset = parser.preset(file.preset.as_ref())?;
        config.everywhere.tunables = parser.values(&file.tunables, None)?;
        for (id, section) in &file.set {
            let tunables = parser.values(&section.tunables, Some(Owner::Set))?;
            config.sets.insert(id.to_lowercase(), Section { tunables, ..Section::default() });
        }
        for (id, section) in &file.volume {
            let section = Section {
                exports: section.exports.as_ref().map(|e| parser.exports(e, &config.nbd)).transpose()?,
                preset: parser.preset(section.preset.as_ref())?,
                tunables: parser.values(&section.tunables, Some(Owner::Device))?,
            };
            config.volumes.insert(id.to_lowercase(), section);
        }
        parser.fit_together(&file, &config)?;
        Ok(config)
    }

    fn set_times(&mut self, file: &File) {
        self.drain_deadline_s = file.drain_deadline_s.unwrap_or(self.drain_deadline_s);
        self.takeover_after_s = file.takeover_after_s.unwrap_or(self.takeover_after_s);
    }

    fn section(&self, key: &Key) -> Option<&Section> {
        let sections = if key.set { &self.sets } else { &self.volumes };
        sections.get(&key.id).or_else(|| sections.get(&key.section_label()?))
    }

    /// Tunables of a set or volume: the common ones, overridden by those of its section.
    pub(crate) fn tunables(&self, key: &Key) -> Values {
        let section = self.section(key);
        let own = section.into_iter().flat_map(|s| s.preset.iter().chain(&s.tunables));
        let all = self.everywhere.preset.iter().chain(&self.everywhere.tunables).chain(own);
        let belongs = |name: &str| {
            let (set, device) = owners(name);
            if key.set { set } else { device }
        };
        all.filter(|(k, _)| belongs(k)).map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// Whether any set or volume has a section of its own.
    pub(crate) fn has_sections(&self) -> bool {
        !self.volumes.is_empty() || !self.sets.is_empty()
    }

    /// Whether a section names this volume by its UUID, or by set and slot.
    pub(crate) fn has_own_section(&self, volume: &str) -> bool {
        self.volumes.contains_key(volume)
    }

    /// Whether the label of a volume selects its section.
    pub(crate) fn has_section_of_label(&self, key: &Key) -> bool {
        let named = |label: String| self.volumes.contains_key(&label);
        !self.volumes.contains_key(&key.id) && key.section_label().is_some_and(named)
    }

    /// Messages about the sections that apply to none of these volumes and sets.
    pub(crate) fn unmatched(&self, known: &[(Key, Option<String>)]) -> Vec<String> {
        let volumes = places::unmatched_volumes(self.volumes.keys(), known);
        volumes.into_iter().chain(places::unmatched_sets(self.sets.keys(), known)).collect()
    }

    /// The key of the configuration that has the exports of a volume, as text.
    pub(crate) fn exports_key(&self, key: &Key) -> String {
        let has_own = |name: &String| self.volumes.get(name).is_some_and(|s| s.exports.is_some());
        match [Some(key.id.clone()), key.section_label()].into_iter().flatten().find(has_own) {
            Some(name) => format!("`exports` in {}", section(&name)),
            None => "`exports`".to_owned(),
        }
    }

    /// The exports of a volume with this name, which replaces `{volume}`.
    pub(crate) fn exports(&self, key: &Key, name: &str) -> Vec<String> {
        let own = self.section(key).and_then(|s| s.exports.as_ref());
        own.unwrap_or(&self.exports).iter().map(|e| e.replace("{volume}", name)).collect()
    }
}

/// The section of a volume with this name, as it is written.
pub(crate) fn section(name: &str) -> String {
    let is_bare = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if is_bare { format!("[volume.{name}]") } else { format!("[volume.{name:?}]") }
}

struct Parser<'a> {
    text: &'a str,
}

impl Parser<'_> {
    fn at<T>(&self, place: &Spanned<T>, why: Mistake) -> ConfigError {
        ConfigError { line: Some(line_of(self.text, place.span().start)), why }
    }

    fn named(&self, file: &Spanned<PathBuf>) -> NamedFile {
        NamedFile { path: file.get_ref().clone(), line: line_of(self.text, file.span().start) }
    }

    /// A path, unless `check` refuses it.
    fn path(
        &self,
        path: Option<&Spanned<PathBuf>>,
        check: impl Fn(&Path) -> Result<(), Mistake>,
    ) -> Result<Option<PathBuf>, ConfigError> {
        let Some(path) = path else { return Ok(None) };
        check(path.get_ref()).map_err(|mistake| self.at(path, mistake))?;
        Ok(Some(path.get_ref().clone()))
    }

    /// The certificate file and the key file, of which both or none must be named. The names of the settings begin with
    /// `prefix`.
    fn tls(
        &self,
        prefix: &str,
        certificate: Option<&Spanned<PathBuf>>,
        key: Option<&Spanned<PathBuf>>,
    ) -> Result<Option<(NamedFile, NamedFile)>, ConfigError> {
        let expected = |alone, is, needs| {
            let (setting, missing) = (format!("{prefix}{is}"), format!("{prefix}{needs}"));
            self.at(alone, Mistake::Alone { setting, missing })
        };
        match (certificate, key) {
            (Some(certificate), Some(key)) => Ok(Some((self.named(certificate), self.named(key)))),
            (Some(alone), None) => Err(expected(alone, "tls_certificate", "tls_key")),
            (None, Some(alone)) => Err(expected(alone, "tls_key", "tls_certificate")),
            (None, None) => Ok(None),
        }
    }

    fn nbd(&self, file: &File) -> Result<Nbd, ConfigError> {
        let tls = self.tls("nbd_", file.nbd_tls_certificate.as_ref(), file.nbd_tls_key.as_ref())?;
        match &file.nbd_tls_client_ca {
            Some(ca) if tls.is_none() => {
                let missing = "nbd_tls_certificate and nbd_tls_key".to_owned();
                Err(self.at(ca, Mistake::Alone { setting: "nbd_tls_client_ca".into(), missing }))
            }
            ca => Ok(Nbd {
                tls,
                client_ca: ca.as_ref().map(|ca| self.named(ca)),
                allow_unauthenticated: file.nbd_allow_unauthenticated_tcp,
            }),
        }
    }

    fn tcp(&self, file: &File) -> Result<Option<Tcp>, ConfigError> {
        let tls = self.tls("", file.tls_certificate.as_ref(), file.tls_key.as_ref())?;
        let Some(first) = file.listen.first() else { return Ok(None) };
        if let Some(more) = file.listen.get(MOST_ADDRESSES) {
            return Err(self.at(more, Mistake::TooManyAddresses));
        }
        let Some(token_file) = &file.token_file else {
            return Err(self.at(first, Mistake::NoToken));
        };
        let mut listen = Vec::new();
        for text in &file.listen {
            let found = || text.get_ref().clone();
            let no_address = |source| self.at(text, Mistake::Address { found: found(), source });
            let address: SocketAddr = text.get_ref().parse().map_err(no_address)?;
            if tls.is_none() && !address.ip().to_canonical().is_loopback() {
                return Err(self.at(text, Mistake::OpenAddress(address)));
            }
            listen.push(address);
        }
        let metrics_without_token = file.metrics_without_token;
        Ok(Some(Tcp { listen, token_file: self.named(token_file), tls, metrics_without_token }))
    }

    fn busy_poll(&self, value: &Spanned<toml::Value>) -> Result<BusyPoll, ConfigError> {
        let text = match value.get_ref() {
            toml::Value::String(text) => text.clone(),
            toml::Value::Integer(us) => us.to_string(),
            _ => return Err(self.at(value, Mistake::BusyPollType)),
        };
        text.parse().map_err(|e| self.at(value, Mistake::BusyPoll(e)))
    }

    fn preset(&self, name: Option<&Spanned<String>>) -> Result<Values, ConfigError> {
        let Some(name) = name else { return Ok(Values::new()) };
        let found = PRESETS.iter().find(|(n, _)| n == name.get_ref());
        let (_, values) =
            found.ok_or_else(|| self.at(name, Mistake::Preset { found: name.get_ref().clone() }))?;
        Ok(values.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    fn exports(&self, specs: &[Spanned<String>], nbd: &Nbd) -> Result<Vec<String>, ConfigError> {
        let checked = specs.iter().map(|text| {
            let found = || text.get_ref().clone();
            let no_export = |source| self.at(text, Mistake::Export { found: found(), source });
            let spec: Spec = text.get_ref().parse().map_err(no_export)?;
            if let Some(place) = places::unknown_placeholder(text.get_ref()) {
                return Err(self.at(text, Mistake::Placeholder { found: found(), place: place.to_owned() }));
            }
            match spec.endpoint() {
                Some(endpoint @ Endpoint::Tcp { .. }) if !nbd.opens_tcp() => {
                    let why = why_not(endpoint, nbd.tls.is_some(), SaidBy::Configuration);
                    Err(self.at(text, Mistake::OpenExport(why)))
                }
                Some(endpoint) if !nbd.has_certificates() && is_remote(endpoint) => {
                    Err(self.at(text, Mistake::OpenExport(why_not_remote(endpoint))))
                }
                _ => Ok(text.get_ref().clone()),
            }
        });
        checked.collect()
    }
}

/// The line that contains byte `at`, counted from 1.
fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|b| *b == b'\n').count() + 1
}

#[cfg(test)]
mod tests;
