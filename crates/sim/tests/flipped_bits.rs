//! A bit of metadata flips while the devices are off. The engine refuses the set, fails later, or goes back to something
//! that a sector once held: a damaged newest journal entry or last bset of a leaf looks like a torn one. It never returns
//! anything else as the contents of a sector.
#![allow(clippy::unwrap_used)]

use engine::SetOptions;
use format::{CacheMode, Sector, Sectors};
use io::Rng;
use sim::disk::Retained;
use sim::hardware::{Hardware, Layout};
use sim::image::Image;
use sim::scenario::Scenario;
use sim::stamp::{Content, SECTOR, decode};
use sim::world::{Order, World};

const SIZE: u64 = 256;

/// Bits tried in each sector of metadata.
const BITS: u64 = 6;

/// Clean and dirty data, an index with several sets, and a journal to be replayed.
fn life() -> (Image, Image) {
    let mut scenario = Scenario::new(5, Layout::sized(CacheMode::Writeback, 128, SIZE), 0);
    scenario.boot(|b| async move {
        b.open().await;
        b.stay_dirty(0).await;
        assert!(b.clients[0].read(128, 64).await.is_some());
        for round in 0..3 {
            for i in 0..20 {
                assert!(b.clients[0].write(i * 5 + round, 2, i % 4 == 0).await);
            }
            b.sleep_ms(if round < 2 { 60_000 } else { 0 }).await;
        }
        assert!(b.clients[0].flush().await);
    });
    scenario.power_loss(Retained::Everything);
    (scenario.hardware.cache.image(), scenario.hardware.backings[0].image())
}

/// What comes of a start with these images: how many sectors could be read; each holds what it once held.
fn serve(cache: &Image, backing: &Image) -> Result<u64, String> {
    let hardware = Hardware::new(&World::new(1), Layout::sized(CacheMode::Writeback, 128, SIZE));
    hardware.cache.load(cache.clone());
    hardware.backings[0].load(backing.clone());
    let mut machine = hardware.boot(Order::Fifo);
    let (rt, parts) = (machine.handle(), hardware.parts(&machine));
    machine.block_on(async move {
        let Ok((set, volumes)) = parts.open(SetOptions::default()).await else { return Ok(0) };
        let mut read = 0;
        for sector in 0..SIZE {
            let buffer = rt.pool().take(SECTOR);
            let (buffer, result) = volumes[0].read(Sector(sector), Sectors(1), buffer, 0).await;
            if result.is_err() {
                continue;
            }
            match decode(&buffer.as_slice()[..SECTOR]) {
                Content::Data { volume: 0, sector: s, .. } if s == sector => read += 1,
                other => return Err(format!("sector {sector} holds {other:?}")),
            }
        }
        set.abandon();
        Ok(read)
    })
}

#[test]
fn a_flipped_bit_of_metadata_never_becomes_data() {
    let (cache, backing) = life();
    assert_eq!(serve(&cache, &backing), Ok(SIZE));
    let rng = &mut Rng::new(1);
    let (mut sectors, mut refused) = (0, 0);
    for sector in 0..cache.size().0 {
        let bytes = cache.read_vec(Sector(sector), Sectors(1));
        // Data names itself, zeros are nothing.
        if !matches!(decode(&bytes), Content::Unknown { .. }) {
            continue;
        }
        sectors += 1;
        for _ in 0..BITS {
            let bit = rng.below(8 * SECTOR as u64) as usize;
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let mut image = cache.clone();
            image.write(Sector(sector), &flipped);
            match serve(&image, &backing) {
                Ok(0) => refused += 1,
                Ok(_) => {}
                Err(why) => panic!("bit {bit} of sector {sector} flipped: {why}"),
            }
        }
    }
    println!("{sectors} sectors of metadata, {refused} of {} flips refused", sectors * BITS);
    assert!(sectors > 30 && refused > sectors, "{sectors} sectors, {refused} refused");
}
