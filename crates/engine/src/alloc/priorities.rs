//! The priority of every bucket, and how it ages.
//!
//! Owns the priorities, and of each bucket whether it ages now and how fast. They are columns of their own, because all
//! buckets age when the clients have requested as many sectors as there are buckets: the loop over these columns becomes
//! vector instructions. Must not know what a bucket holds.

use format::{BucketNr, PRIO_INITIAL, PRIO_METADATA};
use io::{NoMemory, try_table};

/// The bucket does not age: it is pinned.
const HELD: u8 = 1;
/// The bucket ages slowly: it has metadata of file systems.
const SLOW: u8 = 2;
/// A slow bucket ages once while the others age this many times.
const SLOW_AGING: u32 = 8;

/// See the module head.
pub(super) struct Priorities {
    prio: Vec<u16>,
    /// Bits: [`HELD`], [`SLOW`].
    aging: Vec<u8>,
    /// The number of agings so far.
    agings: u32,
}

impl Priorities {
    /// Bytes of memory for each bucket.
    pub(super) const BYTES_EACH: u64 = (size_of::<u16>() + size_of::<u8>()) as u64;

    /// The priorities of `nbuckets` buckets: 0.
    pub(super) fn new(nbuckets: u32) -> Result<Priorities, NoMemory> {
        let nbuckets = nbuckets as usize;
        Ok(Priorities { prio: try_table(nbuckets, || 0)?, aging: try_table(nbuckets, || 0)?, agings: 0 })
    }

    pub(super) fn get(&self, b: BucketNr) -> u16 {
        self.prio[b.0 as usize]
    }

    #[inline]
    pub(super) fn set(&mut self, b: BucketNr, prio: u16) {
        self.prio[b.0 as usize] = prio;
    }

    /// All priorities, in the order of the buckets.
    pub(super) fn all(&self) -> impl Iterator<Item = u16> + '_ {
        self.prio.iter().copied()
    }

    /// Prevents that a bucket ages, or lets it age again.
    pub(super) fn hold(&mut self, b: BucketNr, held: bool) {
        self.mark(b, HELD, held);
    }

    /// Makes a bucket age slowly, or like the others.
    pub(super) fn age_slowly(&mut self, b: BucketNr, slowly: bool) {
        self.mark(b, SLOW, slowly);
    }

    fn mark(&mut self, b: BucketNr, bit: u8, set: bool) {
        let aging = &mut self.aging[b.0 as usize];
        *aging = if set { *aging | bit } else { *aging & !bit };
    }

    /// Lowers the priorities by one (the kernel's rescaling, semantics section 7.5), those of slow buckets once in
    /// [`SLOW_AGING`] times. Buckets that are held, and those without a priority or with that of metadata, keep theirs.
    /// Returns the smallest priority of the others.
    pub(super) fn age(&mut self) -> u16 {
        self.agings = self.agings.wrapping_add(1);
        let kept = if self.agings.is_multiple_of(SLOW_AGING) { HELD } else { HELD | SLOW };
        let mut min = PRIO_INITIAL;
        // Without branches and checks of overflow, so that the loop is vectorised.
        for (prio, aging) in self.prio.iter_mut().zip(&self.aging) {
            let takes_part = (*prio != 0) & (*prio != PRIO_METADATA) & (aging & HELD == 0);
            *prio = prio.saturating_sub(u16::from(takes_part & (aging & kept == 0)));
            min = min.min(if takes_part { *prio } else { PRIO_INITIAL });
        }
        min
    }
}
