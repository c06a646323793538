//! The simplest scenario: what is written can be read, and what was flushed survives stop and power loss.
#![allow(clippy::unwrap_used)]

use std::rc::Rc;

use engine::tunables::Overwrite;
use engine::{SetOptions, Volume};
use format::{CacheMode, Sector, Sectors};
use io::{Handle, WriteFlags};
use sim::disk::Retained;
use sim::hardware::{Hardware, Layout};
use sim::scenario::Scenario;
use sim::stamp::{Content, SECTOR, decode, fill_data};
use sim::world::{Order, World};

async fn write(rt: &Handle, v: &Rc<Volume>, sector: u64, sectors: u64, write: u32) {
    let mut b = rt.pool().take(sectors as usize * SECTOR);
    for (i, s) in b.as_mut().chunks_mut(SECTOR).enumerate() {
        fill_data(s, 0, sector + i as u64, write);
    }
    v.write(Sector(sector), Sectors(sectors), b, 0, WriteFlags::default()).await.unwrap();
}

async fn read(rt: &Handle, v: &Rc<Volume>, sector: u64, sectors: u64) -> Vec<Content> {
    let b = rt.pool().take(sectors as usize * SECTOR);
    let (b, r) = v.read(Sector(sector), Sectors(sectors), b, 0).await;
    r.unwrap();
    b.as_slice().chunks(SECTOR).map(decode).collect()
}

fn all(sector: u64, sectors: u64, write: u32) -> Vec<Content> {
    (sector..sector + sectors).map(|sector| Content::Data { volume: 0, sector, write }).collect()
}

#[test]
fn written_flushed_stopped_reopened_and_cut() {
    for mode in [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Writearound, CacheMode::None] {
        for retained in [Retained::Nothing, Retained::Everything, Retained::Some(4)] {
            let world = World::new(7);
            let hardware = Hardware::new(&world, Layout::small(mode));
            let mut m = hardware.boot(Order::Fifo);
            let (rt, parts) = (m.handle(), hardware.parts(&m));
            m.block_on(async move {
                let (set, v) = parts.open(SetOptions::default()).await.unwrap();
                assert_eq!(read(&rt, &v[0], 100, 16).await, all(100, 16, 0));
                write(&rt, &v[0], 100, 8, 1).await;
                assert_eq!(read(&rt, &v[0], 100, 16).await, [all(100, 8, 1), all(108, 8, 0)].concat());
                v[0].flush().await.unwrap();
                set.stop().await.unwrap();
            });
            let mut m = hardware.boot(Order::Random);
            let (rt, parts) = (m.handle(), hardware.parts(&m));
            m.block_on(async move {
                let (_set, v) = parts.open(SetOptions::default()).await.unwrap();
                assert_eq!(read(&rt, &v[0], 100, 16).await, [all(100, 8, 1), all(108, 8, 0)].concat());
                write(&rt, &v[0], 104, 8, 2).await;
                v[0].flush().await.unwrap();
                write(&rt, &v[0], 200, 8, 3).await;
            });
            hardware.power_loss(m, retained);
            let mut m = hardware.boot(Order::Lifo);
            let (rt, parts) = (m.handle(), hardware.parts(&m));
            m.block_on(async move {
                let (set, v) = parts.open(SetOptions::default()).await.unwrap();
                let expected = [all(100, 4, 1), all(104, 8, 2), all(112, 4, 0)].concat();
                assert_eq!(read(&rt, &v[0], 100, 16).await, expected);
                set.stop().await.unwrap();
            });
        }
    }
}

/// Keys that the start replays.
fn replayed_keys(set: &engine::CacheSet) -> u64 {
    let keys = |e: engine::SetEvent| if let engine::SetEvent::Replayed { keys, .. } = e { keys } else { 0 };
    set.take_events().into_iter().map(keys).sum()
}

/// `journal replayed` was logged after clean stops too, while the guide said that it means a crash.
#[test]
fn keys_are_replayed_after_a_crash_and_not_after_a_stop() {
    for stops in [true, false] {
        let world = World::new(8);
        let hardware = Hardware::new(&world, Layout::small(CacheMode::Writeback));
        let mut m = hardware.boot(Order::Fifo);
        let (rt, parts) = (m.handle(), hardware.parts(&m));
        m.block_on(async move {
            let (set, v) = parts.open(SetOptions::default()).await.unwrap();
            for sector in 0..5 {
                write(&rt, &v[0], 16 * sector, 8, 1).await;
            }
            v[0].flush().await.unwrap();
            if stops {
                set.stop().await.unwrap();
            }
        });
        hardware.power_loss(m, Retained::Nothing);
        let mut m = hardware.boot(Order::Fifo);
        let (rt, parts) = (m.handle(), hardware.parts(&m));
        m.block_on(async move {
            let (set, v) = parts.open(SetOptions::default()).await.unwrap();
            assert_eq!(replayed_keys(&set), if stops { 0 } else { 5 });
            assert_eq!(read(&rt, &v[0], 64, 8).await, all(64, 8, 1));
            set.stop().await.unwrap();
        });
    }
}

/// No key goes to the journal, so no entry flushes the data.
#[test]
fn a_release_makes_data_durable_that_was_overwritten_in_place() {
    let mut scenario = Scenario::new(1, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(|b| async move {
        let mut options = SetOptions::default();
        options.tunables.overwrite_in_place = Overwrite::Always;
        b.open_with(options).await;
        b.tune(0, "writeback_running", "0").await;
        let c = &b.clients[0];
        assert!(c.write(64, 8, true).await && c.write(64, 8, false).await);
        assert_eq!(b.set().counters().overwrites, 1);
        let volume = b.volume(0);
        c.set_volume(None);
        b.set().release(&volume).await.unwrap();
        c.oracle.borrow_mut().released();
    });
    scenario.power_loss(Retained::Nothing).judge().happy_end();
}
