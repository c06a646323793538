//! The configuration file as it is written, before its checks.
//!
//! Owns the names and types of the keys. Must not know what a value means.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::list;

/// The whole file, before its checks.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct File {
    pub(super) socket: Option<PathBuf>,
    pub(super) group: Option<String>,
    pub(super) state_dir: Option<PathBuf>,
    pub(super) links: Option<PathBuf>,
    pub(super) sysfs_view: Option<PathBuf>,
    #[serde(deserialize_with = "list::listen")]
    pub(super) listen: Vec<Spanned<String>>,
    pub(super) token_file: Option<Spanned<PathBuf>>,
    pub(super) tls_certificate: Option<Spanned<PathBuf>>,
    pub(super) tls_key: Option<Spanned<PathBuf>>,
    pub(super) metrics_without_token: bool,
    pub(super) nbd_tls_certificate: Option<Spanned<PathBuf>>,
    pub(super) nbd_tls_key: Option<Spanned<PathBuf>>,
    pub(super) nbd_tls_client_ca: Option<Spanned<PathBuf>>,
    pub(super) nbd_allow_unauthenticated_tcp: bool,
    pub(super) scan: bool,
    pub(super) scan_on_events: bool,
    #[serde(deserialize_with = "list::devices")]
    pub(super) devices: Vec<PathBuf>,
    #[serde(deserialize_with = "list::exports")]
    pub(super) exports: Option<Vec<Spanned<String>>>,
    pub(super) preset: Option<Spanned<String>>,
    pub(super) drain_on_stop: bool,
    pub(super) drain_deadline_s: Option<u64>,
    pub(super) busy_poll: Option<Spanned<toml::Value>>,
    pub(super) memory_limit: Option<Spanned<String>>,
    pub(super) tunables: BTreeMap<String, Spanned<toml::Value>>,
    pub(super) set: BTreeMap<String, SetSection>,
    pub(super) volume: BTreeMap<String, VolumeSection>,
}

impl File {
    /// The exports of the sections of volumes that name any.
    pub(super) fn volumes_with_exports(&self) -> impl Iterator<Item = (&str, &[Spanned<String>])> {
        self.volume.iter().filter_map(|(id, section)| Some((&**id, section.exports.as_deref()?)))
    }
}

/// A section `[set.…]`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SetSection {
    pub(super) tunables: BTreeMap<String, Spanned<toml::Value>>,
}

/// A section `[volume.…]`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct VolumeSection {
    pub(super) preset: Option<Spanned<String>>,
    #[serde(deserialize_with = "list::exports")]
    pub(super) exports: Option<Vec<Spanned<String>>>,
    pub(super) tunables: BTreeMap<String, Spanned<toml::Value>>,
}
