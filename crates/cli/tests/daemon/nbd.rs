//! The daemon's NBD ports: never open by accident, under TLS with certificates of clients.

use std::os::unix::fs::PermissionsExt;

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
    daemon.run(&["reload"]).refused(&["line 3", "nbd_tls_key", "open to everybody"]);
    assert!(size(&format!("{encrypted}?tls-certificates={}", place.dir.path("pki"))));
    daemon.stop();
}
