//! Clients over TCP: with the token, without it, under TLS, and those that only take room.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::clients::malformed;
use crate::place::*;
use crate::world::*;

const TOKEN: &str = "4f1c2d7e9a8b6053-of-this-test";
const OTHER: &str = "another-token-that-nobody-knows";

/// Writes a file that is its owner's alone, and says where it is.
fn private(place: &Place, name: &str, text: &str) -> String {
    let path = place.dir.path(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    path
}

/// Lines of a configuration: a port of this host, for those who have the token.
fn listening(place: &Place) -> String {
    let token = private(place, "token", &format!("{TOKEN}\n"));
    format!("listen = [\"127.0.0.1:0\"]\ntoken_file = \"{token}\"\n")
}

/// Lines of a configuration: a port of this host under TLS, with a certificate that is made for it, and a token.
fn listening_tls(place: &Place) -> String {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()]).unwrap();
    std::fs::write(place.dir.path("certificate"), made.cert.pem()).unwrap();
    let key = private(place, "key", &made.signing_key.serialize_pem());
    let certificate = place.dir.path("certificate");
    listening(place) + &format!("tls_certificate = \"{certificate}\"\ntls_key = \"{key}\"\n")
}

/// Where the daemon says that it listens, the `n`th time (from 0).
#[track_caller]
fn url(daemon: &Daemon, n: usize) -> String {
    let said = || -> Option<String> {
        let said = daemon.said();
        let after = said.split("listens on ").nth(n + 1)?;
        Some(after.split_once('\n')?.0.to_owned())
    };
    wait_until("the port", || said().is_some());
    said().unwrap()
}

fn connect(url: &str) -> TcpStream {
    let stream = TcpStream::connect(url.split_once("://").unwrap().1).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.set_write_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Status and text of the answer to a request with these lines in its head.
#[track_caller]
fn ask(url: &str, method: &str, path: &str, lines: &str) -> (u16, String) {
    let mut stream = connect(url);
    write!(stream, "{method} {path} HTTP/1.0\r\n{lines}\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    (text.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("{text:?}")), text)
}

/// A command that talks to a daemon over TCP.
fn over(url: &str, token_file: &str, args: &[&str]) -> Said {
    let all: Vec<&str> =
        args.iter().copied().chain(["--api", url]).chain(["--token-file", token_file]).collect();
    run(&all)
}

#[test]
fn over_tcp_only_those_with_the_token_may() {
    let place = Place::new();
    place.configure(&listening(&place));
    let daemon = place.start();
    let url = url(&daemon, 0);
    let right = format!("Authorization: Bearer {TOKEN}\r\n");
    let (status, text) = ask(&url, "GET", "/v1/status", &right);
    assert!(status == 200 && text.contains("schema_version"), "{text}");

    for (path, lines, words) in [
        ("/v1/status", "", "token required"),
        ("/v1/status", "Authorization: Bearer 4f1c2d7e9a8b6053-of-this-tess\r\n", "wrong token"),
        ("/v1/status", &format!("Authorization: Basic {TOKEN}\r\n"), "wrong token"),
        ("/v1/events", "", "token required"),
        ("/v1/openapi.json", "", "token required"),
        ("/nowhere", "", "token required"),
        ("/metrics", "", "token required"),
        ("/assets/../v1/status", "", ""),
    ] {
        let (status, text) = ask(&url, "GET", path, lines);
        let refused = status == 401 && text.contains(words) && text.contains("\"schema_version\":1");
        assert!(refused || (words.is_empty() && status == 404), "{path}: {text}");
        assert!(words.is_empty() || text.to_lowercase().contains("www-authenticate: bearer"), "{text}");
    }
    // Pages without data need no token.
    for path in ["/", "/assets/nothing.js"] {
        assert_ne!(ask(&url, "GET", path, "").0, 401);
        assert_eq!(ask(&url, "POST", path, "").0, 401);
    }
    // A browser, which knows the host by a name of its own; and one that a page elsewhere sent here.
    let browser = "Host: nas.lan:9420\r\nUser-Agent: Mozilla/5.0\r\n";
    for site in ["same-origin", "cross-site"] {
        let lines = format!("{browser}Sec-Fetch-Site: {site}\r\n");
        let (status, text) = ask(&url, "GET", "/", &lines);
        assert!(status == 200 && text.contains("</html>"), "{text}");
        assert_eq!(ask(&url, "GET", "/v1/status", &lines).0, 401);
    }
    assert_eq!(ask(&url, "GET", "/v1/status", &format!("{browser}{right}")).0, 200);

    // Commands do the same over TCP as over the socket.
    let token = place.dir.path("token");
    over(&url, &token, &["register", &place.ssd, &place.hdd]).ok().says(&["served"]);
    over(&url, &token, &["set", "one", "writeback_percent=33"]).ok();
    over(&url, &token, &["detach", "one"]).ok().says(&["detach done"]);
    daemon.run(&["get", "one", "writeback_percent"]).ok().says(&["33"]);
    let mut command = Command::new(program());
    command.arg("status").env("UBCACHE_API", &url).env("UBCACHE_TOKEN_FILE", &token);
    Said::of(output(command)).ok().says(&["bcache0"]);
    run(&["status", "--api", &url]).refused(&["token required"]);
    let wrong = private(&place, "wrong", OTHER);
    over(&url, &wrong, &["status"]).refused(&["wrong token"]);
    over(&url, &place.dir.path("none"), &["status"]).refused(&["none", "cannot be read"]);
    over(&url.replace("http:", "https:"), &token, &["status"]).refused(&["does not answer with TLS"]);
    // The token is not sent without TLS.
    over("http://192.0.2.1:1", &token, &["status"]).usage().says(&["https://"]);
    run(&["status", "--api", "somewhere"]).usage().says(&["https://HOST"]);

    let said = daemon.said();
    assert!(said.contains("127.0.0.1: refused: wrong token"), "{said}");
    // Who it was is not known beyond the token; where it came from is.
    let audited = |l: &&str| {
        l.starts_with("ubcache: audit: 127.0.0.1:")
            && l.contains(" with the token: detach one on one, bcache0")
    };
    assert!(said.lines().any(|l| audited(&l)), "{said}");
    assert!(!said.contains(TOKEN) && !said.contains(OTHER), "{said}");
    daemon.stop();
}

#[test]
fn metrics_are_open_where_that_is_wanted() {
    let place = Place::new();
    place.configure(&(listening(&place) + "metrics_without_token = true\n"));
    let daemon = place.start();
    let url = url(&daemon, 0);
    let (status, text) = ask(&url, "GET", "/metrics", "");
    assert!(status == 200 && text.contains("# EOF") | text.contains("# TYPE"), "{text}");
    assert_eq!(ask(&url, "GET", "/v1/status", "").0, 401);
    // What they say is not for pages of others.
    let lines = "Host: evil.example\r\nUser-Agent: Mozilla/5.0\r\n";
    assert_eq!(ask(&url, "GET", "/metrics", lines).0, 403);
    assert_eq!(ask(&url, "GET", "/metrics", &format!("{lines}Authorization: Bearer x\r\n")).0, 403);
    daemon.stop();
}

#[test]
fn tls_with_a_certificate_of_ones_own_and_both_renewed() {
    let place = Place::new();
    let config = listening_tls(&place);
    place.configure(&config);
    let daemon = place.start();
    let (first, token, ca) = (url(&daemon, 0), place.dir.path("token"), place.dir.path("certificate"));
    assert!(first.starts_with("https://"), "{first}");
    over(&first, &token, &["register", &place.ssd, &place.hdd, "--ca", &ca]).ok().says(&["served"]);
    over(&first, &token, &["status", "--ca", &ca]).ok().says(&["bcache0"]);
    // By another name that the certificate has, and by one that it has not.
    let port = first.rsplit_once(':').unwrap().1;
    over(&format!("https://localhost:{port}"), &token, &["status", "--ca", &ca]).ok();
    over(&format!("https://127.0.0.2:{port}"), &token, &["status", "--ca", &ca]).refused(&["127.0.0.2"]);
    let wrong = private(&place, "wrong", OTHER);
    over(&first, &wrong, &["status", "--ca", &ca]).refused(&["wrong token"]);
    over(&first.replace("https", "http"), &token, &["status"]).refused(&["https://"]);
    over(&first, &token, &["status", "--ca", &token]).refused(&["expected certificates"]);
    let stranger = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let other_ca = private(&place, "other-ca", &stranger.cert.pem());
    over(&first, &token, &["status", "--ca", &other_ca]).refused(&["--ca"]);

    // Another certificate and another token hold from the reload on, for those who are connected, too.
    let mut events = Command::new(program());
    events.args(["events", "--api", &first, "--token-file", &token, "--ca", &ca]);
    let listener = std::thread::spawn(move || Said::of(output(events)));
    let renewed = listening_tls(&place);
    private(&place, "token", OTHER);
    place.configure(&renewed);
    daemon.run(&["reload"]).ok().says(&["the token has changed", "the certificate has changed"]);
    let second = url(&daemon, 1);
    over(&second, &token, &["status", "--ca", &ca]).ok().says(&["bcache0"]);
    let old = private(&place, "old", TOKEN);
    over(&second, &old, &["status", "--ca", &ca]).refused(&["wrong token"]);
    wait_until("the end of the old connection", || listener.is_finished());
    let _ = listener.join().unwrap();

    // A mistake changes nothing; and what is not wanted any more is closed.
    std::fs::set_permissions(&token, PermissionsExt::from_mode(0o644)).unwrap();
    daemon.run(&["reload"]).refused(&["line 3", "token_file", "can be read by every user"]);
    over(&second, &token, &["status", "--ca", &ca]).ok();
    place.configure("");
    daemon.run(&["reload"]).ok().says(&["no longer listens on TCP"]);
    wait_until("the closed port", || TcpStream::connect(second.split_once("://").unwrap().1).is_err());
    assert!(!daemon.said().contains(OTHER) && !daemon.said().contains("PRIVATE KEY"));
    daemon.stop();
}

#[test]
fn an_unsafe_configuration_of_tcp_is_refused_at_the_start() {
    let place = Place::new();
    let good = listening(&place);
    let refused = |config: &str, words: &[&str]| {
        place.configure(config);
        let said = place.refused();
        assert!(words.iter().all(|w| said.contains(w)) && !said.contains(TOKEN), "{config}: {said}");
    };
    refused("listen = [\"127.0.0.1:0\"]\n", &["line 2", "expected token_file"]);
    refused(&good.replace("127.0.0.1", "0.0.0.0"), &["line 2", "expected tls_certificate and tls_key"]);
    let tls = listening_tls(&place);
    std::fs::set_permissions(place.dir.path("key"), PermissionsExt::from_mode(0o644)).unwrap();
    refused(&tls, &["line 5", "tls_key", "can be read by every user (mode 0644)"]);
    private(&place, "key", "no key at all");
    refused(&tls, &["line 5", "tls_key", "expected a private key"]);
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    private(&place, "key", &other.signing_key.serialize_pem());
    refused(&tls, &["line 5", "tls_key", "does not fit tls_certificate"]);
    private(&place, "token", "short");
    refused(&good, &["line 3", "token_file", "16 to 512"]);
}

#[test]
fn clients_without_a_token_do_not_block_others() {
    let place = Place::new();
    place.configure(&listening(&place));
    let daemon = place.start();
    let (url, token) = (url(&daemon, 0), place.dir.path("token"));
    // Some say nothing, some half a request, some ask for more than they read; all of them more than there is room for.
    let mut crowd: Vec<TcpStream> = (0..300).map(|_| connect(&url)).collect();
    for (n, stream) in crowd.iter_mut().enumerate() {
        let _ = match n % 3 {
            0 => Ok(()),
            1 => stream.write_all(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX: "),
            _ => stream.write_all(&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(50)),
        };
    }
    over(&url, &token, &["status"]).ok();
    daemon.run(&["status"]).ok();
    // The first to come had to give way.
    let mut first = crowd.swap_remove(0);
    let mut rest = Vec::new();
    let ended = first.read_to_end(&mut rest);
    assert!(ended.is_err() || rest.is_empty(), "{}", String::from_utf8_lossy(&rest));
    drop(crowd);

    for n in 0..2000 {
        let mut stream = connect(&url);
        let bytes = malformed(n);
        // Every other one shows the token first.
        let known = String::from_utf8(bytes.clone()).ok().filter(|_| n % 2 == 0).and_then(|text| {
            let (line, rest) = text.split_once("\r\n")?;
            Some(format!("{line}\r\nAuthorization: Bearer {TOKEN}\r\n{rest}").into_bytes())
        });
        let _ = stream.write_all(&known.unwrap_or(bytes));
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let said = String::from_utf8_lossy(&answer);
        assert!(!said.starts_with("HTTP/1.1 5"), "{n}: {said}");
    }
    over(&url, &token, &["status"]).ok();
    assert!(!daemon.said().contains("panicked") && !daemon.said().contains(TOKEN), "{}", daemon.said());
    daemon.stop();
}
