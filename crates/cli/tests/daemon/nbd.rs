//! The daemon's NBD ports: never open by accident, under TLS with certificates of clients.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use ubcache_cli::nbd_client::Client;

use crate::place::*;
use crate::world::*;

/// A certificate for itself: server, client and authority in one.
pub fn certificate(place: &Place, name: &str) -> (String, String) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
    let dir = place.dir.root().join(name);
    std::fs::create_dir(&dir).unwrap();
    for file in ["ca-cert.pem", "client-cert.pem"] {
        std::fs::write(dir.join(file), made.cert.pem()).unwrap();
    }
    let key = dir.join("client-key.pem");
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    (dir.join("ca-cert.pem").display().to_string(), key.display().to_string())
}

/// Where the daemon says that the volume is reached.
#[track_caller]
fn uri(daemon: &Daemon) -> String {
    let said = daemon.said();
    let line = said.lines().rev().find_map(|l| l.split_once("bcache0 ready: ")).expect("a ready volume");
    line.1.to_owned()
}

fn size(uri: &str) -> bool {
    let mut info = tool("nbdinfo", "libnbd-bin");
    info.args(["--size", uri]);
    output(info).status.success()
}

/// A volume over TCP: refused as long as no setting names the allowed clients, open if a setting says so, and under TLS for
/// clients with a certificate.
#[test]
fn nbd_over_tcp_has_to_be_asked_for() {
    let place = Place::new();
    let export = "\n[volume.one]\nexports = [\"nbd=127.0.0.1:0\"]\n";
    place.configure(export);
    let said = place.refused();
    for words in ["line 4", "every user of this host", "nbd_allow_unauthenticated_tcp = true"] {
        assert!(said.contains(words), "{said}");
    }

    // Nor is it opened to other hosts, which the daemon has no setting for.
    let remote = export.replace("127.0.0.1", "0.0.0.0");
    place.configure(&format!("nbd_allow_unauthenticated_tcp = true\n{remote}"));
    let said = place.refused();
    assert!(said.contains("line 5: nbd=0.0.0.0:0: other hosts can reach this address"), "{said}");
    assert!(said.contains("nbd_tls_client_ca") && !said.contains("--allow-remote"), "{said}");

    place.configure(&format!("nbd_allow_unauthenticated_tcp = true\n{export}"));
    let daemon = place.start_registered();
    assert!(uri(&daemon).starts_with("nbd://127.0.0.1:") && size(&uri(&daemon)), "{}", daemon.said());
    daemon.stop();

    let (certificate, key) = certificate(&place, "pki");
    let files = format!(
        "nbd_tls_certificate = \"{certificate}\"\nnbd_tls_key = \"{key}\"\nnbd_tls_client_ca = \"{certificate}\"\n"
    );
    place.configure(&format!("{files}{export}"));
    let daemon = place.start();
    wait_until("the volume", || daemon.said().matches("bcache0 ready: ").count() == 2);
    let encrypted = uri(&daemon);
    assert!(encrypted.starts_with("nbds://127.0.0.1:"), "{encrypted}");
    assert!(size(&format!("{encrypted}?tls-certificates={}", place.dir.path("pki"))), "{}", daemon.said());
    assert!(!size(&encrypted) && !size(&encrypted.replace("nbds", "nbd")));

    // A key that others can read is refused, and everything stays as it is.
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o644)).unwrap();
    daemon.run(&["reload"]).refused(&["line 3", "nbd_tls_key", "can be read by every user"]);
    assert!(size(&format!("{encrypted}?tls-certificates={}", place.dir.path("pki"))));
    daemon.stop();
}

/// A second set beside that of the place.
fn second_set(place: &Place) -> (String, String) {
    let (ssd, hdd) = (place.dir.sparse("ssd2", 8 << 20), place.dir.sparse("hdd2", 8 << 20));
    run(&["make", "-C", &ssd, "-B", &hdd, "--bucket", "8k", "--writeback", "--label", "two"]).ok();
    (ssd, hdd)
}

/// What is read through the default export of a socket.
fn first_block(socket: &str) -> Option<u8> {
    let mut client = Client::connect(Path::new(socket), "").ok()?;
    Some(client.read(0, 512).expect("a read")[0])
}

/// The exports that a server offers, by their names.
fn offered(uri: &str) -> Vec<String> {
    let mut info = tool("nbdinfo", "libnbd-bin");
    info.args(["--list", "--json", uri]);
    let said: serde_json::Value = serde_json::from_str(&succeed(info)).unwrap();
    let names =
        said["exports"].as_array().unwrap().iter().map(|e| e["export-name"].as_str().unwrap().to_owned());
    let mut names: Vec<String> = names.filter(|name| !name.is_empty()).collect();
    names.sort();
    names.dedup();
    names
}

/// The second volume of a host was not exported: the socket of the configuration was that of the first one alone.
#[test]
fn one_socket_serves_all_volumes_by_their_names() {
    let place = Place::new();
    let socket = place.dir.path("one.sock");
    std::fs::write(place.dir.path("ubcache.toml"), format!("exports = [\"nbd={socket}\"]\n")).unwrap();
    let (ssd2, hdd2) = second_set(&place);
    let alone = place.dir.sparse("alone", 8 << 20);
    run(&["make", "-B", &alone]).ok();
    let daemon = place.start();
    let all: [&[&str]; 3] = [&[&place.ssd, &place.hdd], &[&ssd2, &hdd2], &[&alone]];
    for devices in all {
        daemon.run(&[&["register"], devices].concat()).ok().says(&["served"]);
    }
    assert!(!daemon.run(&["status"]).ok().out.contains("NOT EXPORTED"));
    assert_eq!(offered(&format!("nbd+unix://?socket={socket}")), ["bcache0", "bcache1", "bcache2"]);
    let connect = |n: usize| Client::connect(Path::new(&socket), &format!("bcache{n}"));
    // Each server takes clients of all volumes, in whatever order they come.
    for round in 0..8_u8 {
        let mut clients: Vec<Client> = (0..3).map(|n| connect(n).unwrap()).collect();
        for (n, client) in clients.iter_mut().enumerate() {
            client.write(u64::from(round) * 4096, &[16 * (n as u8 + 1) + round; 4096]).unwrap();
        }
    }
    let mut last = connect(2).unwrap();
    for n in [1, 0] {
        for round in 0..8_u8 {
            let found = connect(n).unwrap().read(u64::from(round) * 4096, 4096).unwrap();
            assert_eq!(found, [16 * (n as u8 + 1) + round; 4096], "bcache{n}");
        }
        daemon.run(&["stop", &format!("bcache{n}")]).ok();
        assert!(connect(n).is_err(), "it is stopped");
        assert_eq!(last.read(0, 4096).unwrap(), [48; 4096], "other clients are served");
    }
    assert_eq!(offered(&format!("nbd+unix://?socket={socket}")), ["bcache2"]);
    daemon.stop();
    assert!(!Path::new(&socket).exists(), "it goes with the last volume");
}

/// A client that has shown its certificate to one thread is served by another one, which has its volume.
#[test]
fn one_port_serves_all_volumes_under_tls() {
    let place = Place::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (certificate, key) = certificate(&place, "pki");
    let config = format!(
        "exports = [\"nbd={free}\"]\nnbd_tls_certificate = \"{certificate}\"\nnbd_tls_key = \"{key}\"\n\
         nbd_tls_client_ca = \"{certificate}\"\n"
    );
    std::fs::write(place.dir.path("ubcache.toml"), config).unwrap();
    let (ssd2, hdd2) = second_set(&place);
    let data = place.dir.file("data", &[5; 1 << 20]);
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd, &ssd2, &hdd2]).ok();
    let uri = |n: usize| format!("nbds://{free}/bcache{n}?tls-certificates={}", place.dir.path("pki"));
    let copy = |from: &str, to: &str| {
        let mut copy = tool("nbdcopy", "libnbd-bin");
        copy.args([from, to]);
        output(copy).status.success()
    };
    for round in 0..4 {
        for n in [0, 1] {
            assert!(copy(&data, &uri(n)), "{}", daemon.said());
            let back = place.dir.path(&format!("back-{n}-{round}"));
            assert!(copy(&uri(n), &back), "{}", daemon.said());
            assert!(std::fs::read(&back).unwrap()[..1 << 20].iter().all(|b| *b == 5));
        }
    }
    assert!(!size(&format!("nbd://{free}/bcache1")) && !size(&format!("nbds://{free}/bcache1")));
    daemon.stop();
}

/// A client that names no volume gets the first one that was exported at the socket, whichever comes up first, and no other
/// one while that is away: it would write to the wrong volume.
#[test]
fn a_client_without_a_name_gets_the_same_volume_after_each_start() {
    let place = Place::new();
    let socket = place.dir.path("one.sock");
    let only = format!("exports = [\"nbd={socket}\"]\n");
    std::fs::write(place.dir.path("ubcache.toml"), &only).unwrap();
    let (ssd2, hdd2) = second_set(&place);
    let daemon = place.start_registered();
    let mut client = Client::connect(Path::new(&socket), "bcache0").unwrap();
    client.write(0, &[7; 512]).unwrap();
    drop(client);
    daemon.run(&["register", &ssd2, &hdd2]).ok();
    assert_eq!(first_block(&socket), Some(7));
    daemon.stop();

    // The first volume is away: the other one does not take its place, but is there under its own name.
    let away = [&place.ssd, &place.hdd].map(|path| (path.clone(), format!("{path}.away")));
    away.iter().for_each(|(path, aside)| std::fs::rename(path, aside).unwrap());
    let daemon = place.start();
    assert_eq!(daemon.state_of(&hdd2), "served");
    assert_eq!(first_block(&socket), None, "{}", daemon.said());
    assert_eq!(Client::connect(Path::new(&socket), "bcache1").unwrap().read(0, 512).unwrap(), [0; 512]);
    daemon.stop();
    away.iter().for_each(|(path, aside)| std::fs::rename(aside, path).unwrap());
    for _ in 0..3 {
        let daemon = place.start();
        assert_eq!(first_block(&socket), Some(7), "{}", daemon.said());
        daemon.stop();
    }
    // It is let go: the other one is the first.
    let daemon = place.start();
    daemon.run(&["unregister", &place.hdd]).ok();
    daemon.run(&["unregister", &place.ssd]).ok();
    daemon.stop();
    let daemon = place.start();
    assert_eq!(first_block(&socket), Some(0), "{}", daemon.said());
    daemon.stop();
}

/// An export that does not come up: the exit code, `status` and the metrics say so.
#[test]
fn an_export_that_does_not_come_up_is_told() {
    let place = Place::new();
    let file = place.dir.file("taken", b"no socket");
    std::fs::write(place.dir.path("ubcache.toml"), format!("exports = [\"nbd={file}\"]\n")).unwrap();
    let daemon = place.start();
    let said = daemon.run(&["register", &place.ssd, &place.hdd]);
    let key = "; correct this, or change `exports` of the configuration";
    said.refused(&["one, bcache0: NOT EXPORTED", &file, &format!("{key}, then run `ubcache reload`")]);
    daemon
        .run(&["status"])
        .ok()
        .says(&["one (bcache0) is NOT EXPORTED", &format!("{key}; run `ubcache reload`")]);
    let exported = || {
        let mut stream = daemon.connect();
        std::io::Write::write_all(&mut stream, b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
        let line = text.lines().find(|l| l.starts_with("ubcache_volume_exported{")).unwrap();
        line.ends_with(" 1")
    };
    assert!(!exported(), "{}", daemon.said());
    assert!(!daemon.said().contains("bcache0 ready"), "{}", daemon.said());
    std::fs::remove_file(&file).unwrap();
    // Its section exports it nowhere, which is no mistake.
    let config = std::fs::read_to_string(place.dir.path("ubcache.toml")).unwrap();
    let nowhere = format!("{config}[volume.one]\nexports = []\n");
    std::fs::write(place.dir.path("ubcache.toml"), nowhere).unwrap();
    daemon.run(&["reload"]).ok();
    daemon.run(&["stop", "one"]).ok();
    daemon.run(&["register", &place.hdd]).ok();
    assert!(daemon.said().contains("bcache0 is served; the configuration has no exports for it"));
    assert!(!daemon.said().contains("bcache0 ready"), "{}", daemon.said());
    std::fs::write(place.dir.path("ubcache.toml"), config).unwrap();
    daemon.run(&["reload"]).ok();
    daemon.run(&["unregister", &place.ssd]).ok();
    daemon.run(&["register", &place.ssd]).ok();
    assert!(exported(), "{}", daemon.said());
    daemon.stop();
}

#[test]
fn a_configuration_with_one_place_for_two_volumes_is_refused() {
    let place = Place::new();
    let sections = "[volume.one]\nexports = [\"ublk=7\"]\n[volume.two]\nexports = [\"ublk=7\"]\n";
    place.configure(sections);
    let said = place.refused();
    assert!(said.contains("line 5: ") && said.contains("[volume.one] and [volume.two] both name"), "{said}");
    place.configure("");
    let (ssd2, hdd2) = second_set(&place);
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd, &ssd2, &hdd2]).ok();
    let both = [place.client("bcache0"), place.client("bcache1")];
    let only = format!("exports = [\"fuse={}\"]\n", place.dir.path("one"));
    std::fs::write(place.dir.path("ubcache.toml"), only).unwrap();
    daemon.run(&["reload"]).refused(&["one: belongs to", "one, bcache", "two, bcache"]);
    drop(both);
    place.configure("");
    daemon.run(&["reload"]).ok().says(&["nothing has changed"]);
    daemon.stop();
}

/// Sections are named by UUID or label; `bcache0` was taken without a word, and did nothing.
#[test]
fn sections_that_apply_to_nothing_are_told() {
    let place = Place::new();
    let useless = "[volume.bcache0.tunables]\nwriteback_percent = 33\n[volume.none]\npreset = \"latency\"\n";
    place.configure(useless);
    let daemon = place.start();
    wait_until("the warning", || {
        let said = daemon.said();
        said.contains("[volume.bcache0] has no effect") && said.contains("[volume.none] has no effect")
    });
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    daemon.run(&["get", "bcache0", "writeback_percent"]).ok().says(&["10"]);
    let uuid = daemon.volume("bcache0")["backing_uuid"].as_str().unwrap().to_owned();
    daemon
        .run(&["reload"])
        .ok()
        .says(&[&format!("write [volume.\"{uuid}\"]"), "[volume.none] has no effect"]);
    place.configure(&format!("[volume.\"{uuid}\".tunables]\nwriteback_percent = 33\n"));
    let said = daemon.run(&["reload"]).ok().says(&["writeback_percent: 10 → 33"]);
    assert!(!said.out.contains("no effect"), "{said}");
    daemon.stop();
}

/// A client that closes the socket during the handshake causes no warning: the listener's own probe of a socket does so.
#[test]
fn a_socket_that_is_only_looked_at_is_no_warning() {
    let place = Place::new();
    let daemon = place.start_registered();
    let socket = place.dir.path("bcache0.sock");
    for _ in 0..50 {
        drop(UnixStream::connect(&socket).unwrap());
    }
    // The listener takes connections in order: when it serves this one, the others have ended.
    assert_eq!(first_block(&socket), Some(0));
    let said = daemon.said();
    daemon.stop();
    assert!(!said.contains("nbd: ") && !said.contains("socket failed"), "{said}");
}
