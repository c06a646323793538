//! The volumes that a server offers.
//!
//! Owns the list of volumes, which may change while the server runs, and the resolution of names.

use std::cell::RefCell;
use std::rc::Rc;

use io::BlockVolume;

use crate::codec::ExportInfo;
use crate::codec::wire::MAX_STRING_BYTES;

/// Why a volume cannot be offered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ExportError {
    /// Another volume has this name.
    #[error("an export named {0:?} exists already")]
    Duplicate(String),
    /// The name cannot be used in the protocol.
    #[error("name of an export: expected 1 to {MAX_STRING_BYTES} bytes without NUL, found {0:?}")]
    BadName(String),
}

/// The volumes that a server offers. Cheap to clone; all clones share one list.
pub struct Exports<V> {
    volumes: Rc<RefCell<Vec<Rc<V>>>>,
}

impl<V> Clone for Exports<V> {
    fn clone(&self) -> Self {
        Exports { volumes: self.volumes.clone() }
    }
}

impl<V> Default for Exports<V> {
    fn default() -> Self {
        Exports { volumes: Rc::default() }
    }
}

impl<V: BlockVolume> Exports<V> {
    /// An empty list.
    pub fn new() -> Exports<V> {
        Exports::default()
    }

    /// Offers a volume under its own name.
    ///
    /// # Errors
    /// If the name is taken or not valid.
    pub fn add(&self, volume: Rc<V>) -> Result<(), ExportError> {
        let name = volume.name();
        if name.is_empty() || name.len() > MAX_STRING_BYTES || name.contains('\0') {
            return Err(ExportError::BadName(name));
        }
        if self.get(&name).is_some() {
            return Err(ExportError::Duplicate(name));
        }
        self.volumes.borrow_mut().push(volume);
        Ok(())
    }

    /// Removes a volume from the list. Connected clients stay connected: see [`crate::Server::remove_export`].
    pub fn remove(&self, name: &str) -> Option<Rc<V>> {
        let mut volumes = self.volumes.borrow_mut();
        let at = volumes.iter().position(|v| v.name() == name)?;
        Some(volumes.remove(at))
    }

    /// The volume of this name.
    pub fn get(&self, name: &str) -> Option<Rc<V>> {
        self.volumes.borrow().iter().find(|v| v.name() == name).cloned()
    }

    /// All names, in the order in which they were added.
    pub fn names(&self) -> Vec<String> {
        self.volumes.borrow().iter().map(|v| v.name()).collect()
    }

    /// The export that a client requests with `name`. The empty name stands for the only export of the list.
    pub(super) fn resolve(&self, name: &[u8]) -> Option<ExportInfo> {
        let volumes = self.volumes.borrow();
        match (name, &volumes[..]) {
            (b"", [only]) => Some(describe(&**only)),
            _ => volumes.iter().find(|v| v.name().as_bytes() == name).map(|v| describe(&**v)),
        }
    }

    pub(super) fn describe_all(&self) -> Vec<ExportInfo> {
        self.volumes.borrow().iter().map(|v| describe(&**v)).collect()
    }
}

fn describe<V: BlockVolume>(volume: &V) -> ExportInfo {
    let name = volume.name();
    ExportInfo {
        // Short enough for the protocol even together with the longest name.
        description: "ubcache volume".to_string(),
        name,
        size_bytes: volume.sectors().bytes(),
        read_only: volume.read_only(),
        preferred_block_bytes: ExportInfo::preferred_block_bytes(
            volume.optimal_io_bytes(),
            volume.logical_block_bytes(),
        ),
    }
}
