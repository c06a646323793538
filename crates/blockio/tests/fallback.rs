//! Without io_uring: the driver says why once, and works.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::rc::Rc;

use blockio::{Backend, Driver, DriverOptions, FileDevice, OpenOptions};
use common::sparse_file;
use format::{Sector, Sectors};
use io::Disk;

/// Makes io_uring_setup(2) fail with `errno` for this thread, as the filter of a container does.
fn forbid_io_uring(errno: u32) {
    let stmt = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut program = [
        // The number of the system call is the first word of what the filter sees.
        stmt(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: libc::SYS_io_uring_setup as u32,
        },
        stmt(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno),
        stmt(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which lives during the calls; the filter is this thread's.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
    }
}

fn on_a_thread_without_io_uring(errno: i32, expected: &str) {
    let expected = expected.to_string();
    std::thread::spawn(move || {
        forbid_io_uring(errno as u32);
        let demanded = DriverOptions { backend: Backend::Uring, ..DriverOptions::default() };
        let refusal = Driver::new(demanded).err().unwrap().to_string();
        assert!(refusal.contains(&expected), "{refusal}");

        let driver = Driver::new(DriverOptions::default()).unwrap();
        assert!(!driver.reactor().is_uring());
        let note = driver.backend_note();
        assert!(note.contains("slower") && note.contains(&expected), "{note}");

        let dir = common::dir();
        let path = sparse_file(dir.path(), "disk", Sectors(64));
        let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
        let disk = Disk::new(Rc::new(device), driver.handle());
        driver.block_on(async {
            disk.write(Sector(8), disk.runtime().pool().copy_of(&[9; 4096]), true).await.unwrap();
            let (buffer, result) = disk.read(Sector(8), disk.runtime().pool().take(512)).await;
            result.unwrap();
            assert_eq!(buffer.as_slice(), &[9; 512]);
        });
    })
    .join()
    .unwrap();
}

/// An operation that never ends holds up no other operation.
#[test]
fn a_pool_that_is_stuck_serves_other_devices() {
    let options = DriverOptions { backend: Backend::Pool, max_threads: 2, ..DriverOptions::default() };
    let driver = Driver::new(options).unwrap();
    let dir = common::dir();
    let path = sparse_file(dir.path(), "disk", Sectors(64));
    let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
    let disk = Disk::new(Rc::new(device), driver.handle());
    let (release, stuck): (Vec<_>, Vec<_>) = (0..5).map(|_| std::sync::mpsc::channel::<()>()).unzip();
    let waits: Vec<_> = stuck
        .into_iter()
        .map(|end| {
            let reactor = driver.reactor().clone();
            driver.handle().spawn(async move { reactor.blocking(move || end.recv().is_err()).await })
        })
        .collect();
    driver.block_on(async {
        for i in 0..20 {
            disk.write(Sector(i), disk.runtime().pool().copy_of(&[9; 512]), false).await.unwrap();
            disk.flush().await.unwrap();
        }
        drop(release);
        for wait in waits {
            assert!(wait.await);
        }
    });
}

#[test]
fn a_container_that_forbids_io_uring() {
    on_a_thread_without_io_uring(libc::EPERM, "seccomp");
}

#[test]
fn a_kernel_without_io_uring() {
    on_a_thread_without_io_uring(libc::ENOSYS, "the kernel has none");
}

#[test]
fn too_little_locked_memory() {
    on_a_thread_without_io_uring(libc::ENOMEM, "LimitMEMLOCK");
}
