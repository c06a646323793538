//! Many volumes in one daemon, each over every export that this host has.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde_json::Value;
use ubcache_cli::nbd_client::Client;

use crate::nbd::certificate;
use crate::place::*;
use crate::world::*;

const VOLUMES: usize = 24;
const BLOCK: usize = 4096;

/// Opens a file or block device for reading and writing past the page cache.
fn direct(path: &str) -> File {
    let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    let opened = File::options().read(true).write(true).custom_flags(flag).open(path);
    opened.unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// A buffer with the alignment that direct I/O needs, filled with `byte`.
fn aligned(byte: u8) -> Vec<u8> {
    vec![byte; 2 * BLOCK]
}

/// The aligned block in such a buffer.
fn block(buffer: &mut [u8]) -> &mut [u8] {
    let at = buffer.as_ptr().align_offset(BLOCK);
    &mut buffer[at..at + BLOCK]
}

fn read_block(path: &str, nr: usize) -> Vec<u8> {
    let mut file = direct(path);
    file.seek(SeekFrom::Start((nr * BLOCK) as u64)).unwrap();
    let mut buffer = aligned(0);
    file.read_exact(block(&mut buffer)).unwrap();
    block(&mut buffer).to_vec()
}

fn write_block(path: &str, nr: usize, byte: u8) {
    let mut file = direct(path);
    file.seek(SeekFrom::Start((nr * BLOCK) as u64)).unwrap();
    file.write_all(block(&mut aligned(byte))).unwrap();
}

/// The block device of a volume: a device of ublk, or a loop device where the host has no ublk.
fn device(volume: &Value) -> &str {
    let ways = volume["exports"].as_array().unwrap();
    let found = ways.iter().find(|w| w["kind"] == "ublk" || w["kind"] == "loop");
    found.unwrap_or_else(|| panic!("no block device: {volume}"))["address"].as_str().unwrap()
}

/// Copies from a file to a volume over NBD under TLS, or back.
#[track_caller]
fn copy(from: &str, to: &str) {
    let mut copy = tool("nbdcopy", "libnbd-bin");
    copy.args([from, to]);
    let output = output(copy);
    assert!(output.status.success(), "{from} to {to}: {}", String::from_utf8_lossy(&output.stderr));
}

/// What is written over one export is read over all others, for 24 volumes at the same time. Each volume has its own data.
#[test]
fn twenty_four_volumes_are_served_over_every_export() {
    let host = export_fuse::probe();
    if let Err(why) = host.fuse.and(host.loop_device) {
        rig::skipped(why);
        return;
    }
    let place = Place::new();
    let root = place.dir.root().display().to_string();
    let socket = place.dir.path("all.sock");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (certificate, key) = certificate(&place, "pki");
    let exports = format!(
        "exports = [\"auto\", \"nbd={socket}\", \"nbd={port}\", \"fuse={root}/mnt/{{volume}}\"]\n\
         nbd_tls_certificate = \"{certificate}\"\nnbd_tls_key = \"{key}\"\nnbd_tls_client_ca = \"{certificate}\"\n"
    );
    let over_tls = |name: &str| format!("nbds://{port}/{name}?tls-certificates={root}/pki");
    std::fs::write(place.dir.path("ubcache.toml"), exports).unwrap();
    std::fs::create_dir(place.dir.path("mnt")).unwrap();
    let mut make = vec!["make".to_owned(), "-C".to_owned(), place.dir.sparse("many", 64 << 20)];
    let disks: Vec<String> = (0..VOLUMES).map(|n| place.dir.sparse(&format!("disk{n}"), 8 << 20)).collect();
    make.extend(disks.iter().flat_map(|disk| ["-B".to_owned(), disk.clone()]));
    make.extend(["--bucket", "64k", "--writeback"].map(str::to_owned));
    run(&make.iter().map(String::as_str).collect::<Vec<_>>()).ok();

    let daemon = place.start();
    let register: Vec<&str> =
        ["register", &make[2]].into_iter().chain(disks.iter().map(String::as_str)).collect();
    daemon.run(&register).ok();
    let volumes = daemon.json(&["status"])["sets"][0]["volumes"].as_array().unwrap().clone();
    assert_eq!(volumes.len(), VOLUMES);
    for (n, volume) in volumes.iter().enumerate() {
        assert_eq!(volume["problem"], Value::Null, "{volume}");
        let name = volume["name"].as_str().unwrap();
        let own = |kind: u8| u8::try_from(n).unwrap() * 8 + kind;
        copy(&place.dir.file("blocks", &[own(4); 4 * BLOCK]), &over_tls(name));
        let mut nbd = Client::connect(Path::new(&socket), name).unwrap();
        nbd.write(0, &[own(1); BLOCK]).unwrap();
        write_block(&format!("{root}/mnt/{name}/{name}"), 1, own(2));
        write_block(device(volume), 2, own(3));
    }
    for (n, volume) in volumes.iter().enumerate() {
        let name = volume["name"].as_str().unwrap();
        let expected = |nr: usize| vec![u8::try_from(n * 8 + nr + 1).unwrap(); BLOCK];
        let mut nbd = Client::connect(Path::new(&socket), name).unwrap();
        let copied = place.dir.path("copied");
        copy(&over_tls(name), &copied);
        let copied = read(&copied);
        for nr in 0..4 {
            assert_eq!(copied[nr * BLOCK..][..BLOCK], expected(nr), "{name} over NBD under TLS");
            assert_eq!(nbd.read((nr * BLOCK) as u64, BLOCK as u32).unwrap(), expected(nr), "{name} over NBD");
            assert_eq!(
                read_block(&format!("{root}/mnt/{name}/{name}"), nr),
                expected(nr),
                "{name} over FUSE"
            );
            assert_eq!(read_block(device(volume), nr), expected(nr), "{name} at {}", device(volume));
        }
    }
    daemon.stop();
}
