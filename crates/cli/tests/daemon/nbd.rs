//! The daemon's NBD ports: never open by accident, under TLS with certificates of clients.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use ubcache_cli::nbd_client::Client;

use crate::place::*;
use crate::world::*;

/// A certificate for itself: server, client and authority in one.
fn certificate(place: &Place, name: &str) -> (String, String) {
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

/// A volume over TCP: refused as long as nobody says who may come, open if that is asked for, and under TLS for those with a
/// certificate.
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
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
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

/// Two volumes were given one socket: whichever came up first had it, another one after each start, and a client without a
/// name for its export wrote to the wrong volume.
#[test]
fn a_socket_has_one_volume_whichever_comes_up_first() {
    let place = Place::new();
    let socket = place.dir.path("one.sock");
    let only = format!("exports = [\"nbd={socket}\"]\n");
    std::fs::write(place.dir.path("ubcache.toml"), &only).unwrap();
    let (ssd2, hdd2) = second_set(&place);
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
    let mut client = Client::connect(Path::new(&socket), "bcache0").unwrap();
    client.write(0, &[7; 512]).unwrap();
    drop(client);
    let said = daemon.run(&["register", &ssd2, &hdd2]);
    said.refused(&["bcache1: NOT EXPORTED", &format!("nbd={socket}"), "bcache0 (UUID ", "label two"]);
    daemon.run(&["status"]).ok().says(&["NOT EXPORTED"]);
    assert_eq!(daemon.state_of(&hdd2), "served");
    daemon.stop();

    // The first volume is away: the other one does not take its place.
    let away = [&place.ssd, &place.hdd].map(|path| (path.clone(), format!("{path}.away")));
    away.iter().for_each(|(path, aside)| std::fs::rename(path, aside).unwrap());
    let daemon = place.start();
    assert_eq!(daemon.state_of(&hdd2), "served");
    assert_eq!(first_block(&socket), None, "{}", daemon.said());
    daemon.stop();
    away.iter().for_each(|(path, aside)| std::fs::rename(aside, path).unwrap());
    for _ in 0..3 {
        let daemon = place.start();
        assert_eq!(first_block(&socket), Some(7), "{}", daemon.said());
        daemon.stop();
    }
    // It is let go: the socket is for the other one.
    let daemon = place.start();
    daemon.run(&["unregister", &place.hdd]).ok();
    daemon.run(&["unregister", &place.ssd]).ok();
    daemon.stop();
    let daemon = place.start();
    assert_eq!(first_block(&socket), Some(0), "{}", daemon.said());
    daemon.stop();
}

#[test]
fn a_configuration_with_one_place_for_two_volumes_is_refused() {
    let place = Place::new();
    let sections =
        "[volume.one]\nexports = [\"nbd=/run/x.sock\"]\n[volume.two]\nexports = [\"nbd=/run/x.sock\"]\n";
    place.configure(sections);
    let said = place.refused();
    assert!(said.contains("line 5: ") && said.contains("[volume.one] and [volume.two] both name"), "{said}");
    place.configure("");
    let (ssd2, hdd2) = second_set(&place);
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd, &ssd2, &hdd2]).ok();
    let both = [place.client("bcache0"), place.client("bcache1")];
    let only = format!("exports = [\"nbd={}\"]\n", place.dir.path("one.sock"));
    std::fs::write(place.dir.path("ubcache.toml"), only).unwrap();
    daemon.run(&["reload"]).refused(&["one.sock: belongs to", "label one", "label two"]);
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
    let daemon = place.start();
    daemon.run(&["register", &place.ssd, &place.hdd]).ok();
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
