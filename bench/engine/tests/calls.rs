//! How often a served request enters the kernel: a set on files, NBD over a unix socket, everything on one ring. What is
//! counted are the calls that submit to the ring or wait for it; there are no others on the way of a request.

use std::path::Path;

use bench::{driver, open_on};
use blockio::bridge::oneshot;
use blockio::{Driver, FileDevice, OpenOptions};
use cli::nbd_client::{Ask, Client};
use engine::VolumeRef;
use export_nbd::{Endpoint, Exports, Reach, Server, ServerOptions};
use format::Sectors;
use io::Disk;
use std::rc::Rc;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 4096;
const REQUESTS: u64 = 4096;

fn disk(driver: &Driver, dir: &Path, name: &str, bytes: u64) -> Disk {
    let path = dir.join(name);
    std::fs::File::create(&path).expect("a file").set_len(bytes).expect("a sparse file");
    let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default());
    Disk::new(Rc::new(device.unwrap_or_else(|e| panic!("{e}"))), driver.handle())
}

/// Requests in groups of `depth`: the next group when all of the last are answered.
fn ask(client: &mut Client, depth: u64, write: bool) {
    let data = vec![7; BLOCK];
    for first in (0..REQUESTS).step_by(depth as usize) {
        for n in first..first + depth {
            let at = n * 7919 % BLOCKS * BLOCK as u64;
            let asked = match write {
                true => client.ask_write(at, &data, false, n),
                false => client.ask(Ask::Read(BLOCK as u32), at, n),
            };
            asked.expect("a server");
        }
        client.send().expect("a server");
        for _ in 0..depth {
            assert_eq!(client.receive().expect("a server").error, 0);
        }
    }
}

#[test]
fn requests_share_their_way_into_the_kernel() {
    // Not in memory: files there are served without the ring.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let driver = driver();
    assert!(driver.reactor().is_uring(), "{}", driver.backend_note());
    let cache = disk(&driver, dir.path(), "cache", 1 << 30);
    let backing = disk(&driver, dir.path(), "backing", 64 << 20);
    let (set, volume) = driver.block_on(open_on(cache, backing, Sectors(8)));
    volume.set_name("disk");
    let exports = Exports::new();
    exports.add(Rc::new(VolumeRef(volume.clone()))).expect("a name");
    let server = Server::new(driver.handle(), exports, ServerOptions::default());
    let socket = dir.path().join("nbd.sock");
    let endpoint = Endpoint::from_export_option(&format!("nbd={}", socket.display()));
    let endpoint = endpoint.expect("an endpoint").unwrap_or_else(|e| panic!("{e}"));
    server.serve_listener(endpoint.bind(driver.reactor(), Reach::Loopback).expect("a socket"));

    let run = |work: Box<dyn FnOnce(Option<Client>) -> Client + Send>, client: Option<Client>| {
        let (done, wait) = oneshot();
        let thread = std::thread::spawn(move || done.send(work(client)));
        let before = driver.reactor().counts();
        let client = driver.block_on(wait).expect("the client lives");
        let after = driver.reactor().counts();
        thread.join().expect("the client ends well");
        (client, after.kernel_calls - before.kernel_calls, after.commands - before.commands)
    };
    let connect = move |_| Client::connect(&socket, "disk").expect("a server");
    let (mut client, ..) = run(Box::new(connect), None);
    // Depth, write, most calls for each request. How many requests one call serves depends on how quick the client is.
    let mut above = Vec::new();
    for (depth, write, most) in
        [(32, true, 0.3), (32, true, 0.3), (32, false, 0.3), (1, true, 3.5), (1, false, 3.5)]
    {
        let work = move |client: Option<Client>| {
            let mut client = client.expect("it was given");
            ask(&mut client, depth, write);
            client
        };
        let (back, calls, commands) = run(Box::new(work), Some(client));
        client = back;
        let each = calls as f64 / REQUESTS as f64;
        let what = if write { "write" } else { "read hit" };
        println!(
            "{what} at depth {depth}: {each:.3} calls, {:.2} commands each, at most {most} calls",
            commands as f64 / REQUESTS as f64
        );
        if each > most {
            above.push(format!(
                "{what} at depth {depth}: {each:.3} calls for each request, at most {most} expected"
            ));
        }
    }
    drop(client);
    driver.block_on(async {
        server.stop().await;
        set.stop().await.unwrap_or_else(|e| panic!("{e}"));
    });
    assert!(above.is_empty(), "{above:#?}");
}
