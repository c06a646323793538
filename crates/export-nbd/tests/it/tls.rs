//! TLS between socket and codec: over pipes with a client that is driven by hand, and with real clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

use export_nbd::codec::wire::{command, option, option_reply};
use export_nbd::{ServerOptions, TlsConfig};
use io::MemoryBudget;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::pipe::{PipeClient, pipe};
use crate::tools::{Running, Spec, noise, run, run_ok, write_file};
use crate::wire::{
    Fields, choose, client_flags, option_bytes, option_replies, replies, request, take_greeting,
};
use crate::world::World;
use rig::RamVolume;

const LIBNBD: &str = "libnbd-bin";
const QEMU: &str = "qemu-utils";
const MIB: u64 = 1 << 20;

/// An authority that signs certificates.
struct Ca(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
struct Signed {
    certificate: String,
    key: String,
}

impl Ca {
    fn new() -> Ca {
        Ca::named("ours")
    }

    fn named(name: &str) -> Ca {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        Ca(CertifiedIssuer::self_signed(params, key).expect("an authority"))
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    fn sign(&self, name: &str, purpose: ExtendedKeyUsagePurpose) -> Signed {
        let mut params =
            CertificateParams::new(vec![name.to_owned(), "127.0.0.1".to_owned()]).expect("names");
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate").pem();
        Signed { certificate, key: key.serialize_pem() }
    }

    fn server(&self) -> Signed {
        self.sign("localhost", ExtendedKeyUsagePurpose::ServerAuth)
    }

    fn client(&self) -> Signed {
        self.sign("client", ExtendedKeyUsagePurpose::ClientAuth)
    }
}

fn config(ca: &Ca, clients_need_certificates: bool) -> TlsConfig {
    let (server, clients) = (ca.server(), ca.pem());
    let clients = clients_need_certificates.then_some(clients.as_bytes());
    TlsConfig::from_pem(server.certificate.as_bytes(), server.key.as_bytes(), clients)
        .expect("a configuration")
}

fn client_session(ca: &Ca, own: Option<&Signed>) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.pem().as_bytes()).expect("PEM")).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => {
            let chain = vec![CertificateDer::from_pem_slice(own.certificate.as_bytes()).expect("PEM")];
            let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("PEM");
            builder.with_client_auth_cert(chain, key).expect("a certificate")
        }
    };
    let name = ServerName::try_from("localhost").expect("a name");
    ClientConnection::new(Arc::new(config), name).expect("a session")
}

/// A client under TLS over a pipe.
struct Encrypted<'a> {
    world: &'a World,
    pipe: PipeClient,
    session: ClientConnection,
}

impl<'a> Encrypted<'a> {
    /// Connects, asks for TLS in plain text, and agrees on keys.
    fn start(world: &'a World, tls: TlsConfig, session: ClientConnection, grain: usize) -> Self {
        let (socket, pipe) = pipe();
        pipe.set_grain(grain);
        world.server.serve_socket_with_tls(socket, tls);
        pipe.send(&client_flags(3));
        pipe.send(&option_bytes(option::STARTTLS, &[]));
        world.run();
        let plain = pipe.received();
        let mut fields = Fields(&plain);
        take_greeting(&mut fields);
        assert_eq!(option_replies(fields), [(option::STARTTLS, option_reply::ACK, vec![])]);
        Encrypted { world, pipe, session }
    }

    /// Sends plain bytes under TLS, and returns those that come back, and why it ended if it did.
    fn exchange(&mut self, mut plain: &[u8]) -> (Vec<u8>, Option<String>) {
        let mut back = Vec::new();
        loop {
            let written = self.session.writer().write(plain).expect("memory");
            plain = &plain[written..];
            let mut cipher = Vec::new();
            while self.session.wants_write() {
                self.session.write_tls(&mut cipher).expect("memory");
            }
            self.pipe.send(&cipher);
            self.world.run();
            let answer = self.pipe.received();
            if answer.is_empty() && plain.is_empty() {
                return (back, None);
            }
            let mut rest = &answer[..];
            while !rest.is_empty() {
                self.session.read_tls(&mut rest).expect("memory");
                if let Err(e) = self.session.process_new_packets() {
                    return (back, Some(e.to_string()));
                }
                // The end, and nothing for now, are both no bytes.
                let _ = self.session.reader().read_to_end(&mut back);
            }
        }
    }
}

/// Data survive any cut of the ciphertext, requests that come together, and sends that are larger than a record.
#[test]
fn requests_and_data_pass_through_tls() {
    let ca = Ca::new();
    for grain in [usize::MAX, 1000, 7] {
        let volume = RamVolume::new("disk", 8 << 20).shared();
        let memory = MemoryBudget::new(64 * MIB);
        let options = ServerOptions { memory: memory.clone(), ..ServerOptions::default() };
        let world = World::with([&volume], options);
        let session = client_session(&ca, Some(&ca.client()));
        let mut client = Encrypted::start(&world, config(&ca, true), session, grain);
        let bytes = if grain < 100 { 100 << 10 } else { 3 << 20 };
        let data = noise(bytes, 5);
        let first = [option_bytes(option::STRUCTURED_REPLY, &[]), choose(option::GO, "disk", &[])].concat();
        let (answers, end) = client.exchange(&first);
        assert_eq!(end, None);
        assert_eq!(option_replies(Fields(&answers)).last().map(|r| (r.0, r.1)), Some((option::GO, 1)));
        let requests =
            [crate::wire::write(0, 1, 512, &data), request(command::READ, 0, 2, 512, bytes as u32)].concat();
        let (_, end) = client.exchange(&requests);
        assert_eq!(end, None);
        assert!(volume.contents(512..512 + bytes) == data);
        let (back, _) = client.exchange(&request(command::READ, 0, 3, 512, bytes as u32));
        let back = crate::world::assemble(&replies(&back, |_| 0), 3, 512, bytes).expect("a read");
        assert!(back == data);
        client.exchange(&request(command::DISCONNECT, 0, 4, 0, 0));
        assert!(client.pipe.is_closed());
        assert_eq!(world.last_event(), "0 closed: the client disconnected");
        assert_eq!((world.tasks(), memory.used()), (0, 0));
    }
}

/// Clients that are refused: they get the reason by TLS, and never reach an export.
#[test]
fn clients_without_a_certificate_of_the_right_authority_are_refused() {
    let (ca, other) = (Ca::new(), Ca::named("another"));
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    let cases = [(None, "CertificateRequired"), (Some(other.client()), "UnknownCA"), (Some(ca.server()), "")];
    for (own, alert) in cases {
        let session = client_session(&ca, own.as_ref());
        let mut client = Encrypted::start(&world, config(&ca, true), session, usize::MAX);
        let (answers, end) = client.exchange(&choose(option::GO, "disk", &[]));
        assert!(answers.is_empty());
        let end = end.expect("the server refuses");
        assert!(end.contains(alert), "{end}");
        assert!(client.pipe.is_closed());
        assert!(world.last_event().contains("TLS was not established"), "{}", world.last_event());
    }
    assert!(!world.events().iter().any(|e| e.contains("opened disk")));
    assert_eq!(world.tasks(), 0);
}

/// What comes after STARTTLS and is no TLS ends the connection, at any length.
#[test]
fn plain_text_instead_of_a_handshake_ends_the_connection() {
    let ca = Ca::new();
    let world = World::new([&RamVolume::new("disk", 1 << 20).shared()]);
    for bytes in [choose(option::GO, "disk", &[]), noise(1 << 20, 3), vec![0x16; 200_000]] {
        let client = Encrypted::start(&world, config(&ca, false), client_session(&ca, None), usize::MAX);
        client.pipe.send(&bytes);
        world.run();
        assert!(client.pipe.is_closed(), "{}", world.last_event());
    }
    assert_eq!(world.tasks(), 0);
}

#[test]
fn configurations_that_cannot_be_used_are_named() {
    let (ca, server) = (Ca::new(), Ca::new().server());
    let fails = |certificate: &str, key: &str, clients: Option<&str>| {
        let made = TlsConfig::from_pem(certificate.as_bytes(), key.as_bytes(), clients.map(str::as_bytes));
        made.err().expect("cannot be used").to_string()
    };
    assert!(fails("", &server.key, None).starts_with("server certificate: "));
    assert!(fails(&server.certificate, "x", None).starts_with("server key: "));
    assert!(fails(&server.certificate, &ca.client().key, None).contains("does not fit the certificate"));
    assert!(fails(&server.certificate, &server.key, Some("")).starts_with("CA of the clients: "));
}

/// A directory as libnbd and QEMU want it.
fn certificates(dir: &Path, ca: &Ca, own: Option<&Signed>) -> String {
    std::fs::create_dir_all(dir).expect("a directory");
    std::fs::write(dir.join("ca-cert.pem"), ca.pem()).expect("a file");
    if let Some(own) = own {
        std::fs::write(dir.join("client-cert.pem"), &own.certificate).expect("a file");
        std::fs::write(dir.join("client-key.pem"), &own.key).expect("a file");
    }
    dir.to_str().expect("UTF-8").to_owned()
}

fn nbds(server: &Running, certificates: &str) -> String {
    let plain = server.uri().strip_prefix("nbds://").expect("a server under TLS");
    format!("nbds://{plain}?tls-certificates={certificates}")
}

/// libnbd copies data there and back under TLS, over several connections.
#[test]
fn nbdcopy_brings_back_under_tls_what_it_took() {
    let ca = Ca::new();
    let server = Running::tls(vec![Spec::new("disk", 64 * MIB)], config(&ca, true));
    let dir = server.dir.path();
    let uri = nbds(&server, &certificates(&dir.join("pki"), &ca, Some(&ca.client())));
    let (from, to) = (dir.join("from"), dir.join("to"));
    let data = noise(20 << 20, 7);
    write_file(&from, &[(3 * MIB, &data), (60 * MIB, &data[..MIB as usize])], 64 * MIB);
    let (from, to) = (from.to_str().expect("UTF-8"), to.to_str().expect("UTF-8"));
    let info = run_ok(LIBNBD, "nbdinfo", &["--json", &uri]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!((&info["TLS"], &info["structured"]), (&true.into(), &true.into()), "{info}");
    run_ok(LIBNBD, "nbdcopy", &["--connections=4", "--requests=64", "--flush", from, &uri]);
    run_ok(LIBNBD, "nbdcopy", &["--connections=4", &uri, to]);
    assert!(std::fs::read(from).expect("a file") == std::fs::read(to).expect("a file"));
}

/// QEMU writes and compares an image under TLS.
#[test]
fn qemu_img_compares_under_tls() {
    let ca = Ca::new();
    let server = Running::tls(vec![Spec::new("disk", 64 * MIB)], config(&ca, true));
    let dir = server.dir.path();
    let pki = certificates(&dir.join("pki"), &ca, Some(&ca.client()));
    let raw = dir.join("disk.raw");
    write_file(&raw, &[(0, &noise(MIB as usize, 1)), (33 * MIB + 512, &noise(5 << 20, 2))], 64 * MIB);
    let (_, port) = server.uri().trim_end_matches("/disk").rsplit_once(':').expect("a port");
    let credentials = format!("tls-creds-x509,id=tls,endpoint=client,dir={pki}");
    let raw = format!("driver=raw,file.driver=file,file.filename={}", raw.display());
    let volume = format!(
        "driver=raw,file.driver=nbd,file.host=127.0.0.1,file.port={port},file.export=disk,file.tls-creds=tls"
    );
    let convert =
        ["convert", "-n", "--object", &credentials, "--image-opts", "--target-image-opts", &raw, &volume];
    run_ok(QEMU, "qemu-img", &convert);
    let same =
        run_ok(QEMU, "qemu-img", &["compare", "--object", &credentials, "--image-opts", &raw, &volume]);
    assert!(same.contains("Images are identical"), "{same}");
}

/// Real clients that may not come in: in plain text, without a certificate, with one of another authority. And a client that
/// does not trust the server.
#[test]
fn real_clients_that_may_not_come_in_are_refused() {
    let (ca, other) = (Ca::new(), Ca::named("another"));
    let server = Running::tls(vec![Spec::new("disk", MIB)], config(&ca, true));
    let dir = server.dir.path();
    let plain = server.uri().replace("nbds://", "nbd://");
    let none = nbds(&server, &certificates(&dir.join("none"), &ca, None));
    let foreign = nbds(&server, &certificates(&dir.join("foreign"), &ca, Some(&other.client())));
    let distrusting = nbds(&server, &certificates(&dir.join("other"), &other, Some(&other.client())));
    for uri in [&plain, &none, &foreign, &distrusting] {
        let refused = run(LIBNBD, "nbdinfo", &["--size", uri]);
        assert!(!refused.status.success(), "{uri}: {}", String::from_utf8_lossy(&refused.stdout));
    }
    let said = run(LIBNBD, "nbdinfo", &["--size", &plain]).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("TLS"), "{said}");
    let good = nbds(&server, &certificates(&dir.join("good"), &ca, Some(&ca.client())));
    assert_eq!(run_ok(LIBNBD, "nbdinfo", &["--size", &good]).trim(), MIB.to_string());
}

/// A peer that speaks no NBD at all over TCP: the port closes, and nothing else happens.
#[test]
fn noise_at_the_port_does_no_harm() {
    let ca = Ca::new();
    let server = Running::tls(vec![Spec::new("disk", MIB)], config(&ca, true));
    let address = server.uri().trim_start_matches("nbds://").trim_end_matches("/disk").to_owned();
    for seed in 0..20 {
        let mut stream = TcpStream::connect(&address).expect("a port");
        // The server may have closed already.
        let _ = stream.write_all(&noise(5000, seed));
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let pki = certificates(&server.dir.path().join("good"), &ca, Some(&ca.client()));
    assert_eq!(run_ok(LIBNBD, "nbdinfo", &["--size", &nbds(&server, &pki)]).trim(), MIB.to_string());
}
