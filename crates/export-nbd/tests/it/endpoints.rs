//! Binding endpoints: whose socket it is, and when it goes.

use std::os::unix::net::{UnixListener, UnixStream};

use blockio::{Address, Driver, DriverOptions};
use export_nbd::{Endpoint, EndpointError, Reach, uri};

use crate::tools::{Running, Spec, run, run_ok};

fn unix(path: &std::path::Path) -> Endpoint {
    path.to_str().expect("UTF-8").parse().expect("an endpoint")
}

#[test]
fn the_socket_of_a_dead_server_is_taken_over_and_that_of_a_live_one_is_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("nbd.sock");
    let driver = Driver::new(DriverOptions::default()).expect("a driver");

    // The path of a listener that is dropped stays behind.
    drop(UnixListener::bind(&path).expect("a socket"));
    assert!(path.exists());
    let ours = unix(&path).bind(driver.reactor(), Reach::Loopback).expect("taken over");
    assert_eq!(ours.address(), &Address::Unix(path.clone()));

    let refused = unix(&path).bind(driver.reactor(), Reach::Loopback).err().expect("somebody listens");
    assert!(matches!(refused, EndpointError::Bind { .. }));
    assert!(refused.to_string().contains("nbd.sock"), "{refused}");
    assert!(UnixStream::connect(&path).is_ok(), "the live one is untouched");
    drop(ours);
    assert!(!path.exists(), "our own goes with us");
}

#[test]
fn a_file_that_is_no_socket_is_not_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("precious");
    std::fs::write(&path, b"data").expect("a file");
    let driver = Driver::new(DriverOptions::default()).expect("a driver");
    assert!(unix(&path).bind(driver.reactor(), Reach::Loopback).is_err());
    assert_eq!(std::fs::read(&path).expect("a file"), b"data");
}

#[test]
fn a_chosen_port_is_told() {
    let driver = Driver::new(DriverOptions::default()).expect("a driver");
    let endpoint: Endpoint = "localhost:0".parse().expect("an endpoint");
    let listener = endpoint.bind(driver.reactor(), Reach::Loopback).expect("a port");
    let Address::Tcp(address) = listener.address() else { panic!("a TCP address") };
    assert!(address.port() > 0 && address.ip().is_loopback());
    assert_eq!(uri(listener.address(), "x", false), format!("nbd://{address}/x"));
}

#[test]
fn unknown_hosts_are_named() {
    let driver = Driver::new(DriverOptions::default()).expect("a driver");
    let endpoint: Endpoint = "no-such-host.invalid:10809".parse().expect("an endpoint");
    let error = endpoint.bind(driver.reactor(), Reach::Loopback).err().expect("no address").to_string();
    assert!(error.contains("no-such-host.invalid"), "{error}");
}

#[test]
fn a_stopped_server_leaves_no_socket_behind() {
    let server = Running::unix(vec![Spec::new("disk", 1 << 20)]);
    let (socket, uri) = (server.socket(), server.uri().to_string());
    run_ok("libnbd-bin", "nbdinfo", &["--size", &uri]);
    assert!(socket.exists());
    // A client that only connects does not keep the server from ending.
    let idle = UnixStream::connect(&socket).expect("a connection");
    drop(server);
    assert!(!socket.exists());
    drop(idle);
    assert!(!run("libnbd-bin", "nbdinfo", &["--size", &uri]).status.success());
}
