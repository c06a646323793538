//! How clients reach volumes: one file per kind of export.
//!
//! Owns the `--export` option and what all kinds have in common: an export is started for all volumes of a session,
//! says how each is reached, and is stopped before the volumes are. Exports run on the driver's thread or bring their
//! requests there themselves.

mod auto;
mod fuse;
mod nbd;
mod ublk;

use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;

use blockio::Driver;
use engine::Volume;
use export_nbd::Endpoint;

use crate::failure::Failure;

/// What the operator asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Spec {
    /// The best that build and host offer.
    Auto,
    /// A block device by the ublk driver.
    Ublk,
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
            None if text == "ublk" => Ok(Spec::Ublk),
            Some(("fuse", dir)) if !dir.is_empty() => Ok(Spec::Fuse(PathBuf::from(dir))),
            _ => Err("expected auto, ublk, nbd=SOCKET, nbd=HOST:PORT or fuse=DIR".into()),
        }
    }
}

/// What an export is started with.
pub(crate) struct Context<'a> {
    pub(crate) driver: &'a Driver,
    pub(crate) volumes: &'a [Rc<Volume>],
    /// Tells this session from others on the host: the UUID of its set.
    pub(crate) id: String,
    /// Other hosts may connect.
    pub(crate) remote: bool,
}

/// A way to reach one volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Way {
    /// `nbd` for a URI, `fuse` for a file, `loop` for a block device.
    pub(crate) kind: &'static str,
    /// URI or path.
    pub(crate) address: String,
}

/// What an operator reads: a file under a block device is only its explanation.
pub(crate) fn in_words(ways: &[Way]) -> String {
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
pub(crate) enum Running {
    Nbd(nbd::Nbd),
    Fuse(fuse::Fuse),
}

impl Running {
    /// How the volume of this name is reached, the best way first.
    pub(crate) fn ways(&self, volume: &str) -> Vec<Way> {
        match self {
            Running::Nbd(nbd) => vec![nbd.way(volume)],
            Running::Fuse(fuse) => fuse.ways(volume),
        }
    }

    /// Refuses new requests, answers those under way, and goes. Dropping this future, or what it was made of, ends the
    /// export at once, under whoever uses it.
    pub(crate) async fn stop(self) -> Result<(), Failure> {
        match self {
            Running::Nbd(nbd) => {
                nbd.stop().await;
                Ok(())
            }
            Running::Fuse(fuse) => fuse.stop().await,
        }
    }
}

/// Starts an export.
pub(crate) async fn start(spec: &Spec, context: &Context<'_>) -> Result<Running, Failure> {
    match spec {
        Spec::Auto => auto::start(context).await,
        Spec::Ublk => Err(Failure::Failed(ublk::UNAVAILABLE.into())),
        Spec::Nbd(endpoint) => nbd::start(endpoint, context).map(Running::Nbd),
        Spec::Fuse(dir) => fuse::start(dir, false, context).await.map(Running::Fuse),
    }
}

/// Whether volumes can be block devices on this host; else why not.
pub(crate) fn block_devices() -> Result<(), String> {
    fuse::obstacle().map_or(Ok(()), Err)
}

/// Refuses what this build does not have, before any device is touched.
pub(crate) fn check(spec: &Spec) -> Result<(), Failure> {
    match spec {
        Spec::Auto | Spec::Nbd(_) | Spec::Fuse(_) => Ok(()),
        Spec::Ublk => Err(Failure::Failed(ublk::UNAVAILABLE.into())),
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
        assert_eq!("ublk".parse(), Ok(Spec::Ublk));
        assert_eq!("fuse=/mnt".parse(), Ok(Spec::Fuse("/mnt".into())));
        assert_eq!("nbd=/run/x".parse(), Ok(Spec::Nbd(Endpoint::Unix("/run/x".into()))));
        for bad in ["", "nbd", "nbd=", "fuse", "fuse=", "ublk=1", "auto=x", "nbd=host:"] {
            assert!(bad.parse::<Spec>().is_err(), "{bad:?}");
        }
    }
}
