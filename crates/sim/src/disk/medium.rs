//! A medium with a volatile cache: what reads return, what is durable, and what may survive a power loss.
//!
//! Owns these three. Invariant: an older version never appears again after a newer one is durable. Must not know requests.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use format::{Sector, Sectors};
use io::Rng;

use super::Retained;
use super::damage::DamagedBlocks;
use crate::image::Image;
use crate::stamp::SECTOR;

/// Written data that is not known to be durable.
#[derive(Clone)]
pub(super) struct Unflushed {
    pub(super) op: u64,
    pub(super) sector: Sector,
    pub(super) data: Rc<[u8]>,
    /// The step at which its request ended; `None` while the request is in flight.
    pub(super) ended: Option<u64>,
}

impl Unflushed {
    fn overlaps(&self, r: &Range<u64>) -> bool {
        self.range().start < r.end && r.start < self.range().end
    }

    fn range(&self) -> Range<u64> {
        self.sector.0..self.sector.0 + (self.data.len() / SECTOR) as u64
    }
}

/// The medium with all of its data, durable or not. A power loss can be tried on a copy.
#[derive(Clone)]
pub struct Medium {
    pub(super) live: Image,
    pub(super) durable: Image,
    pub(super) unflushed: Vec<Unflushed>,
    pub(super) damaged: DamagedBlocks,
    pub(super) block_sectors: u64,
    order: WriteOrder,
}

/// Which sectors were written later than others.
#[derive(Clone, Default)]
struct WriteOrder {
    writes: u64,
    /// For each sector the number of the write that it has now. Copies of a medium share it.
    last: Rc<BTreeMap<u64, u64>>,
}

impl WriteOrder {
    fn wrote(&mut self, at: Sector, bytes: usize) {
        self.writes += 1;
        let end = at.0 + (bytes / SECTOR) as u64;
        Rc::make_mut(&mut self.last).extend((at.0..end).map(|sector| (sector, self.writes)));
    }

    /// The medium has the contents of an earlier write in these sectors again.
    fn lost(&mut self, sectors: impl Iterator<Item = u64>) {
        let last = Rc::make_mut(&mut self.last);
        for sector in sectors {
            last.remove(&sector);
        }
    }
}

impl Medium {
    pub(super) fn zeros(name: &str, sectors: Sectors, block_sectors: u64) -> Medium {
        let image = Image::zeros(name, sectors);
        let (live, damaged) = (image.clone(), DamagedBlocks::default());
        let order = WriteOrder::default();
        Medium { live, durable: image, unflushed: Vec::new(), damaged, block_sectors, order }
    }

    /// What a read of the device returns.
    pub(super) fn read(&self, at: Sector, into: &mut [u8]) {
        self.live.read(at, into);
        self.damaged.read(at, into);
    }

    /// The contents that reads return.
    pub fn live(&self) -> &Image {
        &self.live
    }

    /// Whether the contents of a sector were written after those of another one. False if a power loss has brought
    /// earlier contents of one of them back.
    pub fn is_written_after(&self, sector: Sector, other: Sector) -> bool {
        let last = |at: Sector| self.order.last.get(&at.0);
        last(sector).zip(last(other)).is_some_and(|(this, other)| this > other)
    }

    /// Loses the data that is not durable, except the retained part.
    ///
    /// Writes in flight are not lost; they take effect when they end.
    pub(super) fn lose(&mut self, retained: Retained, rng: &mut Rng) {
        let (ended, under_way) =
            std::mem::take(&mut self.unflushed).into_iter().partition(|u| u.ended.is_some());
        self.unflushed = ended;
        let image = self.after_power_loss(retained, rng);
        self.restart(image);
        for u in &under_way {
            self.live.write(u.sector, &u.data);
        }
        self.unflushed = under_way;
    }

    /// Replaces the contents of the medium; all of them are durable.
    pub(super) fn restart(&mut self, image: Image) {
        self.order.lost(self.live.differing_sectors(&image));
        self.live = image.clone();
        self.durable = image;
        self.unflushed.clear();
    }

    pub(super) fn apply(&mut self, op: u64, sector: Sector, data: Rc<[u8]>) {
        self.live.write(sector, &data);
        self.damaged.wrote(sector, data.len());
        self.order.wrote(sector, data.len());
        self.unflushed.push(Unflushed { op, sector, data, ended: None });
    }

    pub(super) fn ended(&mut self, op: u64, step: u64) {
        for u in self.unflushed.iter_mut().filter(|u| u.op == op) {
            u.ended = Some(step);
        }
    }

    /// Makes the versions that `covered` accepts durable, and all older versions.
    pub(super) fn make_durable(&mut self, covered: impl Fn(&Unflushed) -> bool) {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut durable = vec![false; self.unflushed.len()];
        for (i, u) in self.unflushed.iter().enumerate().rev() {
            // A version that is older than a durable one must not appear again.
            durable[i] = covered(u) || ranges.iter().any(|r| u.overlaps(r));
            if durable[i] {
                ranges.push(u.range());
            }
        }
        let mut i = 0;
        let image = &mut self.durable;
        self.unflushed.retain(|u| {
            if durable[i] {
                image.write(u.sector, &u.data);
            }
            i += 1;
            !durable[i - 1]
        });
    }

    /// The contents after a power loss now.
    pub fn after_power_loss(&self, retained: Retained, rng: &mut Rng) -> Image {
        let mut image = self.durable.clone();
        let block = self.block_sectors as usize * SECTOR;
        for u in &self.unflushed {
            for (i, bytes) in u.data.chunks(block).enumerate() {
                let kept = match retained {
                    Retained::Nothing => false,
                    Retained::Everything => true,
                    Retained::Some(of_eight) => rng.chance(of_eight, 8),
                };
                if kept {
                    image.write(u.sector + Sectors(i as u64 * self.block_sectors), bytes);
                }
            }
        }
        image
    }
}

/// A device at one moment: durable data, and data that may survive a power loss.
#[derive(Clone)]
pub struct Moment {
    pub(super) durable: Image,
    pub(super) writes: Vec<(Sector, Rc<[u8]>)>,
    pub(super) block_sectors: u64,
}

impl Moment {
    /// A fingerprint, which is equal for equal moments.
    pub fn fingerprint(&self) -> u64 {
        let mut sum = self.durable.fingerprint();
        let mut add = |word: u64| sum = (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31);
        for (at, data) in &self.writes {
            add(at.0 << 32 | data.len() as u64);
            for bytes in data.chunks_exact(8) {
                add(bytes.iter().fold(0, |word, b| word << 8 | u64::from(*b)));
            }
        }
        sum
    }

    /// The pieces that survive or do not: blocks, if there are at most `most` of them, else whole writes.
    fn pieces(&self, most: usize) -> Vec<(Sector, &[u8])> {
        let block_bytes = self.block_sectors as usize * SECTOR;
        let blocks: usize = self.writes.iter().map(|(_, data)| data.len().div_ceil(block_bytes)).sum();
        let unit = if blocks <= most { block_bytes } else { usize::MAX };
        let mut pieces = Vec::new();
        for (at, data) in &self.writes {
            let bytes = data.len().min(unit);
            let place = |i: usize| *at + Sectors((i * bytes / SECTOR) as u64);
            pieces.extend(data.chunks(bytes.max(1)).enumerate().map(|(i, data)| (place(i), data)));
        }
        pieces
    }

    /// The number of [`Moment::outcomes`].
    pub fn count(&self, most: usize) -> usize {
        let n = self.pieces(most).len();
        if n <= most { 1 << n } else { 2 + 2 * n }
    }

    /// The possible contents after a power loss.
    ///
    /// Every subset of the blocks that are not durable, if there are at most `most` of them. Else every subset of the
    /// writes, if there are at most `most` writes. Else no write, all writes, each write alone, and all but one.
    pub fn outcomes(&self, most: usize) -> Vec<Image> {
        let pieces = self.pieces(most);
        let outcome = |kept: &dyn Fn(usize) -> bool| {
            let mut image = self.durable.clone();
            for (_, (at, bytes)) in pieces.iter().enumerate().filter(|(i, _)| kept(*i)) {
                image.write(*at, bytes);
            }
            image
        };
        let n = pieces.len();
        if n <= most {
            return (0..1_u32 << n).map(|set| outcome(&|i| set >> i & 1 == 1)).collect();
        }
        let mut all = vec![outcome(&|_| false), outcome(&|_| true)];
        for one in 0..n {
            all.push(outcome(&|i| i == one));
            all.push(outcome(&|i| i != one));
        }
        all
    }
}
