//! The rules that every kind of export keeps, as a suite that runs for an option and a table of kinds.
//!
//! Owns the rules of [`Export`] and [`Place`], and a client that reads the first block in any way. Must not know a kind.
//! The suite runs for each kind that the machine can start, and names the others with the reason.

use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use ::io::WriteFlags;
use blockio::{Driver, DriverOptions};
use rig::{Rig, Shape};

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
        ublk: Some(export_ublk::Shape::default()),
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
