//! Devices that are attached, detached and fail; what is reported.

use format::Inode;
use sim::disk::{Fault, Kind, Matching};
use sim::hardware::{Layout, uuid_of};
use sim::scenario::Boot;

use crate::page::{Detail, page};

async fn open(b: &Boot) {
    b.open().await;
    for i in 0..b.backings.len() {
        b.tune(i, "sequential_cutoff", "0").await;
    }
}

fn fail(kind: Kind, skip: u32, count: u32) -> Vec<Fault> {
    vec![Fault { matching: Matching::all(kind), skip, count }]
}

#[test]
fn devices_come_and_go() {
    page("come_and_go", Detail::Requests, (Layout::pair(), 256), |b| async move {
        open(&b).await;
        for i in 0..3 {
            assert!(b.clients[i].write(16, 24, false).await && b.clients[i].read(0, 32).await.is_some());
        }
        b.set().detach(&b.volume(0)).await.unwrap();
        assert!(b.clients[0].write(20, 8, false).await && b.clients[0].read(16, 24).await.is_some());
        assert!(b.clients[0].flush().await && b.clients[0].discard(20, 4).await);
        let volume = b.set().register(b.parts.backings[0].clone()).await;
        b.world.log(|| {
            format!("registered again: {}", volume.as_ref().map_or_else(ToString::to_string, |v| v.name()))
        });
        let flash = b.set().create_volume(uuid_of(7), format::Sectors(100), "second").await.unwrap();
        b.world.log(|| format!("created {:?} {}", flash.inode(), flash.size()));
        let inode = flash.inode().unwrap_or(Inode(0));
        b.set().delete_volume(inode).await.unwrap();
        b.tune(1, "label", "a name").await;
        b.tune(1, "cache_mode", "writethrough").await;
        b.set().set("cache_replacement_policy", "fifo").await.unwrap();
        b.set().gc().await.unwrap();
        let wiped = b.set().wipe().await.unwrap();
        b.world.log(|| format!("{wiped:?}"));
        b.sleep_ms(1000).await;
    });
}

#[test]
fn requests_that_fail() {
    page("requests_fail", Detail::Requests, (Layout::pair(), 0), |b| async move {
        open(&b).await;
        b.tune(0, "writeback_running", "0").await;
        let c = &b.clients[0];
        c.set_tolerant(true);
        assert!(c.write(0, 8, false).await && c.read(64, 8).await.is_some());
        b.sleep_ms(10).await;
        // Clean data is read from the backing device instead, dirty data cannot be.
        b.cache.set_faults(fail(Kind::Read, 0, 2));
        c.read(64, 8).await;
        c.read(0, 8).await;
        b.backings[0].set_faults(fail(Kind::Read, 0, 1));
        c.read(200, 8).await;
        b.cache.set_faults(fail(Kind::Write, 0, 2));
        c.write(100, 8, false).await;
        c.read(300, 8).await;
        b.sleep_ms(10).await;
        b.tune(0, "cache_mode", "writethrough").await;
        b.backings[0].set_faults(fail(Kind::Write, 0, 1));
        c.write(400, 8, false).await;
        b.backings[0].set_faults(fail(Kind::Flush, 0, 1));
        c.flush().await;
        c.flush().await;
        c.read(400, 8).await;
        b.backings[0].set_faults(fail(Kind::Discard, 0, 1));
        c.discard(600, 8).await;
        b.sleep_ms(1000).await;
    });
}

/// So many errors that the devices are given up.
#[test]
fn devices_are_given_up() {
    page("given_up", Detail::Requests, (Layout::pair(), 0), |b| async move {
        open(&b).await;
        let (first, second) = (&b.clients[0], &b.clients[1]);
        first.set_tolerant(true);
        second.set_tolerant(true);
        b.tune(0, "io_error_limit", "4").await;
        b.backings[0].set_faults(fail(Kind::Read, 0, 6));
        for n in 0..6 {
            first.read(n * 8, 8).await;
        }
        second.read(0, 64).await;
        b.sleep_ms(10).await;
        b.set().set("io_error_limit", "3").await.unwrap();
        b.cache.set_faults(fail(Kind::Read, 0, 5));
        for n in 0..6 {
            second.read(n * 8, 8).await;
        }
        second.write(0, 8, true).await;
        second.flush().await;
        b.sleep_ms(1000).await;
    });
}
