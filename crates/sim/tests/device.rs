//! Simulated disks keep the contract of devices, and lose what the fault model says.

use std::rc::Rc;

use format::{Sector, Sectors};
use io::{Disk, Nanos, Rng};
use sim::disk::{Fault, Kind, Matching, Retained, SimDisk, Speed};
use sim::world::{Machine, Order, World};

fn new_disk(world: &World, logical: u32) -> Rc<SimDisk> {
    SimDisk::new(world, 0, SimDisk::describe("disk", 1024, logical))
}

#[test]
fn the_simulated_disk_conforms() {
    for (seed, logical) in [(1, 512), (2, 4096), (3, 512)] {
        let world = World::new(seed);
        let mut machine = Machine::boot(&world, Order::Random);
        let rt = machine.handle();
        machine.block_on(async move {
            blockio::conformance::check(|sectors| {
                let disk = SimDisk::new(&world, 0, SimDisk::describe("disk", sectors.0, logical));
                let slow = Nanos::from_ms(20);
                disk.set_speed(Speed {
                    base: Nanos(1000),
                    spread: Nanos(500_000),
                    slow_one_in: 9,
                    slow,
                    nodes: Nanos(0),
                });
                Disk::new(disk, rt.clone())
            })
            .await;
        });
    }
}

/// After a power loss at a random moment every block holds a version that it had since its last flush, or the one
/// that was flushed.
#[test]
fn a_block_has_a_version_since_its_last_flush_after_a_power_loss() {
    let (mut oldest, mut newest, mut between) = (0, 0, 0);
    for seed in 0..200 {
        let world = World::new(seed);
        let disk = new_disk(&world, 512);
        disk.set_speed(Speed { base: Nanos(1000), spread: Nanos(100_000), ..Speed::even(0) });
        let mut machine = Machine::boot(&world, Order::Fifo);
        let d = Disk::new(disk.clone(), machine.handle());
        let rt = machine.handle();
        machine.block_on(async move {
            let write = |version: u8, fua: bool| {
                let (d, mut b) = (d.clone(), rt.pool().take(8 * 512));
                b.as_mut().fill(version);
                async move { d.write(Sector(8), b, fua).await }
            };
            write(1, false).await.unwrap();
            write(2, false).await.unwrap();
            d.flush().await.unwrap();
            write(3, false).await.unwrap();
            write(4, true).await.unwrap();
            write(5, false).await.unwrap();
            write(6, false).await.unwrap();
        });
        drop(machine);
        disk.power_loss(Retained::Some(3));
        let bytes = disk.image().read_vec(Sector(8), Sectors(8));
        for block in bytes.chunks(512) {
            assert!(block.iter().all(|b| *b == block[0]) && (4..=6).contains(&block[0]), "{}", block[0]);
            oldest += u32::from(block[0] == 4);
            between += u32::from(block[0] == 5);
            newest += u32::from(block[0] == 6);
        }
    }
    assert!(oldest > 100 && newest > 100 && between > 100, "{oldest} {between} {newest}");
}

/// A flush does not cover a write that had not ended when it was submitted.
#[test]
fn a_flush_covers_what_ended_before_it() {
    let world = World::new(1);
    let disk = new_disk(&world, 512);
    let mut machine = Machine::boot(&world, Order::Fifo);
    let (d, rt, theirs) = (Disk::new(disk.clone(), machine.handle()), machine.handle(), disk.clone());
    machine.block_on(async move {
        let mut b = rt.pool().zeroed(512);
        b.as_mut().fill(1);
        theirs.hold(Matching::all(Kind::Write));
        let late = d.start_write(Sector(0), Sectors(1), b, 0, false);
        assert_eq!(theirs.held(), 1);
        let flush = d.start_flush();
        theirs.release();
        late.await.result.unwrap();
        flush.await.result.unwrap();
    });
    assert_eq!(disk.image().read_vec(Sector(0), Sectors(1)), [1; 512]);
    let medium = disk.medium();
    assert_eq!(
        medium.after_power_loss(Retained::Nothing, &mut Rng::new(1)).read_vec(Sector(0), Sectors(1)),
        [0; 512]
    );
}

/// A rule of the simulator took a footer for newer than its data: the write of the newer footer was lost, the older one was there again.
#[test]
fn a_power_loss_takes_back_the_order_of_lost_writes() {
    let world = World::new(1);
    let disk = new_disk(&world, 512);
    let run = |writes: Vec<(u64, u8)>| {
        let mut machine = Machine::boot(&world, Order::Fifo);
        let (d, rt) = (Disk::new(disk.clone(), machine.handle()), machine.handle());
        machine.block_on(async move {
            for (at, byte) in writes {
                let mut b = rt.pool().zeroed(512);
                b.as_mut().fill(byte);
                // The last one stays in the volatile cache.
                d.write(Sector(at), b, byte != 9).await.unwrap();
            }
        });
    };
    let is_after = |one: u64, other: u64| disk.medium().is_written_after(Sector(one), Sector(other));
    run(vec![(1, 1), (0, 1), (1, 9)]);
    assert!(is_after(1, 0) && !is_after(0, 1) && !is_after(1, 5) && !is_after(5, 1));
    disk.power_loss(Retained::Nothing);
    assert!(!is_after(1, 0) && !is_after(0, 1), "sector 1 has the contents from before sector 0 again");
    run(vec![(1, 2)]);
    assert!(is_after(1, 0));
    disk.power_loss(Retained::Nothing);
    assert!(is_after(1, 0), "nothing was lost");
}

#[test]
fn faults_hit_what_they_name() {
    let world = World::new(1);
    let disk = new_disk(&world, 512);
    let fault = Fault { matching: Matching { kind: Kind::Write, range: 8..16 }, skip: 1, count: 1 };
    disk.set_faults(vec![fault]);
    let mut machine = Machine::boot(&world, Order::Fifo);
    let (d, rt) = (Disk::new(disk.clone(), machine.handle()), machine.handle());
    machine.block_on(async move {
        let write = |at: u64| d.write(Sector(at), rt.pool().zeroed(512), false);
        assert!(write(0).await.is_ok());
        assert!(write(8).await.is_ok(), "skipped");
        assert!(write(16).await.is_ok());
        assert!(write(9).await.is_err());
        assert!(write(9).await.is_ok(), "only one");
        assert!(d.flush().await.is_ok());
    });
    assert_eq!(disk.counters().failed, 1);
    assert!(!disk.was_misused());
}
