//! The requests of a load.

use std::fmt;
use std::ops::Range;

/// One request. Sectors are of the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// Write this version.
    Write {
        /// First sector.
        start: u64,
        /// How many.
        sectors: u32,
        /// What each of them is to say.
        version: u32,
    },
    /// Read and compare.
    Read {
        /// First sector.
        start: u64,
        /// How many.
        sectors: u32,
    },
    /// Make durable what this worker wrote before.
    Flush,
}

/// A load: workers side by side, each with requests one after the other in its own part of the volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// What everything follows from.
    pub seed: u64,
    /// Which volume it is, for [`super::stamp`].
    pub tag: u32,
    /// Size of the volume in sectors.
    pub sectors: u64,
    /// Requests begin and end at multiples of this.
    pub block_sectors: u32,
    /// Workers.
    pub workers: u32,
    /// Requests of each.
    pub ops: u32,
    /// The largest request.
    pub max_sectors: u32,
    /// How many of 100 requests read.
    pub reads_percent: u32,
    /// How many of 1000 requests flush.
    pub flushes_permille: u32,
    /// Versions begin after this one; loads of one volume must not share any.
    pub after_version: u32,
}

impl Plan {
    /// Small random writes with some reads and flushes all over the volume.
    pub fn random(seed: u64, tag: u32, sectors: u64) -> Plan {
        Plan {
            seed,
            tag,
            sectors,
            block_sectors: 1,
            workers: 4,
            ops: 400,
            max_sectors: 64,
            reads_percent: 20,
            flushes_permille: 20,
            after_version: 0,
        }
    }

    /// The versions of the load end here.
    pub fn last_version(&self) -> u32 {
        self.after_version + self.workers * self.ops
    }

    /// The part of the volume that a worker has.
    pub fn part(&self, worker: u32) -> Range<u64> {
        let edge = |w: u32| {
            if w == self.workers {
                return self.sectors;
            }
            // At multiples of 8, so that requests of workers never share a block of any size.
            self.sectors * u64::from(w) / u64::from(self.workers) / 8 * 8
        };
        edge(worker)..edge(worker + 1)
    }

    /// A worker's request.
    pub fn op(&self, worker: u32, index: u32) -> Op {
        let mut random =
            Random(self.seed ^ u64::from(worker) << 32 ^ u64::from(index) << 40 ^ u64::from(index));
        if random.below(1000) < u64::from(self.flushes_permille) {
            return Op::Flush;
        }
        let part = self.part(worker);
        let block = u64::from(self.block_sectors);
        let blocks = (part.end - part.start) / block;
        // Mostly small; now and then as large as it may be.
        let most = if random.below(8) == 0 { self.max_sectors } else { (self.max_sectors / 4).max(1) };
        let count = (1 + random.below((u64::from(most) / block).max(1))).min(blocks);
        let room = blocks - count + 1;
        // A third goes to a sixteenth of the part.
        let within = if random.below(3) == 0 { (room / 16).max(1) } else { room };
        let start = part.start + random.below(within) * block;
        let sectors = u32::try_from(count * block).unwrap_or(u32::MAX);
        if random.below(100) < u64::from(self.reads_percent) {
            return Op::Read { start, sectors };
        }
        Op::Write { start, sectors, version: self.after_version + 1 + index * self.workers + worker }
    }

    /// What [`fmt::Display`] writes.
    ///
    /// # Errors
    /// The error.
    pub fn parse<'a>(words: impl Iterator<Item = &'a str>) -> Result<Plan, String> {
        let mut plan = Plan { workers: 0, ..Plan::random(0, 0, 0) };
        for word in words {
            let (key, value) = word.split_once('=').ok_or(format!("{word}: expected KEY=VALUE"))?;
            let number: u64 = value.parse().map_err(|e| format!("{word}: {e}"))?;
            let small = || u32::try_from(number).map_err(|e| format!("{word}: {e}"));
            match key {
                "seed" => plan.seed = number,
                "tag" => plan.tag = small()?,
                "sectors" => plan.sectors = number,
                "block_sectors" => plan.block_sectors = small()?,
                "workers" => plan.workers = small()?,
                "ops" => plan.ops = small()?,
                "max_sectors" => plan.max_sectors = small()?,
                "reads_percent" => plan.reads_percent = small()?,
                "flushes_permille" => plan.flushes_permille = small()?,
                "after_version" => plan.after_version = small()?,
                _ => return Err(format!("{word}: unknown")),
            }
        }
        let part = plan.sectors / u64::from(plan.workers).max(1);
        if plan.workers == 0 || plan.block_sectors == 0 || part < 16 * u64::from(plan.block_sectors) {
            return Err(format!("{plan}: makes no sense"));
        }
        Ok(plan)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed={} tag={} sectors={} block_sectors={} workers={} ops={} max_sectors={} reads_percent={} \
             flushes_permille={} after_version={}",
            self.seed,
            self.tag,
            self.sectors,
            self.block_sectors,
            self.workers,
            self.ops,
            self.max_sectors,
            self.reads_percent,
            self.flushes_permille,
            self.after_version
        )
    }
}

/// SplitMix64.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// What follows from a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        // The bias is far below anything a test could notice.
        (z ^ z >> 31) % bound.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_stay_in_their_parts_and_have_versions_of_their_own() {
        for (workers, block_sectors) in [(1, 1), (3, 1), (4, 8)] {
            let plan = Plan { workers, block_sectors, ..Plan::random(5, 0, 4096) };
            let mut seen = std::collections::BTreeSet::new();
            for (w, i) in (0..workers).flat_map(|w| (0..plan.ops).map(move |i| (w, i))) {
                let (start, sectors) = match plan.op(w, i) {
                    Op::Write { start, sectors, version } => {
                        assert!(seen.insert(version) && version <= plan.last_version() && version > 0);
                        (start, sectors)
                    }
                    Op::Read { start, sectors } => (start, sectors),
                    Op::Flush => continue,
                };
                let part = plan.part(w);
                assert!(part.contains(&start) && start + u64::from(sectors) <= part.end && sectors > 0);
                assert_eq!((start % u64::from(block_sectors), sectors % block_sectors), (0, 0));
            }
            assert!(seen.len() > 200);
        }
    }

    #[test]
    fn plans_survive_being_text() {
        let plan = Plan { after_version: 77, ..Plan::random(5, 3, 99_999) };
        assert_eq!(Plan::parse(plan.to_string().split(' ')), Ok(plan));
    }
}
