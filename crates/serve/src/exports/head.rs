//! The example of CONTRIBUTING.md, "Add an export": a socket in a directory that sends the first block of a volume to each client.
//!
//! Owns the socket of one volume. It is a line of the table in the tests of this crate alone, because no client needs it.

use std::any::Any;
use std::cell::Cell;

use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;

use ::io::JoinHandle;
use ::io::sync::{Either, Event, select};
use blockio::{Address, Listener};
use engine::Volume;

use super::kind::{Kind, Opens, WayKind};
use super::spec::{Place, Spec, SpecError};
use super::{Context, Export, Force, Occupied, Way, Work};
use crate::failure::Failure;

/// Bytes that a client reads.
const BLOCK: usize = 4096;

/// The line of the table.
pub(super) const KIND: Kind = Kind {
    name: "head",
    forms: &[("head=DIR", "A socket in this directory sends the first block of the volume to each client.")],
    ways: &[&WAY],
    parse,
    example: |dir| Ok(format!("head={}", dir.display())),
};

static WAY: WayKind = WayKind { name: "head", opens: Opens::Connection };

fn parse(text: &str) -> Option<Result<Spec, SpecError>> {
    text.strip_prefix("head=").map(|dir| Ok(Spec::new(HeadDir(dir.into()))))
}

#[derive(Debug)]
struct HeadDir(PathBuf);

impl fmt::Display for HeadDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "head={}", self.0.display())
    }
}

impl Place for HeadDir {
    fn start<'a>(&'a self, context: &'a Context<'_>) -> Work<'a, Result<Box<dyn Export>, Failure>> {
        Box::pin(async {
            let socket = self.0.join(context.volumes[0].name());
            let listener = Listener::bind(context.driver.reactor(), &Address::Unix(socket.clone()));
            let listener = listener.map_err(|e| Failure::at(&socket, "cannot listen", e))?;
            let ends = Rc::new(Ends::default());
            let serving = serve(listener, context.volumes[0].clone(), ends.clone(), context.driver.handle());
            let task = context.driver.handle().spawn(serving);
            Ok(Box::new(Head { socket, ends, task }) as Box<dyn Export>)
        })
    }

    fn overlaps(&self, other: &dyn Place) -> bool {
        (other as &dyn Any).downcast_ref::<HeadDir>().is_some_and(|other| self.0 == other.0)
    }
}

#[derive(Default)]
struct Ends {
    now: Cell<bool>,
    event: Event,
}

async fn serve(listener: Listener, volume: Rc<Volume>, ends: Rc<Ends>, rt: ::io::Handle) {
    loop {
        let end = Box::pin(ends.event.wait_until(|| ends.now.get()));
        let Either::Left(Ok(client)) = select(Box::pin(listener.accept()), end).await else { return };
        let buffer = rt.pool().take(BLOCK);
        let sectors = format::Sectors(BLOCK as u64 / format::SECTOR_BYTES);
        let (buffer, read) = volume.read(format::Sector(0), sectors, buffer, 0).await;
        if read.is_ok() {
            let _ = client.send_all(buffer).await.1;
        }
    }
}

struct Head {
    socket: PathBuf,
    ends: Rc<Ends>,
    task: JoinHandle<()>,
}

impl Export for Head {
    fn ways(&self, volume: &str) -> Vec<Way> {
        let mine = self.socket.ends_with(volume);
        mine.then(|| Way { kind: &WAY, address: self.socket.display().to_string() }).into_iter().collect()
    }

    fn stop(self: Box<Self>, _force: &Force) -> Work<'_, Result<(), Failure>> {
        Box::pin(async move {
            self.ends.now.set(true);
            self.ends.event.notify_all();
            self.task.await;
            Ok(())
        })
    }

    fn stop_if_free(self: Box<Self>) -> Work<'static, Result<(), Occupied>> {
        Box::pin(async move {
            let stopped = self.stop(&Force::default()).await;
            stopped.expect("a task that ends");
            Ok(())
        })
    }

    fn can_be_handed_over(&self) -> bool {
        false
    }

    fn hand_over(self: Box<Self>) -> Work<'static, Option<Box<dyn Export>>> {
        Box::pin(async { Some(self as Box<dyn Export>) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_table_is_an_option() {
        let spec = |option: &str| option.parse::<Spec>().unwrap();
        assert_eq!(spec("head=/mnt").to_string(), "head=/mnt");
        assert!(spec("head=/mnt").overlaps(&spec("head=/mnt")));
        assert!(!spec("head=/mnt").overlaps(&spec("nbd=/mnt")));
    }
}
