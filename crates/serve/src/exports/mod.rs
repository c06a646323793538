//! How clients reach volumes: one file for each kind of export.
//!
//! Owns the trait [`Export`], which all kinds implement: an export is started for all volumes of a session, says how each
//! is reached, and is stopped before the volumes are. `spec` has the `--export` option and the table of the kinds. Exports
//! run on the driver's thread or bring their requests there themselves.

mod auto;
#[cfg(test)]
mod conformance;
mod fuse;
mod nbd;
mod nbd_access;
mod spec;
mod ublk;

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;

use blockio::Driver;
use engine::Volume;
pub use export_nbd::{Endpoint, TlsConfig};
use serde::Serialize;

use crate::failure::Failure;
use crate::pressure;
pub use nbd_access::{
    NbdAccess, SaidBy, TlsFile, TlsFileError, TlsFileProblem, is_remote, read_tls, why_not, why_not_remote,
};
pub use spec::{Place, Spec, SpecError};
pub use ublk::{Force, servers};

/// A directory of this run of the machine that no other user can write to.
pub fn runtime_dir() -> Result<PathBuf, Failure> {
    auto::runtime_dir()
}

pub(crate) use auto::passed_over;

/// What an export is started with.
pub struct Context<'a> {
    /// Of the thread that serves.
    pub driver: &'a Driver,
    /// What is to be reached by this export.
    pub volumes: &'a [Rc<Volume>],
    /// The UUID of the set. No two sets that are served on the host have the same.
    pub id: String,
    /// What files are called that an export makes where nothing else is said: no two exports of a host share it.
    pub place: String,
    /// Who may connect by NBD, and the memory of such clients.
    pub nbd: NbdAccess,
    /// Queues and depth of ublk devices.
    pub ublk: export_ublk::Shape,
}

/// A way to reach one volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Way {
    /// `nbd` for a URI, `fuse` for a file, `loop` and `ublk` for a block device.
    pub kind: &'static str,
    /// URI or path.
    pub address: String,
}

/// What an operator reads: a file under a block device is only its explanation.
pub fn in_words(ways: &[Way]) -> String {
    let mut text = String::new();
    let mut before = "";
    for way in ways {
        match (before, way.kind) {
            ("", _) => text.push_str(&way.address),
            ("loop", "fuse") => text.push_str(&format!(" (file {})", way.address)),
            _ => text.push_str(&format!(", {}", way.address)),
        }
        before = way.kind;
    }
    text
}

/// Work of an export, under way.
pub type Work<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// An export that runs. [`Place::start`] makes one; each kind has its own file.
pub trait Export {
    /// How the volume of this name is reached, the best way first.
    fn ways(&self, volume: &str) -> Vec<Way>;

    /// The clients that are connected, in words, where the export alone knows them. The system knows which process has a
    /// block device or a file open.
    fn clients(&self) -> Option<String> {
        None
    }

    /// Refuses new requests, answers those under way, and goes. Dropping this future, or what it was made of, ends the
    /// export at once, though it is in use.
    fn stop(self: Box<Self>, force: &Force) -> Work<'_, Result<(), Failure>>;

    /// Whether a stop can be told to use force, and has to be awaited then.
    fn takes_force(&self) -> bool {
        false
    }

    /// Whether another process can go on with this export, or its clients are used to reconnecting.
    fn can_be_handed_over(&self) -> bool;

    /// Answers requests under way and begins no more. What the kernel keeps for the next process lasts until the export that
    /// this returns is dropped; there is none where the kernel keeps nothing.
    fn hand_over(self: Box<Self>) -> Work<'static, Option<Box<dyn Export>>>;

    /// Stops after an error elsewhere. What was there before this process stays.
    fn give_up(self: Box<Self>, force: &Force) -> Work<'_, Result<(), Failure>> {
        self.stop(force)
    }
}

/// Starts an export.
///
/// # Errors
/// If it cannot be started.
pub async fn start(spec: &Spec, context: &Context<'_>) -> Result<Box<dyn Export>, Failure> {
    if !spec.recovers() {
        ublk::warn_of_left(context).await;
    }
    let running = spec.start(context).await?;
    // Behind what the export itself takes.
    pressure::reserve_heap();
    Ok(running)
}

/// Whether volumes can be block devices on this host; else why not.
pub fn block_devices() -> Result<(), Failure> {
    fuse::obstacle().map_or(Ok(()), |e| Err(Failure::of(e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_put_in_words() {
        let way = |kind, address: &str| Way { kind, address: address.to_owned() };
        let (socket, device, file) = (way("nbd", "nbd://x"), way("loop", "/dev/loop0"), way("fuse", "/m/v"));
        assert_eq!(in_words(&[device.clone(), file.clone()]), "/dev/loop0 (file /m/v)");
        assert_eq!(in_words(&[socket.clone(), device, file.clone()]), "nbd://x, /dev/loop0 (file /m/v)");
        assert_eq!(in_words(&[file, socket]), "/m/v, nbd://x");
    }
}
