//! What the control thread and the sets' threads both need: configuration, state, events, and what TCP is to be like.
//!
//! Owns the locks around them, which are held for moments only, and the rule what counts most: what was set at run time,
//! then the configuration, then the defaults.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serve::Failure;
use serve::exports::Spec;
use tokio::sync::watch;

use crate::config::{Config, Key, Values};
use crate::hub::Hub;
use crate::state::State;
use crate::tcp::Remote;

/// See the module head.
pub(crate) struct Shared {
    config: Mutex<Config>,
    state: Mutex<State>,
    pub(crate) hub: Arc<Hub>,
    /// Clients over TCP, if they are wanted.
    pub(crate) remote: watch::Sender<Option<Arc<Remote>>>,
}

impl Shared {
    pub(crate) fn new(config: Config, state: State) -> Shared {
        Shared {
            config: Mutex::new(config),
            state: Mutex::new(state),
            hub: Arc::default(),
            remote: watch::Sender::new(None),
        }
    }

    pub(crate) fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be set.
    pub(crate) fn tunables(&self, key: &Key) -> Values {
        self.tunables_by(&self.config(), key)
    }

    /// The same by another configuration.
    pub(crate) fn tunables_by(&self, config: &Config, key: &Key) -> Values {
        let mut values = config.tunables(key);
        values.extend(self.state().tunables(&key.id));
        values
    }

    /// How a volume is exported.
    pub(crate) fn exports(&self, key: &Key, name: &str) -> Result<Vec<Spec>, Failure> {
        let specs = self.config().exports(key, name);
        specs.iter().map(|s| s.parse().map_err(Failure::Failed)).collect()
    }
}
