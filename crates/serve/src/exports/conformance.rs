//! The rules that every kind of export keeps, as a suite that runs for an option and a table of kinds.
//!
//! Owns the rules of [`Export`] and [`Place`], and a client that reads the first block in any way. Must not know a kind.
//! The suite runs for each kind that the machine can start, and names the others with the reason. A kind that only this
//! test has passes it, too.

use std::fmt;
use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use ::io::WriteFlags;
use blockio::{Driver, DriverOptions};
use rig::{Rig, Shape};

use super::spec::SpecError;
use super::*;

/// Number of bytes that a client reads.
const BLOCK: usize = 4096;

/// Runs the suite for a kind of the table, at the place that an option names.
fn check(kinds: &[Kind], kind: &Kind, option: &str) {
    let spec = Spec::parse(option, kinds).unwrap();
    assert_eq!(spec.to_string(), option, "an option is shown as it was given");
    spec.prepare().unwrap();
    spec.check(&NbdAccess::default()).unwrap();
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let rt = driver.handle();
    driver.block_on(async {
        let rig = Shape::default().open(&rt).await;
        rig.volume.set_name("vol");
        life(&driver, &rig, &spec, kind).await;
        rig.set.stop().await.unwrap();
    });
}

/// Runs an export and its successors at the same place: clients reach each by all of its ways, and by none after its end.
async fn life(driver: &Driver, rig: &Rig, spec: &Spec, kind: &Kind) {
    let force = Force::default();
    let volumes = [rig.volume.clone()];
    let context = Context {
        driver,
        volumes: &volumes,
        id: "a-set".into(),
        place: "vol".into(),
        sharing: Sharing::Alone,
        nbd: NbdAccess::default(),
        ublk: export_ublk::Shape::default(),
    };
    for (round, end) in ["stop", "hand over", "stop if free", "give up", "stop"].into_iter().enumerate() {
        let at = format!("{spec}, round {round}, {end}");
        let export = start(spec, &context).await.unwrap_or_else(|e| panic!("{at}: {:?}", e.message()));
        let ways = export.ways("vol");
        assert!(!ways.is_empty(), "{at}: no way to the volume");
        assert!(
            ways.iter().all(|way| kind.ways.contains(&way.kind) && !way.address.is_empty()),
            "{at}: {ways:?}"
        );
        for way in &ways {
            check_way(way, &at);
        }
        assert!(!in_words(&ways).is_empty(), "{at}");
        fill(rig, round as u8 + 1).await;
        for way in &ways {
            let found = read_by(driver, way).await.unwrap_or_else(|e| panic!("{at}: {way:?}: {e}"));
            assert!(found.iter().all(|byte| *byte == round as u8 + 1), "{at}: {way:?}: other data");
        }
        match end {
            "hand over" if export.can_be_handed_over() => drop(export.hand_over().await),
            "stop if free" => export.stop_if_free().await.unwrap_or_else(|o| panic!("{at}: {}", o.why)),
            "give up" => export.give_up(&force).await.unwrap_or_else(|e| panic!("{at}: {:?}", e.message())),
            _ => export.stop(&force).await.unwrap_or_else(|e| panic!("{at}: {:?}", e.message())),
        }
        let is_kept = end == "hand over" && spec.recovers();
        for way in ways.iter().filter(|_| !is_kept) {
            assert!(read_by(driver, way).await.is_err(), "{at}: {way:?}: still served");
        }
    }
}

/// Checks that an address is what the table says that clients open.
fn check_way(way: &Way, at: &str) {
    let file_type = std::fs::metadata(&way.address).map(|meta| meta.file_type());
    match (way.kind.opens, file_type) {
        (Opens::BlockDevice { prefix }, Ok(file_type)) => {
            let name = way.address.strip_prefix("/dev/").unwrap_or_default();
            assert!(file_type.is_block_device() && name.starts_with(prefix), "{at}: {way:?}");
        }
        (Opens::File, Ok(file_type)) => assert!(file_type.is_file(), "{at}: {way:?}"),
        (Opens::Connection, _) => {}
        (_, Err(e)) => panic!("{at}: {way:?}: {e}"),
    }
}

/// Writes a block of one byte through the volume.
async fn fill(rig: &Rig, byte: u8) {
    let buffer = rig.runtime().pool().copy_of(&[byte; BLOCK]);
    let sectors = format::Sectors(BLOCK as u64 / format::SECTOR_BYTES);
    rig.volume.write(format::Sector(0), sectors, buffer, 0, WriteFlags::default()).await.unwrap();
}

/// Reads the first block as a client of this way does.
async fn read_by(driver: &Driver, way: &Way) -> std::io::Result<Vec<u8>> {
    let way = way.clone();
    let read =
        move || match way.address.strip_prefix("nbd+unix:///").and_then(|uri| uri.split_once("?socket=")) {
            Some((name, socket)) => read_by_nbd(name, Path::new(socket)),
            None => {
                let mut bytes = vec![0; BLOCK];
                if std::fs::metadata(&way.address)?.file_type().is_socket() {
                    UnixStream::connect(&way.address)?.read_exact(&mut bytes)?;
                } else {
                    std::fs::File::open(&way.address)?.read_exact(&mut bytes)?;
                }
                Ok(bytes)
            }
        };
    driver.reactor().blocking(read).await
}

/// Reads the first block over NBD: handshake and one read.
fn read_by_nbd(name: &str, socket: &Path) -> std::io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.read_exact(&mut [0; 18])?;
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend(b"IHAVEOPT");
    hello.extend(1_u32.to_be_bytes());
    hello.extend((name.len() as u32).to_be_bytes());
    hello.extend(name.as_bytes());
    stream.write_all(&hello)?;
    stream.read_exact(&mut [0; 10])?;
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend([0; 20]);
    request.extend((BLOCK as u32).to_be_bytes());
    stream.write_all(&request)?;
    let mut reply = vec![0; 16 + BLOCK];
    stream.read_exact(&mut reply)?;
    Ok(reply.split_off(16))
}

/// Runs the suite for all kinds of a table that this machine can start. The test counts as skipped if it can start none.
fn check_all(kinds: &[Kind]) {
    let (mut checked, mut missing) = (0, Vec::new());
    for kind in kinds {
        let dir = tempfile::tempdir().unwrap();
        match (kind.example)(dir.path()) {
            Ok(option) => {
                check(kinds, kind, &option);
                checked += 1;
            }
            // It starts one of the others.
            Err(_) if kind.ways.is_empty() => {}
            Err(why) => missing.push(format!("{}: {why}", kind.name)),
        }
    }
    let report: fn(String) = if checked == 0 { rig::skipped } else { rig::skipped_in_part };
    missing.into_iter().for_each(report);
}

#[test]
fn all_kinds_conform() {
    check_all(KINDS);
}

/// The example of CONTRIBUTING.md, "Add an export": a socket in a directory that sends the first block of a volume to each client.
mod head {
    use std::any::Any;
    use std::cell::Cell;

    use ::io::JoinHandle;
    use ::io::sync::{Either, Event, select};
    use blockio::{Address, Listener};

    use super::*;

    pub(super) const KIND: Kind = Kind {
        name: "head",
        forms: &[(
            "head=DIR",
            "A socket in this directory sends the first block of the volume to each client.",
        )],
        ways: &[&WAY],
        parse,
        #[cfg(test)]
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
                let serving =
                    serve(listener, context.volumes[0].clone(), ends.clone(), context.driver.handle());
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
}

/// A further kind of export needs only a further line in the table.
#[test]
fn a_new_kind_conforms() {
    const TABLE: &[Kind] = &[nbd::KIND, head::KIND];
    check_all(TABLE);
    assert_eq!(
        Spec::parse("tape", TABLE).unwrap_err().to_string(),
        "expected nbd=SOCKET, nbd=HOST:PORT or head=DIR"
    );
    let spec = |option: &str| Spec::parse(option, TABLE).unwrap();
    assert!(spec("head=/mnt").overlaps(&spec("head=/mnt")) && !spec("head=/mnt").overlaps(&spec("nbd=/mnt")));
}
