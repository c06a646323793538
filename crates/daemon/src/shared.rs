//! State that the control thread and the threads of sets share: configuration, state directory, events, TCP and NBD access, and
//! whether the daemon stops.
//!
//! Owns the locks around this state, which are held only for moments, and the precedence of tunables: a value set at run
//! time, then the configuration, then the default. Must not know which devices are served.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serve::Failure;
use serve::exports::{NbdAccess, SaidBy, Spec, SpecError, TlsConfig};
use tokio::sync::watch;

use crate::config::{Config, Key, Values};
use crate::hub::Hub;
use crate::links::{DEFAULT_LINKS, Links};
use crate::remote::Remote;
use crate::state::State;

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
    /// Held during the decision which volume owns an address.
    claiming: Mutex<()>,
    /// Whether the daemon stops.
    stopping: AtomicBool,
}

impl Shared {
    pub(crate) fn new(config: Config, mut state: State) -> Shared {
        let hub = Arc::new(Hub::default());
        state.report_to(hub.clone());
        let nbd = NbdAccess {
            allow_unauthenticated: config.nbd.allow_unauthenticated,
            said_by: SaidBy::Configuration,
            ..NbdAccess::default()
        };
        let links = Links::new(config.links.clone().unwrap_or_else(|| DEFAULT_LINKS.into()));
        Shared {
            links,
            nbd: Mutex::new(nbd),
            config: Mutex::new(config),
            state: Mutex::new(state),
            hub,
            claiming: Mutex::default(),
            stopping: AtomicBool::new(false),
            remote: watch::Sender::new(None),
        }
    }

    pub(crate) fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The tunables that are to be set on a set or volume.
    pub(crate) fn tunables(&self, key: &Key) -> Values {
        self.tunables_by(&self.config(), key)
    }

    /// The tunables of a set or volume under another configuration.
    pub(crate) fn tunables_by(&self, config: &Config, key: &Key) -> Values {
        let mut values = config.tunables(key);
        values.extend(self.state().tunables(&key.id));
        values
    }

    /// The export addresses that the configuration gives to a volume.
    pub(crate) fn exports(&self, key: &Key, name: &str) -> Result<Vec<Spec>, Failure> {
        let specs = self.config().exports(key, name);
        specs.iter().map(|s| s.parse().map_err(|e: SpecError| Failure::of(e))).collect()
    }
}
