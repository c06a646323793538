//! The state that all handlers of the API share.
//!
//! Owns nothing but the types. Must not know the routes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;

use crate::components::Groups;
use crate::order::Make;
use crate::registry::Registry;

/// State that the handlers share.
pub(crate) struct Api {
    pub(crate) registry: Arc<Registry>,
    pub(crate) groups: Groups,
    pub(crate) config_path: PathBuf,
    pub(crate) began: Instant,
    pub(crate) make: Make,
}

impl Api {
    pub(crate) fn new(registry: Arc<Registry>, config_path: PathBuf, make: Make) -> Api {
        let (lookup, registration) = (registry.lookup.clone(), registry.registration.clone());
        let groups = Groups::new(registry.inventory.clone(), lookup, registration);
        Api { registry, groups, config_path, began: Instant::now(), make }
    }
}

/// The argument by which a handler gets the shared state.
pub(crate) type SharedApi = State<Arc<Api>>;
