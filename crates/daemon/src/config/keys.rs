//! The keys of the configuration file, with their values, defaults and meanings, for the manual.
//!
//! Owns this table alone. A test compares it with the keys that the parser accepts. Must not know the parser.

use std::fmt;

/// A key of the configuration file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConfigKey {
    /// The section that has the key: empty for the top of the file, `set.ID` or `volume.ID`.
    pub section: &'static str,
    /// The name of the key.
    pub name: &'static str,
    /// The values that it takes.
    pub values: ValueList,
    /// What applies without it; empty if nothing does.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

/// The values that a key takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ValueList {
    /// As this text says.
    Text(&'static str),
    /// A list of exports, of the kinds that `serve` has.
    Exports,
}

impl fmt::Display for ValueList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueList::Text(text) => f.write_str(text),
            ValueList::Exports => write!(f, "list of {}", serve::exports::forms()),
        }
    }
}

/// A row of the table: name, values, default and meaning of a key.
type Row = (&'static str, &'static str, &'static str, &'static str);

const fn key(section: &'static str, row: Row) -> ConfigKey {
    let (name, values, default, meaning) = row;
    ConfigKey { section, name, values: ValueList::Text(values), default, meaning }
}

/// The key of the exports of all volumes.
const fn exports(default: &'static str, meaning: &'static str) -> ConfigKey {
    ConfigKey { section: "", name: "exports", values: ValueList::Exports, default, meaning }
}

const fn top(row: Row) -> ConfigKey {
    key("", row)
}

/// Every key of the configuration file.
pub const CONFIG_KEYS: &[ConfigKey] = &[
    top(("socket", "path", "/run/ubcache/control.sock", "The control socket. Read at the start only.")),
    top(("group", "name of a group", "", "Members of this group may use the control socket, besides root.")),
    top((
        "state_dir",
        "path",
        "/var/lib/ubcache",
        "Directory of state.json, which has the remembered devices and \
         settings. Read at the start only.",
    )),
    top((
        "links",
        "path",
        "/dev/ubcache",
        "Directory of links to the block devices of volumes, by their labels. An empty path makes no links.",
    )),
    top((
        "sysfs_view",
        "path",
        "",
        "Directory in which files like those of the kernel's bcache in /sys are mounted.",
    )),
    top((
        "devices",
        "list of paths",
        "[]",
        "Devices that are registered at every start, besides those that \
         `ubcache register` has named.",
    )),
    top((
        "scan",
        "true or false",
        "false",
        "Whether the start registers every block device with a superblock of bcache.",
    )),
    top((
        "scan_on_events",
        "true or false",
        "false",
        "Whether devices that appear later are registered without a udev \
         rule.",
    )),
    exports(
        "[\"auto\"]",
        "How clients \
         reach each volume. {volume} stands for the name of the volume. Takes effect when a volume is served again.",
    ),
    top((
        "preset",
        "default, latency, throughput, ceph-osd or quiet-disk",
        "default",
        "Settings for a kind of load.",
    )),
    top(("tunables", "a section of names and values", "", "Tunables of all sets and volumes.")),
    top((
        "memory_limit",
        "size of at least 64MiB",
        "",
        "The memory for which reserves, buffers and caches are sized; without it, the memory of the host or of the control \
         group. Read at the start only.",
    )),
    top(("drain_on_stop", "true or false", "false", "Whether a stop writes all dirty data back first.")),
    top((
        "drain_deadline_s",
        "seconds",
        "300",
        "The time after which a stop ends its drain; the rest stays dirty in the \
         cache.",
    )),
    top((
        "takeover_after_s",
        "seconds",
        "30",
        "The time for which a disk of a group waits for its own cache device before another one with its dirty data takes over.",
    )),
    top((
        "busy_poll",
        "auto, never or microseconds",
        "auto",
        "For how long the thread of a set polls for the next \
         request before it sleeps.",
    )),
    top((
        "listen",
        "list of ADDRESS:PORT",
        "[]",
        "Addresses of the control API over TCP. Needs token_file, and a \
         certificate for addresses that other hosts reach.",
    )),
    top((
        "token_file",
        "path",
        "",
        "File with the token of clients over TCP. Other users must not be able to read it.",
    )),
    top(("tls_certificate", "path", "", "PEM file with the certificate of the control API over TCP.")),
    top(("tls_key", "path", "", "PEM file with the key of tls_certificate.")),
    top((
        "metrics_without_token",
        "true or false",
        "false",
        "Whether clients over TCP read /metrics without the token.",
    )),
    top(("nbd_tls_certificate", "path", "", "PEM file with the certificate of NBD over TCP.")),
    top(("nbd_tls_key", "path", "", "PEM file with the key of nbd_tls_certificate.")),
    top((
        "nbd_tls_client_ca",
        "path",
        "",
        "PEM file with the CA that signs the certificates of NBD clients.",
    )),
    top((
        "nbd_allow_unauthenticated_tcp",
        "true or false",
        "false",
        "Whether NBD over TCP serves clients without a \
         certificate: every user of the host can then read and write the volumes.",
    )),
    top(("set", "sections [set.UUID]", "", "Settings of one set.")),
    top(("volume", "sections [volume.UUID] or [volume.LABEL]", "", "Settings of one volume.")),
    key("set.ID", ("tunables", "a section of names and values", "", "Tunables of this set.")),
    key("volume.ID", ("preset", "as above", "", "Preset of this volume; overrides that of the file.")),
    key(
        "volume.ID",
        (
            "exports",
            "as above",
            "",
            "Exports of this volume, in place of those of the file. An empty list \
         exports it nowhere.",
        ),
    ),
    key("volume.ID", ("tunables", "a section of names and values", "", "Tunables of this volume.")),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// The keys that the parser accepts where `text` has a key that it does not know, from its error.
    fn accepted(text: &str) -> Vec<String> {
        let said = Config::parse(text).expect_err("no such key").why.to_string();
        let (_, list) = said.split_once("expected ").unwrap_or_else(|| panic!("{said}"));
        list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    /// The manual page is made of the table, so a key that is missing here is missing there.
    #[test]
    fn the_table_has_the_keys_of_the_parser() {
        for (section, text) in [
            ("", "nothing = 1"),
            ("set.ID", "[set.x]\nnothing = 1"),
            ("volume.ID", "[volume.x]\nnothing = 1"),
        ] {
            let mut keys = accepted(text);
            let mut listed: Vec<_> =
                CONFIG_KEYS.iter().filter(|k| k.section == section).map(|k| k.name.to_owned()).collect();
            keys.sort();
            listed.sort();
            assert!(!keys.is_empty());
            assert_eq!(listed, keys, "section {section:?}");
        }
    }

    /// The defaults in the table are those of the program.
    #[test]
    fn the_defaults_are_those_of_the_parser() {
        for key in CONFIG_KEYS.iter().filter(|k| k.section.is_empty() && !k.default.is_empty()) {
            let quoted = format!("{} = {:?}", key.name, key.default);
            let plain = format!("{} = {}", key.name, key.default);
            let config = Config::parse(&plain).or_else(|_| Config::parse(&quoted));
            let mut config = config.unwrap_or_else(|e| panic!("{plain}: {e}"));
            // These have their defaults where they are used.
            match key.name {
                "socket" => assert_eq!(config.socket.take(), Some(crate::DEFAULT_SOCKET.into())),
                "state_dir" => assert_eq!(config.state_dir.take(), Some(crate::DEFAULT_STATE_DIR.into())),
                "links" => assert_eq!(config.links.take(), Some(crate::links::DEFAULT_LINKS.into())),
                _ => {}
            }
            assert_eq!(config, Config::default(), "{plain}");
        }
    }
}
