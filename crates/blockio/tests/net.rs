//! Sockets on both backends.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use blockio::{Address, Connection, Driver, Listener, Message};
use common::drivers;
use io::Buffer;
use io::sync::{Either, select};

fn pair(driver: &Driver) -> (Connection, Connection) {
    let (a, b) = UnixStream::pair().unwrap();
    let wrap = |s: UnixStream| Connection::from_fd(driver.reactor(), OwnedFd::from(s)).unwrap();
    (wrap(a), wrap(b))
}

fn bytes(driver: &Driver, len: usize, seed: u8) -> Buffer {
    let mut b = driver.handle().pool().take(len);
    for (i, x) in b.as_mut().iter_mut().enumerate() {
        *x = (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed;
    }
    b
}

#[test]
fn a_client_connects_and_both_sides_talk() {
    for driver in drivers() {
        let dir = common::dir();
        let addresses =
            [Address::Unix(dir.path().join("socket")), Address::Tcp("127.0.0.1:0".parse().unwrap())];
        for address in addresses {
            driver.block_on(async {
                let rt = driver.handle();
                let listener = Listener::bind(driver.reactor(), &address).unwrap();
                let there = listener.address().clone();
                let reactor = driver.reactor().clone();
                let pool = rt.pool().clone();
                let client = rt.spawn(async move {
                    let connection = Connection::connect(&reactor, &there).await.unwrap();
                    let (_, sent) = connection.send_all(pool.copy_of(b"hello")).await;
                    sent.unwrap();
                    let (buffer, got) = connection.recv_exact(pool.take(6), 0..6).await;
                    got.unwrap();
                    assert_eq!(buffer.as_slice(), b"world!");
                });
                let server = listener.accept().await.unwrap();
                let peer = server.peer();
                let expected = match address {
                    Address::Unix(_) => format!("process {} of user ", std::process::id()),
                    Address::Tcp(_) => "127.0.0.1:".to_string(),
                };
                assert!(peer.starts_with(&expected), "{peer}");
                let (buffer, got) = server.recv_exact(rt.pool().take(100), 10..15).await;
                got.unwrap();
                assert_eq!(&buffer.as_slice()[10..15], b"hello");
                let mut message = Message::new();
                message.push(rt.pool().copy_of(b"xworld"), 1..6);
                message.push(rt.pool().copy_of(b"!"), 0..1);
                server.send(message).await.1.unwrap();
                client.await;
                let (_, end) = server.recv_some(buffer, 0..100).await;
                assert_eq!(end.unwrap(), 0, "the client has gone");
            });
        }
    }
}

/// More than a socket buffers, in more pieces than go to the kernel at once.
#[test]
fn a_long_message_of_many_pieces_arrives_whole() {
    for driver in drivers() {
        let (a, b) = pair(&driver);
        let rt = driver.handle();
        let sender = rt.spawn({
            let whole = bytes(&driver, 3_000_000, 5);
            async move {
                let mut message = Message::new();
                for at in (0..whole.len()).step_by(9973) {
                    message.push(whole.clone(), at..(at + 9973).min(whole.len()));
                }
                assert_eq!(message.len(), whole.len());
                assert!(message.pieces_len() > 200);
                let (mut message, sent) = a.send(message).await;
                message.clear();
                assert!(message.is_empty());
                sent.unwrap();
            }
        });
        let got = driver.block_on(async {
            let (buffer, got) = b.recv_exact(rt.pool().take(3_000_000), 0..3_000_000).await;
            got.unwrap();
            sender.await;
            buffer
        });
        assert_eq!(got.as_slice(), bytes(&driver, 3_000_000, 5).as_slice());
    }
}

#[test]
fn a_dropped_receive_lets_go_of_the_socket_and_the_next_one_works() {
    for driver in drivers() {
        let (a, b) = pair(&driver);
        let rt = driver.handle();
        driver.block_on(async {
            for _ in 0..100 {
                let recv = std::pin::pin!(a.recv_some(rt.pool().take(64), 0..64));
                let ready = std::pin::pin!(rt.yield_now());
                // Nothing was sent, so the receive is dropped while it waits.
                assert!(matches!(select(recv, ready).await, Either::Right(())));
            }
        });
        driver.block_on(async {
            b.send_all(rt.pool().copy_of(b"after")).await.1.unwrap();
            let (buffer, got) = a.recv_exact(rt.pool().take(5), 0..5).await;
            got.unwrap();
            assert_eq!(buffer.as_slice(), b"after");
        });
    }
}

#[test]
fn a_waiting_accept_does_not_keep_the_driver_from_ending() {
    for driver in drivers() {
        let dir = common::dir();
        let path = dir.path().join("socket");
        let listener = Listener::bind(driver.reactor(), &Address::Unix(path.clone())).unwrap();
        let (a, b) = pair(&driver);
        let rt = driver.handle();
        let pool = rt.pool().clone();
        rt.spawn(async move { listener.accept().await.map(drop) });
        rt.spawn(async move { a.recv_exact(pool.take(4096), 0..4096).await.1 });
        driver.block_on(rt.yield_now());
        // Part of what the receive wants: it must not start over when it is cancelled.
        driver.block_on(b.send_all(rt.pool().copy_of(b"part"))).1.unwrap();
        drop(driver);
        assert!(!path.exists(), "the listener went with its task and removed its path");
    }
}

#[test]
fn operations_after_the_driver_fail() {
    for driver in drivers() {
        let (a, _b) = pair(&driver);
        let pool = driver.handle().pool().clone();
        let other = drivers().remove(0);
        let waiting = {
            let mut recv = Box::pin(async move { a.recv_some(pool.take(16), 0..16).await.1 });
            other.block_on(async {
                let ready = std::pin::pin!(std::future::ready(()));
                assert!(matches!(select(&mut recv, ready).await, Either::Right(())));
            });
            recv
        };
        drop(driver);
        let error = other.block_on(waiting).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(125), "ECANCELED");
    }
}

#[test]
fn a_path_in_use_is_refused_and_a_dead_one_taken_over() {
    let driver = drivers().remove(0);
    let dir = common::dir();
    let path = dir.path().join("socket");
    let address = Address::Unix(path.clone());
    // A listener that died without removing its path.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let first = Listener::bind(driver.reactor(), &address).unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let second = Listener::bind(driver.reactor(), &address).err().unwrap();
    assert_eq!(second.kind(), ErrorKind::AddrInUse);
    drop(first);
    assert!(!path.exists());
    std::fs::write(&path, "a file").unwrap();
    let third = Listener::bind(driver.reactor(), &address).err().unwrap();
    assert_eq!(third.kind(), ErrorKind::AddrInUse);
    assert_eq!(std::fs::read(&path).unwrap(), b"a file", "a file is not removed");
}

#[test]
fn the_end_of_a_stream_is_told() {
    for driver in drivers() {
        let (a, b) = pair(&driver);
        let rt = driver.handle();
        driver.block_on(async {
            b.send_all(rt.pool().copy_of(b"abc")).await.1.unwrap();
            b.shutdown(Shutdown::Write).unwrap();
            let (_, got) = a.recv_exact(rt.pool().take(8), 0..8).await;
            let error = got.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
            assert!(error.to_string().contains("3 of 8 bytes"), "{error}");
            drop(a);
            let mut big = Message::new();
            big.push(bytes(&driver, 1 << 20, 0), 0..1 << 20);
            assert!(b.send(big).await.1.is_err(), "nobody is there to receive");
        });
    }
}
