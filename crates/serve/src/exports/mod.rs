//! How clients reach volumes: one file per kind of export.
//!
//! Owns the `--export` option and what all kinds have in common: an export is started for all volumes of a session,
//! says how each is reached, and is stopped before the volumes are. Exports run on the driver's thread or bring their
//! requests there themselves.

mod auto;
mod fuse;
mod nbd;
mod nbd_access;
mod ublk;

use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;

use blockio::Driver;
use engine::Volume;
pub use export_nbd::{Endpoint, TlsConfig};
use serde::Serialize;

use crate::failure::Failure;
use crate::pressure;
pub use nbd_access::{NbdAccess, SaidBy, TlsFile, is_remote, read_tls, why_not, why_not_remote};
pub use ublk::{Force, servers};

/// A directory of this run of the machine that no other user can write to.
pub fn runtime_dir() -> Result<PathBuf, Failure> {
    auto::runtime_dir()
}

pub(crate) use auto::passed_over;

/// Device numbers of the ublk driver are below this; some room for more volumes than one.
const MAX_NUMBER: u32 = (1 << 20) - 1024;

/// What the operator asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Spec {
    /// The best that build and host offer.
    Auto,
    /// A block device by the ublk driver; the number of the first volume's, if it matters.
    Ublk(Option<u32>),
    /// A socket on which the volumes are NBD exports.
    Nbd(Endpoint),
    /// A directory in which the volumes are files, with loop devices on them.
    Fuse(PathBuf),
}

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Spec, String> {
        if let Some(endpoint) = Endpoint::from_export_option(text) {
            return endpoint.map(Spec::Nbd).map_err(|e| e.to_string());
        }
        match text.split_once('=') {
            None if text == "auto" => Ok(Spec::Auto),
            None if text == "ublk" => Ok(Spec::Ublk(None)),
            Some(("ublk", number)) => match number.parse() {
                Ok(number) if number < MAX_NUMBER => Ok(Spec::Ublk(Some(number))),
                _ => Err(format!("{number}: expected a device number below {MAX_NUMBER}")),
            },
            Some(("fuse", dir)) if !dir.is_empty() => Ok(Spec::Fuse(PathBuf::from(dir))),
            _ => Err("expected auto, ublk, ublk=NUMBER, nbd=SOCKET, nbd=HOST:PORT or fuse=DIR".into()),
        }
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spec::Auto => f.write_str("auto"),
            Spec::Ublk(None) => f.write_str("ublk"),
            Spec::Ublk(Some(number)) => write!(f, "ublk={number}"),
            Spec::Nbd(endpoint) => endpoint.fmt(f),
            Spec::Fuse(dir) => write!(f, "fuse={}", dir.display()),
        }
    }
}

impl Spec {
    /// Whether two exports cannot be at these places at once. Blocks while the names of hosts are resolved.
    pub fn overlaps(&self, other: &Spec) -> bool {
        match (self, other) {
            (Spec::Nbd(one), Spec::Nbd(two)) => one.overlaps(two),
            (Spec::Ublk(Some(one)), Spec::Ublk(Some(two))) => one == two,
            (Spec::Fuse(one), Spec::Fuse(two)) => one == two,
            _ => false,
        }
    }
}

/// What an export is started with.
pub struct Context<'a> {
    /// Of the thread that serves.
    pub driver: &'a Driver,
    /// What is to be reached by this export.
    pub volumes: &'a [Rc<Volume>],
    /// Tells this session from others on the host: the UUID of its set.
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

/// An export that runs.
pub enum Running {
    /// A socket.
    Nbd(nbd::Nbd),
    /// A mounted directory.
    Fuse(fuse::Fuse),
    /// Block devices.
    Ublk(ublk::Ublk),
}

impl Running {
    /// How the volume of this name is reached, the best way first.
    pub fn ways(&self, volume: &str) -> Vec<Way> {
        match self {
            Running::Nbd(nbd) => vec![nbd.way(volume)],
            Running::Fuse(fuse) => fuse.ways(volume),
            Running::Ublk(ublk) => ublk.ways(volume),
        }
    }

    /// Who is connected, in words, where that is something the export alone knows: who has a block device or a file open is
    /// for the system to say.
    pub fn clients(&self) -> Option<String> {
        match self {
            Running::Nbd(nbd) => nbd.clients(),
            Running::Fuse(_) | Running::Ublk(_) => None,
        }
    }

    /// Refuses new requests, answers those under way, and goes. Dropping this future, or what it was made of, ends the
    /// export at once, though it is in use.
    pub async fn stop(self, force: &Force) -> Result<(), Failure> {
        match self {
            Running::Ublk(ublk) => ublk.stop(force).await,
            Running::Nbd(nbd) => {
                nbd.stop().await;
                Ok(())
            }
            Running::Fuse(fuse) => fuse.stop().await,
        }
    }

    /// Whether a stop can be told to use force, and has to be awaited then.
    pub fn takes_force(&self) -> bool {
        matches!(self, Running::Ublk(_))
    }

    /// Whether another process can go on with this export, or its clients are used to reconnecting.
    pub fn can_be_handed_over(&self) -> bool {
        !matches!(self, Running::Fuse(_))
    }

    /// Answers requests under way and begins no more. What the kernel keeps for the next process lasts until it comes.
    pub async fn hand_over(self) -> Option<Running> {
        match self {
            Running::Ublk(ublk) => {
                ublk.hand_over().await;
                Some(Running::Ublk(ublk))
            }
            Running::Nbd(nbd) => {
                nbd.stop().await;
                None
            }
            Running::Fuse(_) => Some(self),
        }
    }

    /// Stops after an error elsewhere. What was there before this process stays.
    pub async fn give_up(self, force: &Force) -> Result<(), Failure> {
        match self {
            Running::Ublk(ublk) => {
                ublk.give_up().await;
                Ok(())
            }
            other => other.stop(force).await,
        }
    }
}

/// Starts an export.
pub async fn start(spec: &Spec, context: &Context<'_>) -> Result<Running, Failure> {
    if matches!(spec, Spec::Nbd(_) | Spec::Fuse(_)) {
        ublk::warn_of_left(context).await;
    }
    let running = match spec {
        Spec::Auto => auto::start(context).await?,
        Spec::Ublk(number) => Running::Ublk(ublk::start(*number, context).await?),
        Spec::Nbd(endpoint) => nbd::start(endpoint, context).map(Running::Nbd)?,
        Spec::Fuse(dir) => fuse::start(dir, false, context).await.map(Running::Fuse)?,
    };
    // Behind what the export itself takes.
    pressure::reserve_heap();
    Ok(running)
}

/// Whether volumes can be block devices on this host; else why not.
pub fn block_devices() -> Result<(), String> {
    fuse::obstacle().map_or(Ok(()), Err)
}

/// Refuses what this host does not have, and ports that would be open by accident, before any device is touched.
pub fn check(spec: &Spec, nbd: &NbdAccess) -> Result<(), Failure> {
    match spec {
        Spec::Nbd(endpoint) => nbd.check(endpoint),
        Spec::Auto | Spec::Fuse(_) => Ok(()),
        Spec::Ublk(_) => ublk::obstacle().map_or(Ok(()), |why| Err(Failure::Failed(why))),
    }
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

    #[test]
    fn options_are_told_apart() {
        assert_eq!("auto".parse(), Ok(Spec::Auto));
        assert_eq!("ublk".parse(), Ok(Spec::Ublk(None)));
        assert_eq!("ublk=7".parse(), Ok(Spec::Ublk(Some(7))));
        assert_eq!("fuse=/mnt".parse(), Ok(Spec::Fuse("/mnt".into())));
        assert_eq!("nbd=/run/x".parse(), Ok(Spec::Nbd(Endpoint::Unix("/run/x".into()))));
        for text in ["auto", "ublk", "ublk=7", "fuse=/mnt", "nbd=/run/x", "nbd=localhost:1"] {
            let spec: Spec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(spec.overlaps(&spec), !matches!(text, "auto" | "ublk"), "{text}");
        }
        for bad in [
            "",
            "nbd",
            "nbd=",
            "fuse",
            "fuse=",
            "ublk=",
            "ublk=x",
            "ublk=-1",
            "ublk=1048576",
            "auto=x",
            "nbd=host:",
        ] {
            assert!(bad.parse::<Spec>().is_err(), "{bad:?}");
        }
    }
}
