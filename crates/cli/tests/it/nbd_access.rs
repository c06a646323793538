//! Access to volumes over NBD: TCP without a setting, TLS with certificates of clients, and hostile clients.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};

use crate::world::{Dir, Up, dirty_files, output, read, run, succeed, tool};

/// An authority that signs certificates.
struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    fn new(name: &str) -> Ca {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Ca(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Writes a certificate and its key to `DIR/NAME-cert.pem` and `DIR/NAME-key.pem`.
    fn sign(&self, dir: &Path, name: &str, purpose: ExtendedKeyUsagePurpose) {
        let mut params = CertificateParams::new(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("ca-cert.pem"), self.0.pem()).unwrap();
        std::fs::write(dir.join(format!("{name}-cert.pem")), certificate.pem()).unwrap();
        let file = dir.join(format!("{name}-key.pem"));
        std::fs::write(&file, key.serialize_pem()).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(file, mode).unwrap();
    }
}

/// Files for a server, and options that name them.
fn server_files(dir: &Dir, ca: &Ca) -> Vec<String> {
    let files = dir.root().join("server");
    ca.sign(&files, "server", ExtendedKeyUsagePurpose::ServerAuth);
    let option = |name: &str, file: &str| format!("--nbd-tls-{name}={}", files.join(file).display());
    vec![
        option("cert", "server-cert.pem"),
        option("key", "server-key.pem"),
        option("client-ca", "ca-cert.pem"),
    ]
}

/// The README once showed a command that let every local user read and write the volume.
#[test]
fn tcp_has_to_be_asked_for() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let before = (read(&ssd), read(&hdd));
    let up =
        |more: &[&str]| run(&[&["up", "-C", &ssd, "-B", &hdd, "--export", "nbd=127.0.0.1:0"], more].concat());
    let said =
        up(&[]).usage().says(&["every user of this host", "nbd=/run/NAME.sock", "--nbd-tls-client-ca"]);
    assert!(!said.err.contains("warning"), "a mistake is said before what the host lacks: {said}");
    up(&["--allow-remote"]).usage().says(&["--nbd-allow-unauthenticated-tcp"]);
    let files = server_files(&dir, &Ca::new("ours"));
    up(&[&files[0], &files[1]]).usage().says(&["does not authenticate clients"]);
    up(&[&files[0]]).usage().says(&["--nbd-tls-key"]);
    up(&[&files[2]]).usage();
    let open =
        run(&["up", "-C", &ssd, "-B", &hdd, "--export", "nbd=0.0.0.0:0", "--nbd-allow-unauthenticated-tcp"]);
    open.refused(&["other hosts", "--allow-remote"]);
    let no_key = format!("--nbd-tls-key={}", dir.path("nothing"));
    up(&[&files[0], &no_key, &files[2]]).refused(&["--nbd-tls-key", "nothing", "cannot be opened"]);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(dir.root().join("server/server-key.pem"), mode).unwrap();
    let text: Vec<&str> = files.iter().map(String::as_str).collect();
    up(&text).refused(&["--nbd-tls-key", "can be read by every user"]);
    assert!((read(&ssd), read(&hdd)) == before, "refused before any device was written to");
}

/// A volume under TLS: clients with a certificate read what was written, and all others are refused and logged.
#[test]
fn volumes_are_served_under_tls_to_clients_with_a_certificate() {
    let dir = Dir::new();
    let [ssd, hdd] = dirty_files(&dir);
    let (ours, other) = (Ca::new("ours"), Ca::new("another"));
    let (good, foreign) = (dir.root().join("good"), dir.root().join("foreign"));
    ours.sign(&good, "client", ExtendedKeyUsagePurpose::ClientAuth);
    other.sign(&foreign, "client", ExtendedKeyUsagePurpose::ClientAuth);
    // It trusts the server and has a certificate of another authority.
    std::fs::copy(good.join("ca-cert.pem"), foreign.join("ca-cert.pem")).unwrap();
    let socket = dir.path("plain.sock");
    let plain = format!("--export=nbd={socket}");
    let files = server_files(&dir, &ours);
    let mut args = vec!["-C", &ssd, "-B", &hdd, &plain, "--export=nbd=127.0.0.1:0"];
    args.extend(files.iter().map(String::as_str));
    let up = Up::start(&dir, 1, &args);
    let tcp = up.ready[0]["exports"][1]["address"].as_str().unwrap().to_owned();
    assert!(tcp.starts_with("nbds://127.0.0.1:"), "{tcp}");

    let with = |certificates: &Path| format!("{tcp}?tls-certificates={}", certificates.display());
    let (over_tls, over_socket) = (dir.path("tls.img"), dir.path("socket.img"));
    let copy = |from: &str, to: &str| {
        let mut nbdcopy = tool("nbdcopy", "libnbd-bin");
        nbdcopy.args([from, to]);
        nbdcopy
    };
    succeed(copy(&up.uri(0), &over_socket));
    succeed(copy(&with(&good), &over_tls));
    assert!(read(&over_tls) == read(&over_socket), "the socket needs no TLS, and shows the same data");
    let changed: Vec<u8> = read(&over_tls).iter().map(|b| !b).collect();
    let changed = dir.file("changed.img", &changed);
    succeed(copy(&changed, &with(&good)));
    succeed(copy(&up.uri(0), &over_socket));
    assert!(read(&over_socket) == read(&changed));

    for uri in [with(&foreign), tcp.replace("nbds://", "nbd://")] {
        let mut info = tool("nbdinfo", "libnbd-bin");
        info.args(["--size", &uri]);
        assert!(!output(info).status.success(), "{uri}");
    }
    let log = up.stop();
    assert!(log.contains("(host 127.0.0.1): TLS was not established: peer sent no certificates"), "{log}");
}
