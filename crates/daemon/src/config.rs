//! The configuration file: settings of the host, of single sets and of single volumes.
//!
//! Owns the syntax of the file, the presets, and the precedence of settings: preset < `[tunables]` < the section of a set
//! or volume. An unknown key, an unknown tunable or an impossible value is an error with its line. TCP requires a token,
//! and on an address that other hosts reach also TLS; a file without them is refused. Must not know what is running.

mod access;
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
    state_dir: Option<PathBuf>,
    links: Option<PathBuf>,
    sysfs_view: Option<PathBuf>,
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
            state_dir: file.state_dir.clone(),
            links: file.links.clone(),
            sysfs_view: file.sysfs_view.clone(),
            tcp,
            nbd,
            scan: file.scan,
            scan_on_events: file.scan_on_events,
            devices: file.devices.clone(),
            drain_on_stop: file.drain_on_stop,
            drain_deadline_s: file.drain_deadline_s.unwrap_or(300),
            ..Config::default()
        };
        if let Some(busy_poll) = &file.busy_poll {
            config.busy_poll = parser.busy_poll(busy_poll)?;
        }
        if let Some(limit) = &file.memory_limit {
            let parsed = match limit.get_ref() {
                toml::Value::String(text) => text.parse(),
                toml::Value::Integer(bytes) => bytes.to_string().parse(),
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

    /// The exports of a volume with this name, which replaces `{volume}`.
    pub(crate) fn exports(&self, key: &Key, name: &str) -> Vec<String> {
        let own = self.section(key).and_then(|s| s.exports.as_ref());
        own.unwrap_or(&self.exports).iter().map(|e| e.replace("{volume}", name)).collect()
    }
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
mod tests {
    use engine::tunables::{DeviceTunables, SetTunables};

    use super::*;

    fn key(id: &str, label: &str, set: bool) -> Key {
        Key { id: id.into(), label: label.into(), set }
    }

    #[test]
    fn what_is_nearer_counts() {
        let config = Config::parse(
            "preset = \"latency\"\n\
             [tunables]\nwriteback_percent = 30\njournal_delay_ms = 5\n\
             [volume.fast]\npreset = \"throughput\"\nexports = [\"nbd=/run/{volume}.sock\"]\n\
             tunables.writeback_delay = 7\n\
             [set.aaaa.tunables]\njournal_delay_ms = 9\n",
        )
        .unwrap();
        let plain = config.tunables(&key("x", "", false));
        assert_eq!((&*plain["sequential_cutoff"], &*plain["writeback_percent"]), ("0", "30"));
        assert!(!plain.contains_key("journal_delay_ms"), "belongs to sets");
        let fast = config.tunables(&key("y", "Fast", false));
        assert_eq!((&*fast["sequential_cutoff"], &*fast["writeback_delay"]), ("1048576", "7"));
        assert_eq!(config.tunables(&key("aaaa", "", true))["journal_delay_ms"], "9");
        assert_eq!(config.tunables(&key("bbbb", "", true))["journal_delay_ms"], "5");
        assert_eq!(config.exports(&key("y", "fast", false), "bcache3"), ["nbd=/run/bcache3.sock"]);
        assert_eq!(config.exports(&key("x", "", false), "bcache0"), ["auto"]);
    }

    #[test]
    fn tcp_is_for_those_with_a_token() {
        let text = "listen = [\"127.0.0.1:9420\", \"[::1]:0\"]\ntoken_file = \"/etc/token\"\n";
        let tcp = Config::parse(text).unwrap().tcp.unwrap();
        assert_eq!((tcp.listen.len(), tcp.token_file.line, tcp.tls.is_some()), (2, 2, false));
        assert!(!tcp.metrics_without_token);
        let more = "tls_certificate = \"/c\"\ntls_key = \"/k\"\nmetrics_without_token = true\n";
        let far = Config::parse(&(text.replace("[::1]", "[::]") + more)).unwrap().tcp.unwrap();
        assert!(far.tls.is_some_and(|(c, k)| (c.line, k.line) == (3, 4)) && far.metrics_without_token);
        assert_eq!(Config::parse("token_file = \"/t\"\n").unwrap().tcp, None);
    }

    #[test]
    fn nbd_over_tcp_has_to_be_asked_for() {
        let export = "exports = [\"nbd=127.0.0.1:10809\"]\n";
        let open = Config::parse(&format!("nbd_allow_unauthenticated_tcp = true\n{export}")).unwrap();
        assert!(open.nbd.allow_unauthenticated);
        let files = "nbd_tls_certificate = \"/c\"\nnbd_tls_key = \"/k\"\nnbd_tls_client_ca = \"/a\"\n";
        let closed = Config::parse(&format!("{export}{files}")).unwrap().nbd;
        assert_eq!((closed.client_ca.map(|ca| ca.line), closed.allow_unauthenticated), (Some(4), false));
        assert!(Config::parse("exports = [\"nbd=/run/x\"]\n").is_ok());
    }

    #[test]
    fn a_file_that_was_named_has_to_be_there() {
        let said = Config::read(Path::new("/nowhere/ubcache.toml")).unwrap_err();
        assert!(said.message().unwrap().contains("/nowhere/ubcache.toml"), "{said:?}");
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, line, words) in [
            ("scan = true\nsocked = \"/x\"\n", 2, "socked"),
            ("\n[tunables]\nwriteback_percents = 5\n", 3, "writeback_percents"),
            ("[tunables]\nwriteback_percent = \"x\"\n", 2, "writeback_percent"),
            ("[volume.a]\npreset = \"fast\"\n", 2, "quiet-disk"),
            ("[volume.a]\n\ncolour = 1\n", 3, "colour"),
            ("[set.a.tunables]\nsequential_cutoff = 5\n", 2, "sequential_cutoff is a tunable of volumes"),
            ("[volume.a.tunables]\njournal_delay_ms = 5\n", 2, "write it in [tunables] or [set.ID.tunables]"),
            ("[tunables]\nwriteback_precent = 5\n", 2, "did you mean writeback_percent?"),
            ("[tunables]\nlabel = \"data\"\n", 2, "set it with `ubcache set-label`"),
            ("[volume.a.tunables]\nlabel = \"/dev/sda\"\n", 2, "set it with `ubcache set-label`"),
            ("[tunables]\nwriteback_percent = 99\n", 2, "expected 0 to 70 %, found 99"),
            ("[tunables]\nwriteback_percent = 50\n", 2, "expected 0 to 40 %, found 50"),
            ("[volume.a.tunables]\nwriteback_running = 2\n", 2, "expected 0 or 1, found 2"),
            (
                "scan = true\ndrain_deadline_s = \"5m\"\n",
                2,
                "drain_deadline_s: expected seconds, such as `drain_deadline_s = 300`, found string \"5m\"",
            ),
            ("scan = 1\n", 1, "scan: expected true or false, such as `scan = false`, found integer `1`"),
            ("socket = 1\n", 1, "socket: expected path, such as `socket = \"/"),
            ("scan = true\nexports = \"auto\"\n", 2, "exports takes a list: [\"auto\"]"),
            ("[volume.a]\nexports = \"auto\"\n", 2, "exports takes a list: [\"auto\"]"),
            ("devices = \"/dev/sda\"\n", 1, "devices takes a list: [\"/dev/sda\"]"),
            ("listen = \"127.0.0.1:1\"\n", 1, "listen takes a list: [\"127.0.0.1:9420\"]"),
            ("exports = [\"nbd\"]\n", 1, "expected auto"),
            ("\nexports = [\"nbd=127.0.0.1:1\"]\n", 2, "nbd_allow_unauthenticated_tcp = true"),
            ("[volume.a]\nexports = [\"nbd=localhost:1\"]\n", 2, "nbd_tls_client_ca"),
            ("nbd_allow_unauthenticated_tcp = true\nexports = [\"nbd=0.0.0.0:1\"]\n", 2, "other hosts can"),
            (
                "exports = [\"nbd=[::1]:1\"]\nnbd_tls_certificate = \"/c\"\nnbd_tls_key = \"/k\"",
                1,
                "does not authenticate clients",
            ),
            ("nbd_tls_certificate = \"/c\"\n", 1, "expected nbd_tls_key as well"),
            ("\nnbd_tls_client_ca = \"/c\"\n", 2, "expected nbd_tls_certificate"),
            ("scan = maybe\n", 1, ""),
            ("[tunables]\nwriteback_percent = [1]\n", 2, "cannot be"),
            ("listen = [\"127.0.0.1:1\",\n\"localhost:1\"]\ntoken_file = \"/t\"\n", 2, "in numbers"),
            ("scan = true\nlisten = [\"127.0.0.1:1\"]\n", 2, "expected token_file"),
            ("token_file = \"/t\"\nlisten = [\"10.0.0.1:1\"]\n", 2, "expected tls_certificate and tls_key"),
            ("token_file = \"/t\"\nlisten = [\"127.0.0.1:1\",\n \"[::]:1\"]\n", 3, "from other hosts"),
            ("token_file = \"/t\"\nlisten = [\"[::ffff:1.2.3.4]:1\"]\n", 2, "from other hosts"),
            ("token_file = \"/t\"\ntls_key = \"/k\"\n", 2, "expected tls_certificate as well"),
            ("tls_certificate = \"/c\"\n", 1, "expected tls_key as well"),
            ("metrics_without_token = 1\n", 1, ""),
        ] {
            let said = Config::parse(text).unwrap_err().to_string();
            assert!(said.starts_with(&format!("line {line}: ")) && said.contains(words), "{text:?}: {said}");
        }
    }

    /// The error of a value was turned into text.
    #[test]
    fn a_mistake_has_its_cause() {
        use std::error::Error;
        let cause_of = |text: &str| {
            let mistake = Config::parse(text).expect_err(text);
            mistake.source().and_then(Error::source).map(ToString::to_string).expect(text)
        };
        assert!(cause_of("busy_poll = \"x\"").contains("`x`"));
        assert!(cause_of("exports = [\"ublk=x\"]").contains("expected a device number"));
        assert!(cause_of("listen = [\"x\"]\ntoken_file = \"/t\"").contains("socket address"));
        assert!(cause_of("scan = 1").contains("boolean"));
    }

    /// Ranges that depend on other tunables are checked with the values of the whole file, in any order.
    #[test]
    fn values_that_need_each_other_are_accepted_together() {
        for text in [
            "[tunables]\nwriteback_percent = 50\ncutoff_writeback = 60\n",
            "[set.a.tunables]\ncutoff_writeback = 60\n[volume.b.tunables]\nwriteback_percent = 50\n",
            "[tunables]\ncutoff_writeback = 70\ncutoff_writeback_sync = 80\n",
            "[volume.a.tunables]\nwriteback_rate_fp_term_low = 2000\nwriteback_rate_fp_term_mid = 3000\n\
             writeback_rate_fp_term_high = 4000\n",
            "[tunables]\nwriteback_rate_fp_term_mid = 500\n[volume.a.tunables]\nwriteback_rate_fp_term_low = 400\n",
        ] {
            assert!(Config::parse(text).is_ok(), "{text}: {:?}", Config::parse(text));
        }
        let text = "[volume.a.tunables]\nwriteback_rate_fp_term_low = 400\n";
        let said = Config::parse(text).expect_err(text).to_string();
        assert!(said.starts_with("line 2: ") && said.contains("have to ascend"), "{said}");
    }

    #[test]
    fn presets_hold_what_they_say() {
        for (name, values) in PRESETS {
            assert!(Config::parse(&format!("preset = \"{name}\"")).is_ok());
            for (key, value) in *values {
                let (set, device) = owners(key);
                assert!(set != device, "{key}");
                let kept = if set {
                    let mut t = SetTunables::default();
                    t.set(key, value).unwrap();
                    t.raw(key).unwrap()
                } else {
                    let mut t = DeviceTunables::default();
                    t.set(key, value).unwrap();
                    t.raw(key).unwrap()
                };
                assert_eq!(kept, *value, "{name}: {key} is not cut off");
            }
        }
    }

    #[test]
    fn memory_limit_takes_a_size() {
        assert_eq!(Config::parse("").unwrap().memory_limit, None);
        let limit: MemoryLimit = "256MiB".parse().unwrap();
        assert_eq!(Config::parse("memory_limit = \"256MiB\"").unwrap().memory_limit, Some(limit));
        // A number is one of bytes.
        assert_eq!(Config::parse("memory_limit = 268435456").unwrap().memory_limit, Some(limit));
        let said = Config::parse("\nmemory_limit = \"1M\"").unwrap_err().to_string();
        assert!(said.starts_with("line 2: memory_limit: expected a size of at least 64 MiB"), "{said}");
    }

    #[test]
    fn busy_poll_takes_words_and_microseconds() {
        assert_eq!(Config::default().busy_poll, BusyPoll::Auto);
        assert_eq!(Config::parse("").unwrap().busy_poll, BusyPoll::Auto);
        assert_eq!(Config::parse("busy_poll = \"never\"").unwrap().busy_poll, BusyPoll::Never);
        let fifty: BusyPoll = "50".parse().unwrap();
        assert_eq!(Config::parse("busy_poll = 50").unwrap().busy_poll, fifty);
        for bad in ["scan = true\nbusy_poll = 20000", "\nbusy_poll = true", "\nbusy_poll = \"much\""] {
            let said = Config::parse(bad).unwrap_err().to_string();
            assert!(said.starts_with("line 2: busy_poll: "), "{said}");
        }
    }
}
