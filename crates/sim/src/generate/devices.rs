//! The hardware of a plan.
//!
//! Owns the drawing of the devices and their speeds. Must not know the requests.

use format::{CacheMode, Replacement};
use io::{Nanos, Rng};

use super::{Life, one_of};
use crate::disk::Speed;
use crate::hardware::{BackingLayout, Layout};

const MODES: [CacheMode; 4] =
    [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Writearound, CacheMode::None];

pub(super) fn speed(rng: &mut Rng) -> Speed {
    let base = one_of(rng, &[1, 20, 100, 4000]) * 1000;
    let spread = one_of(rng, &[0, 20, 500, 20_000]) * 1000;
    let slow_one_in = one_of(rng, &[0, 0, 7, 100]);
    Speed {
        base: Nanos(base),
        spread: Nanos(spread),
        slow_one_in,
        // With the longest time, the device is nearly stuck.
        slow: Nanos::from_ms(one_of(rng, &[10, 300, 3000, 90_000])),
        nodes: Nanos(0),
    }
}

pub(super) fn mode(rng: &mut Rng) -> CacheMode {
    // Writeback is the most frequent mode, because it can lose most.
    if rng.chance(1, 2) { CacheMode::Writeback } else { one_of(rng, &MODES) }
}

fn backing(rng: &mut Rng, life: Life, block_sectors: u64) -> BackingLayout {
    let logical_block_bytes = if block_sectors == 8 { one_of(rng, &[512, 4096]) } else { 512 };
    let least = block_sectors.max(u64::from(logical_block_bytes) / 512);
    let data_offset = match rng.below(4) {
        0 if logical_block_bytes == 512 => 16 + rng.below(20),
        1 => 64,
        _ => 16,
    };
    let stripe_bytes = if rng.chance(1, 6) { one_of(rng, &[65536, 48 * 1024]) } else { 0 };
    let sizes: &[u64] = match life {
        Life::Brief => &[64, 128, 256, 512],
        Life::Pressure | Life::Churn => &[1024, 2048, 4096],
        _ => &[512, 2048, 4096, 8192],
    };
    BackingLayout {
        data_sectors: one_of(rng, sizes) + rng.below(5) * least,
        data_offset,
        block_sectors: least,
        logical_block_bytes,
        mode: if matches!(life, Life::Pressure | Life::Churn) { CacheMode::Writeback } else { mode(rng) },
        stripe_bytes,
        discard: rng.chance(3, 4),
    }
}

pub(super) fn layout(rng: &mut Rng, life: Life) -> Layout {
    let big_one_in = match life {
        Life::Brief | Life::Common => 4,
        _ => 20,
    };
    let big = rng.chance(1, big_one_in);
    let bucket_sectors = if big { 128 } else { one_of(rng, &[8, 8, 16, 32]) };
    let logical_block_bytes = one_of(rng, &[512, 512, 4096]);
    let block_sectors = if logical_block_bytes == 4096 { 8 } else { one_of(rng, &[1, 1, 2, 8]) };
    let more = match life {
        _ if big => rng.below(64),
        // With small buckets the list of the journal's buckets is longer than the first sector of the superblock.
        Life::Brief if rng.chance(1, 6) => 200 + rng.below(60),
        Life::Brief => rng.below(60),
        Life::Pressure => rng.below(20),
        _ => rng.below(3) * 64 + rng.below(400),
    };
    let devices = 1 + u64::from(rng.chance(1, 3));
    let mut it = Layout {
        bucket_sectors,
        block_sectors,
        nbuckets: 128 + more,
        logical_block_bytes,
        replacement: one_of(rng, &[Replacement::Lru, Replacement::Fifo, Replacement::Random]),
        discard: rng.chance(1, 5),
        checksums: false,
        backings: (0..devices).map(|_| backing(rng, life, block_sectors)).collect(),
    };
    if life == Life::Churn {
        (it.bucket_sectors, it.nbuckets) = (8, 128);
    }
    if life == Life::Forest {
        (it.bucket_sectors, it.block_sectors, it.nbuckets) = (8, 1, 2000);
        it.logical_block_bytes = 512;
        it.backings.truncate(1);
        let b = &mut it.backings[0];
        (b.block_sectors, b.logical_block_bytes, b.data_sectors) = (1, 512, 30_000);
    }
    it
}

/// Size of the flash-only volume in sectors; 0 for none.
pub(super) fn flash(rng: &mut Rng, life: Life, layout: &Layout) -> u64 {
    let parts = match life {
        Life::Brief => one_of(rng, &[1, 2]),
        Life::Pressure | Life::Churn => one_of(rng, &[8, 10, 12]),
        _ => one_of(rng, &[1, 2, 5]),
    };
    let size = layout.nbuckets * layout.bucket_sectors * parts / 80 * 8;
    if rng.chance(1, 3) { size } else { 0 }
}
