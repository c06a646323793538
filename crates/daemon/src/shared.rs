//! State that the control thread and the threads of sets share: configuration, state directory, events, TCP and NBD access, and
//! whether the daemon stops.
//!
//! Owns the locks around this state, which are held only for moments, and the precedence of tunables: a value set at run
//! time, then the configuration, then the default. Owns the rule that a label selects a section of the configuration for one
//! volume: any disk can have the label of another. Must not know how a volume is served.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serve::exports::{NbdAccess, SaidBy, Spec, SpecError, TlsConfig};
use serve::{Failure, plain};
use tokio::sync::{mpsc, watch};

use crate::config::{Config, Key, Values};
use crate::hub::Hub;
use crate::links::{DEFAULT_LINKS, Links};
use crate::remote::Remote;
use crate::state::{Name, State};

/// The state that the threads share, behind locks.
pub(crate) struct Shared {
    config: Mutex<Config>,
    state: Mutex<State>,
    pub(crate) hub: Arc<Hub>,
    /// Links to the block devices of volumes.
    pub(crate) links: Links,
    /// Configuration of TCP; `None` if TCP is disabled.
    pub(crate) remote: watch::Sender<Option<Arc<Remote>>>,
    /// Access rules of NBD; all sets share its memory budget.
    nbd: Mutex<NbdAccess>,
    /// Held during the decision which volume owns an address or a label.
    claiming: Mutex<()>,
    /// Whether the daemon stops.
    stopping: AtomicBool,
    /// UUIDs of the devices that the operator has named, and of the sets of the cache devices among them.
    named: Mutex<BTreeSet<String>>,
    /// The devices that another set of their group has taken over, each with that set.
    takeovers: (mpsc::UnboundedSender<Takeover>, Mutex<Option<mpsc::UnboundedReceiver<Takeover>>>),
    /// The sets and volumes that are served, by their ids.
    served: Arc<Mutex<BTreeMap<String, Key>>>,
}

/// A device that another set of its group has taken over.
pub(crate) struct Takeover {
    /// UUID of the device.
    pub(crate) device: String,
    /// UUID of the set.
    pub(crate) set: String,
}

/// A set or volume that is served. A volume keeps its label until this is dropped.
pub(crate) struct ServedKey {
    served: Arc<Mutex<BTreeMap<String, Key>>>,
    id: String,
}

impl Drop for ServedKey {
    fn drop(&mut self) {
        self.served.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

impl Shared {
    pub(crate) fn new(config: Config, state: State) -> Shared {
        let hub = Arc::new(Hub::default());
        state.report_to(hub.clone());
        let nbd = NbdAccess {
            allow_unauthenticated: config.nbd.allow_unauthenticated,
            said_by: SaidBy::Configuration,
            ..NbdAccess::default()
        };
        let (took_over, takeovers) = mpsc::unbounded_channel();
        let links = Links::new(config.links.clone().unwrap_or_else(|| DEFAULT_LINKS.into()));
        Shared {
            links,
            nbd: Mutex::new(nbd),
            config: Mutex::new(config),
            state: Mutex::new(state),
            hub,
            claiming: Mutex::default(),
            stopping: AtomicBool::new(false),
            named: Mutex::default(),
            takeovers: (took_over, Mutex::new(Some(takeovers))),
            served: Arc::default(),
            remote: watch::Sender::new(None),
        }
    }

    /// Reports that a set has taken a device over.
    pub(crate) fn took_over(&self, device: String, set: String) {
        // At the end of the daemon the task that receives is gone.
        let _ = self.takeovers.0.send(Takeover { device, set });
    }

    /// The takeovers, for the one task that follows them; `None` for another one.
    pub(crate) fn takeovers(&self) -> Option<mpsc::UnboundedReceiver<Takeover>> {
        self.takeovers.1.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name of a volume; a new one is stored. Waits for the file system: a thread that serves must not call it.
    pub(crate) fn name(&self, id: &str) -> String {
        let Name { name, storing } = self.state().name(id);
        match storing.and_then(|storing| storing.not_stored()) {
            None => name,
            Some(_why) => self.state().lasting_name(id),
        }
    }

    /// Tests whether the state can be written, before a command acts.
    ///
    /// # Errors
    /// If it cannot, or if its file system does not answer in time.
    pub(crate) async fn can_store(&self) -> Result<(), Failure> {
        let test = self.state().test();
        tokio::task::spawn_blocking(move || test.result_of_test()).await.map_err(Failure::of)?
    }

    /// Why the changes until now are not stored; `None` if they are. Waits for a write that has not ended.
    pub(crate) async fn not_stored(&self) -> Option<String> {
        let storing = self.state().storing();
        let waited = tokio::task::spawn_blocking(move || storing.not_stored()).await;
        waited.unwrap_or_else(|e| Some(e.to_string()))
    }

    /// Does work that may wait for a file system, for a network or for a lock that is held over either, so that the control thread
    /// does not wait for it.
    ///
    /// # Errors
    /// If the work panics.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Shared>,
        work: impl FnOnce(&Shared) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let shared = self.clone();
        tokio::task::spawn_blocking(move || work(&shared)).await.map_err(Failure::of)
    }

    /// The daemon stops from now on.
    pub(crate) fn begin_stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    /// Whether the daemon stops, so that no set is served again before its next start.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Access rules of NBD for exports that start from now on.
    pub(crate) fn nbd(&self) -> NbdAccess {
        let open = self.config().nbd.allow_unauthenticated;
        let nbd = self.nbd.lock().unwrap_or_else(PoisonError::into_inner);
        NbdAccess { allow_unauthenticated: open, ..nbd.clone() }
    }

    /// Sets the certificates of NBD exports that start from now on.
    pub(crate) fn set_nbd_tls(&self, tls: Option<TlsConfig>) {
        self.nbd.lock().unwrap_or_else(PoisonError::into_inner).tls = tls;
    }

    /// Locks the decision which volume owns an address: it orders two volumes that start at the same time.
    pub(crate) fn claim_places(&self) -> MutexGuard<'_, ()> {
        self.claiming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// UUIDs of the devices that the operator has named, and of the sets of the cache devices among them.
    pub(crate) fn named(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn served(&self) -> MutexGuard<'_, BTreeMap<String, Key>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a set or volume is served, until the result is dropped.
    pub(crate) fn serves(&self, key: &Key) -> ServedKey {
        self.served().insert(key.id.clone(), key.clone());
        ServedKey { served: self.served.clone(), id: key.id.clone() }
    }

    /// Gives a volume another label: it no longer owns the former one, and owns the new one if that has no owner.
    pub(crate) fn relabel(&self, id: &str, label: &str) {
        if let Some(key) = self.served().get_mut(id) {
            label.clone_into(&mut key.label);
        }
        self.state().relabel(id, label);
        self.claim_labels();
    }

    /// The label of a volume that is served.
    pub(crate) fn served_label(&self, id: &str) -> Option<String> {
        self.served().get(id).map(|key| key.label.clone())
    }

    /// Whether the set or volume with this key is served, or a flash-only volume of the set with this key.
    pub(crate) fn is_served(&self, key: &str) -> bool {
        let flash_only = format!("{key}/");
        self.served().keys().any(|id| id == key || id.starts_with(&flash_only))
    }

    /// The command that forgets a volume which does not come back: it unregisters its device, or the cache device of its set.
    /// `None` if the volume or its set is served, or no such device is registered.
    pub(crate) fn forget_command(&self, id: &str) -> Option<String> {
        let key = id.split('/').next().filter(|key| !self.is_served(key))?;
        let path = self.state().registered_path(key)?;
        Some(format!("ubcache unregister {}", plain::in_shell(&path.to_string_lossy())))
    }

    /// Makes the volumes that are served the owners of their labels, if the labels have no owner.
    pub(crate) fn claim_labels(&self) {
        let keys: Vec<Key> = self.served().values().filter(|key| !key.set).cloned().collect();
        keys.iter().for_each(|key| self.claim_label(key));
    }

    /// Makes a volume that is served the owner of its label, unless another volume owns the label.
    ///
    /// The first volume that was served with a label owns it until its device is unregistered. A volume that the operator has
    /// named takes the label of one that no operator has named and that is not served: the exports of one that is served have
    /// their addresses by this label. A volume whose section has its UUID needs no label.
    pub(crate) fn claim_label(&self, key: &Key) {
        let config = self.config().clone();
        let Some(label) = key.section_label().filter(|_| !config.has_own_section(&key.id)) else { return };
        let _one = self.claim_places();
        let is_named = |id: &str| id.split('/').next().is_some_and(|device| self.named().contains(device));
        let owner = self.state().label_owner(&label);
        let keeps = |owner: &String| {
            let has_claim = self.is_served(owner) || is_named(owner) || !is_named(&key.id);
            *owner != key.id && !config.has_own_section(owner) && has_claim
        };
        if !owner.as_ref().is_some_and(keeps) {
            self.state().set_label_owner(&label, &key.id);
        }
    }

    /// The volume that owns the label of this volume, if it is another one and the label names a section.
    pub(crate) fn other_owner(&self, config: &Config, key: &Key) -> Option<String> {
        let label = key.section_label().filter(|_| config.has_section_of_label(key))?;
        let owner = self.state().label_owner(&label)?;
        (owner != key.id && !config.has_own_section(&owner)).then_some(owner)
    }

    /// The key by which the configuration applies to a set or volume: without the label if another volume owns it.
    pub(crate) fn section_key(&self, config: &Config, key: &Key) -> Key {
        let mut key = key.clone();
        if self.other_owner(config, &key).is_some() {
            key.label.clear();
        }
        key
    }

    /// The tunables of a set or volume in a configuration.
    pub(crate) fn configured(&self, config: &Config, key: &Key) -> Values {
        config.tunables(&self.section_key(config, key))
    }

    /// The tunables that are to be set on a set or volume.
    pub(crate) fn tunables(&self, key: &Key) -> Values {
        self.tunables_by(&self.config(), key)
    }

    /// The tunables of a set or volume under another configuration.
    pub(crate) fn tunables_by(&self, config: &Config, key: &Key) -> Values {
        let mut values = self.configured(config, key);
        values.extend(self.state().tunables(&key.id));
        values
    }

    /// The export addresses that a configuration gives to a volume, as text.
    pub(crate) fn exports_by(&self, config: &Config, key: &Key, name: &str) -> Vec<String> {
        config.exports(&self.section_key(config, key), name)
    }

    /// The key of the configuration that has the exports of a volume, as text.
    pub(crate) fn exports_key(&self, key: &Key) -> String {
        let config = self.config();
        config.exports_key(&self.section_key(&config, key))
    }

    /// The export addresses that the configuration gives to a volume.
    pub(crate) fn exports(&self, key: &Key, name: &str) -> Result<Vec<Spec>, Failure> {
        let specs = self.exports_by(&self.config(), key, name);
        specs.iter().map(|s| s.parse().map_err(|e: SpecError| Failure::of(e))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &str =
        "[volume.Data]\nexports = [\"nbd=/run/data.sock\"]\n[volume.Data.tunables]\nwriteback_percent = 20\n";

    fn shared(dir: &std::path::Path) -> Shared {
        Shared::new(Config::parse(DATA).unwrap(), State::open(dir).unwrap())
    }

    fn key(id: &str) -> Key {
        Key { id: id.into(), label: "data".into(), set: false }
    }

    /// The volumes among these to which the section applies, by the tunables and by the exports.
    fn with_section<'a>(shared: &Shared, ids: &[&'a str]) -> Vec<&'a str> {
        let applies = |id: &&&str| {
            let exports = shared.exports(&key(id), "bcache0").unwrap();
            let has_tunable = shared.tunables(&key(id)).contains_key("writeback_percent");
            assert_eq!(exports[0].to_string() == "nbd=/run/data.sock", has_tunable, "{id}");
            has_tunable
        };
        ids.iter().filter(applies).copied().collect()
    }

    /// Every volume with the label got the exports and tunables of the section, also that of a stranger's disk.
    #[test]
    fn a_section_by_label_applies_to_one_volume() {
        let dir = tempfile::tempdir().unwrap();
        let all = ["u1", "u2", "s/3"];
        let first = shared(dir.path());
        all.iter().for_each(|id| first.claim_label(&key(id)));
        assert_eq!(with_section(&first, &all), ["u1"], "it was served first");
        let config = first.config().clone();
        assert_eq!(first.other_owner(&config, &key("u2")).as_deref(), Some("u1"));
        assert_eq!(first.other_owner(&config, &key("u1")), None);
        assert_eq!(first.other_owner(&Config::default(), &key("u2")), None, "there is no section");
        drop(first);
        let second = shared(dir.path());
        second.claim_label(&key("u2"));
        assert_eq!(with_section(&second, &all), ["u1"], "also after a restart at which another one is first");
        // The operator has named one of them.
        second.named().insert("u2".into());
        all.iter().for_each(|id| second.claim_label(&key(id)));
        assert_eq!(with_section(&second, &all), ["u2"]);
        second.named().insert("s".into());
        all.iter().for_each(|id| second.claim_label(&key(id)));
        assert_eq!(with_section(&second, &all), ["u2"], "of two that are named the first one keeps it");
        assert_eq!(second.forget_command("u2"), None, "its device is not registered");
        second.state().add_device(std::path::Path::new("/dev/a b"), "u2", true);
        assert_eq!(second.forget_command("u2").as_deref(), Some("ubcache unregister '/dev/a b'"));
        second.state().add_device(std::path::Path::new("/dev/ssd"), "s", true);
        assert_eq!(second.forget_command("s/9").as_deref(), Some("ubcache unregister /dev/ssd"));
        let set = second.serves(&Key { set: true, ..key("s") });
        assert_eq!(second.forget_command("s/9"), None, "it would stop the set");
        drop(set);
        // An owner that is served keeps the label, because its exports have the addresses of the section.
        second.named().remove("u2");
        second.named().insert("u1".into());
        let served = second.serves(&key("u2"));
        all.iter().for_each(|id| second.claim_label(&key(id)));
        assert_eq!((with_section(&second, &all), second.forget_command("u2")), (vec!["u2"], None));
        drop(served);
        second.claim_label(&key("u1"));
        assert_eq!(with_section(&second, &all), ["u1"]);
        second.state().forget_places("u1");
        second.claim_label(&key("u2"));
        // The label is free after its owner is unregistered, or gets another label.
        second.state().forget_places("u2");
        second.claim_label(&key("s/3"));
        assert_eq!(with_section(&second, &all), ["s/3"]);
        let by_uuid = Config::parse(&format!("{DATA}[volume.\"s/3\"]\npreset = \"latency\"\n")).unwrap();
        assert_eq!(second.other_owner(&by_uuid, &key("u1")), None, "the owner has a section of its own");
        second.state().relabel("s/3", "other");
        second.claim_label(&key("u1"));
        assert_eq!(with_section(&second, &all), ["u1"]);
    }
}
