//! Every device of this crate against the one conformance suite, and what only some of them do.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::os::unix::fs::MetadataExt;
use std::rc::Rc;

use blockio::wrap::{CountingDisk, Counts, DelayDisk, Delays, HddModel, MemDisk, Queueing, SlowDisk};
use blockio::{Access, FileDevice, OpenError, OpenOptions, conformance};
use common::{LoopDevice, drivers, sparse_file, virtual_time};
use format::{Sector, Sectors};
use io::{Device, Disk, Handle, Nanos, Op};

#[test]
fn files_conform() {
    for driver in drivers() {
        for logical_block_bytes in [None, Some(4096)] {
            for buffered in [false, true] {
                let dir = common::dir();
                let mut n = 0;
                let options = OpenOptions { logical_block_bytes, buffered, ..OpenOptions::default() };
                driver.block_on(conformance::check(|sectors| {
                    n += 1;
                    let path = sparse_file(dir.path(), &format!("{n}"), sectors);
                    let device = FileDevice::open(driver.reactor(), &path, &options).unwrap();
                    Disk::new(Rc::new(device), driver.handle())
                }));
            }
        }
    }
}

/// What the temporary directory is made of: a tmpfs in many places, with or without direct I/O.
#[test]
fn files_in_the_temporary_directory_conform() {
    for driver in drivers() {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let mut n = 0;
        driver.block_on(conformance::check(|sectors| {
            n += 1;
            let path = sparse_file(dir.path(), &format!("{n}"), sectors);
            let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
            Disk::new(Rc::new(device), driver.handle())
        }));
    }
}

#[test]
fn block_devices_conform() {
    for driver in drivers() {
        for block_bytes in [512, 4096] {
            let dir = common::dir();
            let mut made = Vec::new();
            let Some(first) = LoopDevice::new(dir.path(), "probe", Sectors(16384), block_bytes) else {
                return;
            };
            drop(first);
            driver.block_on(conformance::check(|sectors| {
                let name = format!("{}", made.len());
                let device = LoopDevice::new(dir.path(), &name, sectors, block_bytes).unwrap();
                let path = device.path.clone();
                made.push(device);
                let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
                assert!(device.is_block_device());
                assert_eq!(device.info().logical_block_bytes, block_bytes);
                assert_eq!(device.note(), None, "loop devices take direct I/O");
                Disk::new(Rc::new(device), driver.handle())
            }));
        }
    }
}

/// The kernel makes a thread where a request on the ring has to wait, and that may take memory which depends on this very device
/// (decision 028). So nothing that is asked of a block device makes one: also not more requests than the device takes at a
/// time, nor larger ones.
#[test]
fn a_block_device_needs_no_threads_of_the_kernel() {
    const REQUESTS: u64 = 512;
    const SECTORS: u64 = 64;
    let Some(driver) = drivers().into_iter().find(|d| d.reactor().is_uring()) else {
        rig::skipped("io_uring is not available");
        return;
    };
    let dir = common::dir();
    let Some(made) = LoopDevice::new(dir.path(), "disk", Sectors(REQUESTS * SECTORS), 512) else { return };
    let queue = format!("/sys/block/{}/queue", made.path.file_name().unwrap().to_str().unwrap());
    std::fs::write(format!("{queue}/nr_requests"), "4").unwrap();
    let device = FileDevice::open(driver.reactor(), &made.path, &OpenOptions::default()).unwrap();
    let disk = Disk::new(Rc::new(device), driver.handle());
    let pool = driver.handle().pool().clone();
    let commands = driver.reactor().counts().commands;
    driver.block_on(async {
        let writes: Vec<_> = (0..REQUESTS)
            .rev()
            .map(|n| {
                disk.start_write(
                    Sector(n * SECTORS),
                    Sectors(8),
                    pool.copy_of(&[n as u8; 4096]),
                    0,
                    n % 2 == 0,
                )
            })
            .collect();
        let flush = disk.flush();
        for write in writes {
            assert_eq!(write.await.result, Ok(()));
        }
        assert_eq!(flush.await, Ok(()));
        let reads: Vec<_> = (0..REQUESTS)
            .map(|n| disk.start_read(Sector(n * SECTORS), Sectors(8), pool.take(4096), 0))
            .collect();
        for (n, read) in (0..).zip(reads) {
            let done = read.await;
            assert_eq!(done.result, Ok(()));
            assert!(done.buffer.unwrap().as_slice().iter().all(|b| *b == n as u8), "request {n}");
        }
        // Larger than the device takes as one.
        let all = pool.zeroed((REQUESTS * SECTORS * 512) as usize);
        disk.write(Sector(0), all, false).await.unwrap();
        disk.write_zeroes(Sector(0), Sectors(1024)).await.unwrap();
        disk.discard(Sector(0), Sectors(1024)).await.unwrap();
    });
    let commands = driver.reactor().counts().commands - commands;
    assert!(commands > 2 * REQUESTS + 4, "{commands} commands: the device had room for all requests");
    let own = format!("iou-wrk-{}", rustix::thread::gettid().as_raw_nonzero());
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        // Others come and go.
        let name = std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default();
        assert_ne!(name.trim(), own);
    }
}

fn mem(sectors: Sectors, block_bytes: u32) -> Rc<MemDisk> {
    Rc::new(MemDisk::new("mem", sectors, block_bytes))
}

#[test]
fn memory_and_wrappers_conform() {
    type Wrap = fn(Rc<MemDisk>, Handle) -> Rc<dyn Device>;
    let delays = |mem: Rc<MemDisk>, rt: Handle| -> Rc<dyn Device> {
        let delays = Delays { read: Nanos(5), write: Nanos::from_ms(1), flush: Nanos::from_ms(3) };
        Rc::new(DelayDisk::new(mem, rt, delays))
    };
    let wraps: [Wrap; 5] = [
        |mem, _| mem,
        |mem, _| Rc::new(CountingDisk::new(mem)),
        delays,
        |mem, rt| Rc::new(SlowDisk::new(mem, rt, HddModel::default())),
        |mem, rt| {
            Rc::new(SlowDisk::new(mem, rt, HddModel { queueing: Queueing::Fifo, ..HddModel::default() }))
        },
    ];
    for wrap in wraps {
        for block_bytes in [512, 4096] {
            virtual_time(async move |rt: Handle| {
                conformance::check(|sectors| {
                    Disk::new(wrap(mem(sectors, block_bytes), rt.clone()), rt.clone())
                })
                .await;
            });
        }
    }
}

#[test]
fn memory_is_given_back_by_discards() {
    virtual_time(async |rt: Handle| {
        let device = mem(Sectors(4096), 512);
        let disk = Disk::new(device.clone(), rt.clone());
        disk.write(Sector(0), rt.pool().zeroed(1 << 20), false).await.unwrap();
        assert_eq!(device.used_bytes(), 1 << 20);
        disk.discard(Sector(128), Sectors(1024)).await.unwrap();
        assert_eq!(device.used_bytes(), 1 << 19);
    });
}

#[test]
fn counts_say_what_was_asked() {
    virtual_time(async |rt: Handle| {
        let device = Rc::new(CountingDisk::new(mem(Sectors(4096), 512)));
        let disk = Disk::new(device.clone(), rt.clone());
        disk.write(Sector(0), rt.pool().zeroed(4096), false).await.unwrap();
        let before = device.counts();
        disk.write(Sector(8), rt.pool().zeroed(1024), true).await.unwrap();
        disk.read(Sector(0), rt.pool().take(512)).await.1.unwrap();
        disk.flush().await.unwrap();
        disk.discard(Sector(0), Sectors(8)).await.unwrap();
        disk.write_zeroes(Sector(0), Sectors(2)).await.unwrap();
        let expected = Counts {
            reads: 1,
            read_bytes: 512,
            writes: 1,
            durable_writes: 1,
            written_bytes: 1024,
            flushes: 1,
            discards: 1,
            discarded_bytes: 4096,
            zeroes: 1,
            zeroed_bytes: 1024,
        };
        assert_eq!(device.counts() - before, expected);
        assert_eq!(device.counts().operations(), 6);
    });
}

#[test]
fn delays_overlap() {
    virtual_time(async |rt: Handle| {
        let delays = Delays { read: Nanos::from_ms(5), write: Nanos::from_ms(2), flush: Nanos::from_ms(7) };
        let disk =
            Disk::new(Rc::new(DelayDisk::new(mem(Sectors(4096), 512), rt.clone(), delays)), rt.clone());
        let start = rt.now();
        let reads: Vec<_> =
            (0..50).map(|i| disk.start_read(Sector(i), Sectors(1), rt.pool().take(512), 0)).collect();
        for r in reads {
            r.await.result.unwrap();
        }
        assert_eq!(rt.now().since(start), Nanos::from_ms(5), "fifty reads at once");
        disk.write(Sector(0), rt.pool().zeroed(512), true).await.unwrap();
        disk.flush().await.unwrap();
        assert_eq!(rt.now().since(start), Nanos::from_ms(5 + 9 + 7));
    });
}

/// Virtual milliseconds for `n` random reads, all at once.
fn slow_reads(queueing: Queueing, n: u64) -> u64 {
    virtual_time(async move |rt: Handle| {
        let model = HddModel { queueing, ..HddModel::default() };
        let device = SlowDisk::new(mem(Sectors(1 << 21), 512), rt.clone(), model);
        assert!(device.info().rotational);
        let disk = Disk::new(Rc::new(device), rt.clone());
        let start = rt.now();
        let reads: Vec<_> = (0..n)
            .map(|i| {
                let sector = Sector(i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44 << 1);
                disk.start_read(sector, Sectors(1), rt.pool().take(512), 0)
            })
            .collect();
        for r in reads {
            r.await.result.unwrap();
        }
        rt.now().since(start).as_ms()
    })
}

#[test]
fn a_slow_disk_serves_one_after_the_other_and_the_nearest_first() {
    let fifo = slow_reads(Queueing::Fifo, 200);
    assert!((1000..1400).contains(&fifo), "200 random reads took {fifo} ms: about 6 each");
    let nearest = slow_reads(Queueing::ShortestSeek, 200);
    assert!(nearest * 10 < fifo * 8, "nearest first took {nearest} ms, first come first served {fifo} ms");
    assert_eq!(slow_reads(Queueing::ShortestSeek, 200), nearest, "the same run takes the same time");
}

#[test]
fn a_slow_disk_starves_nobody() {
    virtual_time(async |rt: Handle| {
        let device = SlowDisk::new(mem(Sectors(1 << 21), 512), rt.clone(), HddModel::default());
        let disk = Disk::new(Rc::new(device), rt.clone());
        let far = rt.spawn({
            let disk = disk.clone();
            async move {
                let read =
                    disk.start_read(Sector((1 << 21) - 8), Sectors(8), disk.runtime().pool().take(4096), 0);
                read.await.result.unwrap();
            }
        });
        // Near the head there is always something to do.
        let mut served = 0;
        while far.try_take().is_none() {
            let near: Vec<_> = (0..4)
                .map(|i| disk.start_read(Sector(i * 64), Sectors(8), rt.pool().take(4096), 0))
                .collect();
            for n in near {
                n.await.result.unwrap();
            }
            served += 4;
            assert!(served < 200, "the far request was passed over {served} times");
        }
    });
}

#[test]
fn holes_give_space_back() {
    for driver in drivers() {
        let dir = common::dir();
        let path = sparse_file(dir.path(), "disk", Sectors(8192));
        let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
        let disk = Disk::new(Rc::new(device), driver.handle());
        let blocks = || path.metadata().unwrap().blocks();
        driver.block_on(async {
            let mut data = disk.runtime().pool().take(4 << 20);
            data.as_mut().fill(1);
            disk.write(Sector(0), data, false).await.unwrap();
            disk.flush().await.unwrap();
            assert!(blocks() >= 8192);
            assert!(disk.info().discard && disk.info().sparse);
            disk.discard(Sector(2048), Sectors(4096)).await.unwrap();
            disk.flush().await.unwrap();
            let left = blocks();
            assert!((4096..4096 + 256).contains(&left), "{left} sectors in use after half was discarded");
        });
        assert_eq!(path.metadata().unwrap().len(), 4 << 20, "the size stays");
        let path = dir.path().join("full");
        std::fs::write(&path, vec![1; 4 << 20]).unwrap();
        let full = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
        assert!(!full.info().sparse, "a file without holes");
    }
}

#[test]
fn blocks_of_4096_bytes_are_kept_to() {
    let driver = drivers().remove(0);
    let dir = common::dir();
    // Half a block at the end is no part of the device.
    let path = sparse_file(dir.path(), "disk", Sectors(1024 + 4));
    let open = |logical_block_bytes| {
        let options = OpenOptions { logical_block_bytes, ..OpenOptions::default() };
        FileDevice::open(driver.reactor(), &path, &options)
    };
    let device = open(Some(4096)).unwrap();
    assert_eq!(device.info().sectors, Sectors(1024));
    let disk = Disk::new(Rc::new(device), driver.handle());
    let error = driver.block_on(disk.write(Sector(4), disk.runtime().pool().zeroed(512), false)).unwrap_err();
    assert_eq!(error.errno, 22, "EINVAL");
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("{}: write of 1 sectors at sector 4 failed", path.display())),
        "{text}"
    );
    drop(disk);
    assert_eq!(open(None).unwrap().info().sectors, Sectors(1028));
    let refused = open(Some(1024)).err().unwrap();
    assert!(matches!(refused, OpenError::BlockSize { wanted: 1024, .. }), "{refused}");
}

#[test]
fn a_read_only_device_is_not_written_to() {
    for driver in drivers() {
        let dir = common::dir();
        let path = sparse_file(dir.path(), "disk", Sectors(64));
        let options = OpenOptions { access: Access::ReadOnly, ..OpenOptions::default() };
        let device = FileDevice::open(driver.reactor(), &path, &options).unwrap();
        assert!(device.read_only() && !device.info().discard);
        let disk = Disk::new(Rc::new(device), driver.handle());
        driver.block_on(async {
            disk.read(Sector(0), disk.runtime().pool().take(512)).await.1.unwrap();
            disk.flush().await.unwrap();
            let zeros = disk.runtime().pool().zeroed(512);
            assert_eq!(disk.write(Sector(0), zeros, false).await.unwrap_err().errno, 30, "EROFS");
            assert_eq!(disk.write_zeroes(Sector(0), Sectors(1)).await.unwrap_err().errno, 30);
            assert_eq!(disk.discard(Sector(0), Sectors(1)).await.unwrap_err().errno, 30);
        });
    }
}

/// A file that another process truncates under the device: an error, not a short buffer and not a loop.
#[test]
fn a_read_behind_a_truncated_file_fails() {
    for driver in drivers() {
        let dir = common::dir();
        let path = sparse_file(dir.path(), "disk", Sectors(64));
        let device = FileDevice::open(driver.reactor(), &path, &OpenOptions::default()).unwrap();
        let disk = Disk::new(Rc::new(device), driver.handle());
        std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
        driver.block_on(async {
            let (buffer, result) = disk.read(Sector(0), disk.runtime().pool().take(16384)).await;
            assert_eq!(buffer.len(), 16384);
            let error = result.unwrap_err();
            assert_eq!((error.errno, error.op), (5, Op::Read), "EIO");
        });
    }
}
