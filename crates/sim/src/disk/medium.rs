//! A medium with a volatile cache: what reads see, what is durable, and what may survive a power cut.
//!
//! Owns the three of them. Invariant: an older version never comes back below one that is durable. Must not know
//! requests.

use std::ops::Range;
use std::rc::Rc;

use format::{Sector, Sectors};
use io::Rng;

use super::Retained;
use crate::image::Image;
use crate::stamp::SECTOR;

/// Something written that is not known to be durable.
#[derive(Clone)]
pub(super) struct Unflushed {
    pub(super) op: u64,
    pub(super) sector: Sector,
    pub(super) data: Rc<[u8]>,
    /// The step at which its request ended; none while it is under way.
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

/// The medium with everything on it, durable or not; a power cut can be tried out on a copy.
#[derive(Clone)]
pub struct Medium {
    pub(super) live: Image,
    pub(super) durable: Image,
    pub(super) unflushed: Vec<Unflushed>,
    pub(super) block_sectors: u64,
}

impl Medium {
    pub(super) fn zeros(name: &str, sectors: Sectors, block_sectors: u64) -> Medium {
        let image = Image::zeros(name, sectors);
        Medium { live: image.clone(), durable: image, unflushed: Vec::new(), block_sectors }
    }

    /// The contents for reads.
    pub fn live(&self) -> &Image {
        &self.live
    }

    /// Data that is not durable is lost, except the retained part. Writes under way are not lost: they end later, and count then.
    pub(super) fn lose(&mut self, retained: Retained, rng: &mut Rng) {
        let (ended, under_way) =
            std::mem::take(&mut self.unflushed).into_iter().partition(|u| u.ended.is_some());
        self.unflushed = ended;
        let image = self.after_power_cut(retained, rng);
        self.restart(image);
        for u in &under_way {
            self.live.write(u.sector, &u.data);
        }
        self.unflushed = under_way;
    }

    /// The device starts anew with these contents.
    pub(super) fn restart(&mut self, image: Image) {
        self.live = image.clone();
        self.durable = image;
        self.unflushed.clear();
    }

    pub(super) fn apply(&mut self, op: u64, sector: Sector, data: Rc<[u8]>) {
        self.live.write(sector, &data);
        self.unflushed.push(Unflushed { op, sector, data, ended: None });
    }

    pub(super) fn ended(&mut self, op: u64, step: u64) {
        for u in self.unflushed.iter_mut().filter(|u| u.op == op) {
            u.ended = Some(step);
        }
    }

    /// Versions that `covered` accepts are durable now, and all older ones.
    pub(super) fn make_durable(&mut self, covered: impl Fn(&Unflushed) -> bool) {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut durable = vec![false; self.unflushed.len()];
        for (i, u) in self.unflushed.iter().enumerate().rev() {
            // Older versions below a durable one must not come back.
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

    /// The contents after a power cut.
    pub fn after_power_cut(&self, retained: Retained, rng: &mut Rng) -> Image {
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

/// A device at one moment: durable data, and data that may survive a power cut.
#[derive(Clone)]
pub struct Moment {
    pub(super) durable: Image,
    pub(super) writes: Vec<(Sector, Rc<[u8]>)>,
    pub(super) block_sectors: u64,
}

impl Moment {
    /// Equal for equal moments.
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

    /// What survives or not, as one: block by block if there are at most `most` of them, else write by write.
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

    /// How many [`Moment::outcomes`] there are.
    pub fn count(&self, most: usize) -> usize {
        let n = self.pieces(most).len();
        if n <= most { 1 << n } else { 2 + 2 * n }
    }

    /// What may be left if the power fails: every subset of the blocks that are not durable, if there are at most
    /// `most` of them; else every subset of the writes, if there are at most so many; else none, all, each write
    /// alone, and all but one.
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
