//! Commands to devices through the ring. `/dev/null` takes any and answers zero (since Linux 6.2; before, the ring
//! refuses them with an error, which is an answer too).

use std::fs::File;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use blockio::{Backend, CommandFile, Driver, DriverOptions};

fn null(driver: &Driver) -> std::io::Result<CommandFile> {
    let file = File::options().read(true).write(true).open("/dev/null").expect("every system has it");
    // SAFETY: this driver does not look at commands at all.
    unsafe { CommandFile::new(driver.reactor(), file.into(), 8192) }
}

#[test]
fn a_command_is_answered_and_its_buffer_comes_back() {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let file = null(&driver).unwrap();
    let pool = driver.handle().pool().clone();
    driver.block_on(async {
        for _ in 0..3 {
            let mut buffer = pool.take(8192);
            buffer.as_mut().fill(7);
            let (result, buffer) = file.send(0x20, [1; 8], buffer).await;
            assert!(result == 0 || result == -libc::EOPNOTSUPP, "{result}");
            assert!(buffer.unwrap().as_slice().iter().all(|&b| b == 7));
        }
    });
}

#[test]
fn a_command_that_nobody_waits_for_gives_its_buffer_back_later() {
    let driver = Driver::new(DriverOptions::default()).unwrap();
    let file = null(&driver).unwrap();
    let pool = driver.handle().pool().clone();
    let buffer = pool.take(8192);
    let address = buffer.as_slice().as_ptr();
    let mut sent = Box::pin(file.send(0x20, [0; 8], buffer));
    assert!(matches!(sent.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
    drop(sent);
    driver.block_on(async {
        let (result, _) = file.send(0x20, [0; 8], pool.take(8192)).await;
        assert!(result <= 0);
    });
    // The newest of the pool's two buffers is one of these.
    let (a, b) = (pool.take(8192), pool.take(8192));
    assert!(a.as_slice().as_ptr() == address || b.as_slice().as_ptr() == address);
}

#[test]
fn without_a_ring_there_are_no_commands_and_after_its_end_neither() {
    let pool = Driver::new(DriverOptions { backend: Backend::Pool, ..DriverOptions::default() }).unwrap();
    assert!(null(&pool).is_err());

    let driver = Driver::new(DriverOptions::default()).unwrap();
    let file = null(&driver).unwrap();
    let buffer = driver.handle().pool().take(8192);
    drop(driver);
    let Poll::Ready((result, buffer)) =
        pin!(file.send(0x20, [0; 8], buffer)).poll(&mut Context::from_waker(Waker::noop()))
    else {
        panic!("answered at once")
    };
    assert_eq!((result, buffer.is_some()), (-libc::ECANCELED, true));
}
