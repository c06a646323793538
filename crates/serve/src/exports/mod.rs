//! How clients reach volumes: one file for each kind of export.
//!
//! Owns the table of all kinds ([`KINDS`]), and the trait [`Export`], which all kinds implement: an export is started for all
//! volumes of a session, tells how each is reached, and is stopped before the volumes are. `spec` has the `--export` option.
//! Exports run on the driver's thread or bring their requests there themselves. Must not know how a kind of export works.

mod auto;
#[cfg(test)]
mod conformance;
mod fuse;
#[cfg(test)]
mod head;
mod kind;
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
pub use kind::{Kind, Opens, WayKind};
pub use nbd_access::{
    NbdAccess, SaidBy, TlsFile, TlsFileError, TlsFileProblem, is_remote, read_tls, why_not, why_not_remote,
};
pub use spec::{Place, Spec, SpecError};
pub use ublk::{Force, servers};

/// All kinds of exports, the preferred ones first.
pub const KINDS: &[Kind] = &[
    auto::KIND,
    ublk::KIND,
    nbd::KIND,
    fuse::KIND,
    #[cfg(test)]
    head::KIND,
];

/// The option of an export that the operator does not choose.
pub const DEFAULT: &str = auto::OPTION;

/// The forms of the options of all kinds: `auto, ublk, ublk=NUMBER`.
pub fn forms() -> String {
    let forms: Vec<_> = KINDS.iter().flat_map(|kind| kind.forms).map(|(form, _)| *form).collect();
    forms.join(", ")
}

/// The beginnings of the names in `/dev` of block devices that exports make.
pub fn device_prefixes() -> impl Iterator<Item = &'static str> {
    KINDS.iter().flat_map(|kind| kind.ways).filter_map(|way| match way.opens {
        Opens::BlockDevice { prefix } => Some(prefix),
        Opens::File | Opens::Connection => None,
    })
}

/// The option of an export whose volumes are files in `dir`, with block devices over them.
pub fn files_in(dir: &std::path::Path) -> String {
    fuse::option(dir)
}

/// The option of an export that listens on a unix socket.
pub fn listening_on(socket: &std::path::Path) -> String {
    Endpoint::Unix(socket.to_path_buf()).to_string()
}

/// A directory that no other user can write to and that a reboot clears.
pub fn runtime_dir() -> Result<PathBuf, Failure> {
    auto::runtime_dir()
}

pub(crate) use auto::passed_over;

/// Whether the exports of other sets may use the same place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// The place is for the volumes of this export alone.
    Alone,
    /// Others may use it as well; clients choose a volume by its name. A client that names none gets the volume of the owner.
    Owner,
    /// The owner of the place is another volume.
    Guest,
}

/// What an export is started with.
pub struct Context<'a> {
    /// The driver of the thread that serves.
    pub driver: &'a Driver,
    /// The volumes to export.
    pub volumes: &'a [Rc<Volume>],
    /// The UUID of the set, or of the backing device that is served alone. No two that the host serves have the same UUID.
    pub id: String,
    /// The name of the files that an export makes, if the operator names none. No two exports of a host share it.
    pub place: String,
    /// Whether the exports of other sets may use the same place.
    pub sharing: Sharing,
    /// Who may connect by NBD, and the memory of such clients.
    pub nbd: NbdAccess,
    /// Queues and depth of ublk devices; without them, those that fit into the memory that is left.
    pub ublk: Option<export_ublk::Shape>,
}

/// A way to reach one volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Way {
    /// The kind of the way; clients of the API get its name.
    pub kind: &'static WayKind,
    /// URI or path.
    pub address: String,
}

impl Way {
    /// Whether the volume is a block device of the kernel.
    pub fn is_block_device(&self) -> bool {
        matches!(self.kind.opens, Opens::BlockDevice { .. })
    }
}

/// The ways as text for an operator, in which the file under a block device explains the device.
pub fn in_words(ways: &[Way]) -> String {
    let mut text = String::new();
    let mut before = None;
    for way in ways {
        match (before, way.kind.opens) {
            (None, _) => text.push_str(&way.address),
            (Some(Opens::BlockDevice { .. }), Opens::File) => {
                text.push_str(&format!(" (file {})", way.address))
            }
            (Some(_), _) => text.push_str(&format!(", {}", way.address)),
        }
        before = Some(way.kind.opens);
    }
    text
}

/// A running operation of an export.
pub type Work<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A running export. [`Place::start`] makes one; each kind has its own file.
pub trait Export {
    /// The ways to reach the volume of this name, the best one first.
    fn ways(&self, volume: &str) -> Vec<Way>;

    /// The connected clients as text, if only the export knows them.
    ///
    /// For a block device or a file the system knows which processes have it open.
    fn clients(&self) -> Option<String> {
        None
    }

    /// Refuses new requests, answers those in flight, and ends the export.
    ///
    /// Dropping this future, or the export, ends the export at once, even if it is in use.
    fn stop(self: Box<Self>, force: &Force) -> Work<'_, Result<(), Failure>>;

    /// Stops as [`Export::stop`] does, but at once or not at all: an export that is in use serves on.
    ///
    /// # Errors
    /// Returns the export, still in service, and its users.
    fn stop_if_free(self: Box<Self>) -> Work<'static, Result<(), Occupied>>;

    /// Whether a stop can use force, and has to be awaited then.
    fn takes_force(&self) -> bool {
        false
    }

    /// Whether another process can continue this export, or its clients reconnect by themselves.
    fn can_be_handed_over(&self) -> bool;

    /// Answers requests in flight and starts no more.
    ///
    /// The returned export has what the kernel retains for the next process, until the export is dropped. `None` if the
    /// kernel retains nothing.
    fn hand_over(self: Box<Self>) -> Work<'static, Option<Box<dyn Export>>>;

    /// Stops the export after an error elsewhere. Devices of an earlier process stay.
    fn give_up(self: Box<Self>, force: &Force) -> Work<'_, Result<(), Failure>> {
        self.stop(force)
    }
}

/// An export that could not be stopped because it is in use. It is still in service.
pub struct Occupied {
    /// The export, still in service.
    pub export: Box<dyn Export>,
    /// The users of the export, or another reason, as text.
    pub why: Failure,
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
    // The heap is reserved in addition to the memory that the export has taken.
    pressure::reserve_heap();
    Ok(running)
}

/// Checks whether volumes can be block devices on this host.
///
/// # Errors
/// If something is missing; the error names it.
pub fn block_devices() -> Result<(), Failure> {
    fuse::obstacle().map_or(Ok(()), |e| Err(Failure::of(e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_put_in_words() {
        let way = |kind, address: &str| Way { kind, address: address.to_owned() };
        let (socket, device) = (way(&nbd::WAY, "nbd://x"), way(&fuse::LOOP, "/dev/loop0"));
        let file = way(&fuse::FILE, "/m/v");
        assert_eq!(in_words(&[device.clone(), file.clone()]), "/dev/loop0 (file /m/v)");
        assert_eq!(in_words(&[socket.clone(), device, file.clone()]), "nbd://x, /dev/loop0 (file /m/v)");
        assert_eq!(in_words(&[file, socket]), "/m/v, nbd://x");
    }

    /// Help, guide and clients of the API tell kinds, forms and ways apart by these names.
    #[test]
    fn names_differ_and_have_meanings() {
        let forms = || KINDS.iter().flat_map(|kind| kind.forms);
        let lists: [Vec<&str>; 3] = [
            KINDS.iter().map(|kind| kind.name).collect(),
            forms().map(|(form, _)| *form).collect(),
            KINDS.iter().flat_map(|kind| kind.ways).map(|way| way.name).collect(),
        ];
        for mut names in lists {
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "{names:?}");
        }
        assert!(forms().all(|(_, meaning)| meaning.ends_with('.')));
        assert!(DEFAULT.parse::<Spec>().is_ok());
    }
}
