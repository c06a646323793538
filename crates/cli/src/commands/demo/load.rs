//! The load generator of the demonstration: verified random requests of 4 KiB.
//!
//! Owns the working set: its blocks, and the last write of each. A block has at most one request in flight, so every read
//! has one right answer. Must not know what serves the requests.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use io::Rng;

use super::target::{DEPTH, DemoReply, Request, RequestTarget};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::out;

/// Size of a request in bytes.
pub(super) const BLOCK_BYTES: usize = 4096;
/// Percentage of reads.
const READS_PERCENT: u64 = 70;

/// Longest latency that the histogram distinguishes, in microseconds.
const MOST_US: u64 = 60_000_000;

struct Block {
    position: u64,
    /// Number of the last write; 0 for none.
    version: u32,
    busy: bool,
}

/// The blocks that the load uses.
pub(super) struct WorkingSet {
    blocks: Vec<Block>,
    rng: Rng,
}

impl WorkingSet {
    /// A working set of `count` blocks at random positions in `bytes` bytes.
    pub(super) fn spread(count: usize, bytes: u64) -> WorkingSet {
        // The seed is constant, so the positions are the same in every run.
        let mut rng = Rng::new(4);
        let mut taken = std::collections::BTreeSet::new();
        while taken.len() < count {
            taken.insert(rng.below(bytes / BLOCK_BYTES as u64));
        }
        let block = |n: u64| Block { position: n * BLOCK_BYTES as u64, version: 0, busy: false };
        WorkingSet { blocks: taken.into_iter().map(block).collect(), rng }
    }

    /// A working set of the first `count` blocks of a file that [`Load::fill`] fills.
    pub(super) fn file(count: usize) -> WorkingSet {
        let block = |n: usize| Block { position: (n * BLOCK_BYTES) as u64, version: 0, busy: false };
        WorkingSet { blocks: (0..count).map(block).collect(), rng: Rng::new(4) }
    }

    /// The numbers of all blocks in random order.
    fn shuffled(&mut self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.blocks.len()).collect();
        for i in (1..order.len()).rev() {
            let j = self.rng.below(i as u64 + 1) as usize;
            order.swap(i, j);
        }
        order
    }
}

/// The contents of a block after write number `version`: every sector has its position and the number of the write.
fn contents(position: u64, version: u32) -> Vec<u8> {
    let mut out = vec![0; BLOCK_BYTES];
    if version == 0 {
        return out;
    }
    for (i, word) in out.chunks_exact_mut(16).enumerate() {
        word[..8].copy_from_slice(&(position + i as u64 * 16).to_le_bytes());
        word[8..12].copy_from_slice(&version.to_le_bytes());
        word[12..].copy_from_slice(b"demo");
    }
    out
}

/// The results of a measurement.
pub(super) struct Figures {
    pub(super) requests: u64,
    pub(super) took: Duration,
    /// Latencies in microseconds.
    pub(super) latency: Histogram<u64>,
}

/// The load generator.
pub(super) struct Load {
    set: WorkingSet,
    verified_reads: u64,
    writes: u32,
}

impl Load {
    pub(super) fn new(set: WorkingSet) -> Load {
        Load { set, verified_reads: 0, writes: 0 }
    }

    pub(super) fn verified_reads(&self) -> u64 {
        self.verified_reads
    }

    /// Position and expected contents of every block.
    pub(super) fn expected(&self) -> impl Iterator<Item = (u64, Vec<u8>)> {
        self.set.blocks.iter().map(|b| (b.position, contents(b.position, b.version)))
    }

    /// The contents of a file whose blocks have all been written once, in order.
    pub(super) fn fill(&mut self) -> Vec<u8> {
        self.writes += 1;
        let version = self.writes;
        let blocks = self.set.blocks.iter_mut().flat_map(|b| {
            b.version = version;
            contents(b.position, version)
        });
        blocks.collect()
    }

    /// Sends requests to the blocks, in one random order after another, until the time has passed.
    pub(super) fn run_for(
        &mut self,
        target: RequestTarget,
        what: &'static str,
        time: Duration,
        interrupt: &mut Interrupt,
    ) -> Result<Figures, Failure> {
        self.run(target, what, time, false, interrupt)
    }

    /// Sends one request to each block, or fewer if the time passes before.
    pub(super) fn run_once(
        &mut self,
        target: RequestTarget,
        what: &'static str,
        time: Duration,
        interrupt: &mut Interrupt,
    ) -> Result<Figures, Failure> {
        self.run(target, what, time, true, interrupt)
    }

    /// The request for a block, its position and the version that it writes.
    ///
    /// `None` if a request of the round before is still in flight for the block.
    fn next_request(&mut self, next: usize) -> Option<(Request, u64, Option<u32>)> {
        let read = self.set.rng.below(100) < READS_PERCENT;
        let block = &mut self.set.blocks[next];
        if std::mem::replace(&mut block.busy, true) {
            return None;
        }
        let position = block.position;
        if read {
            return Some((Request::Read(BLOCK_BYTES), position, None));
        }
        self.writes += 1;
        Some((Request::Write(contents(position, self.writes)), position, Some(self.writes)))
    }

    /// Processes a reply: a read must return the data that was written last. Returns the time at which the request was sent.
    fn take(
        &mut self,
        what: &'static str,
        reply: DemoReply,
        under_way: &mut [Option<(Instant, Option<u32>)>],
    ) -> Result<Instant, Failure> {
        let Some((at, block)) = usize::try_from(reply.tag)
            .ok()
            .and_then(|n| Some((under_way.get_mut(n)?.take()?, self.set.blocks.get_mut(n)?)))
        else {
            return Err(Failure::Failed(format!(
                "{what}: expected a reply to a pending request, found one to no \
                                                request"
            )));
        };
        let (sent_at, version) = at;
        let sector = block.position / 512;
        let data = reply.data.map_err(|e| Failure::because(format_args!("{what}: sector {sector}"), e))?;
        match version {
            Some(version) => block.version = version,
            None if data == contents(block.position, block.version) => self.verified_reads += 1,
            None => {
                return Err(Failure::Failed(format!(
                    "{what}: sector {sector}: expected write {}, found something else",
                    block.version
                )));
            }
        }
        block.busy = false;
        Ok(sent_at)
    }

    fn run(
        &mut self,
        mut target: RequestTarget,
        what: &'static str,
        time: Duration,
        once: bool,
        interrupt: &mut Interrupt,
    ) -> Result<Figures, Failure> {
        let lost = |e: std::io::Error| Failure::because(what, e);
        let mut latency = Histogram::new_with_bounds(1, MOST_US, 3).map_err(Failure::of)?;
        let mut progress = out::Progress::new(what);
        let total = if once { self.set.blocks.len() as u64 } else { u64::MAX };
        let (start, mut sent, mut done) = (Instant::now(), 0u64, 0u64);
        let mut order: Vec<usize> = Vec::new();
        // The time and the written version of each request in flight, by its tag, which is the number of the block.
        let mut under_way: Vec<Option<(Instant, Option<u32>)>> = vec![None; self.set.blocks.len()];
        loop {
            while target.pending() < DEPTH && sent < total && start.elapsed() < time && !interrupt.came() {
                let Some(next) = order.pop() else {
                    order = self.set.shuffled();
                    continue;
                };
                let Some((request, position, version)) = self.next_request(next) else { continue };
                sent += 1;
                target.ask(request, position, next as u64).map_err(lost)?;
                under_way[next] = Some((Instant::now(), version));
            }
            if target.pending() == 0 {
                break;
            }
            let reply = target.receive().map_err(lost)?;
            let sent_at = self.take(what, reply, &mut under_way)?;
            done += 1;
            latency.saturating_record(u64::try_from(sent_at.elapsed().as_micros()).unwrap_or(u64::MAX));
            let seconds = start.elapsed().as_secs_f64();
            progress.line(|what| {
                let percent =
                    if once { done as f64 / total as f64 } else { (seconds / time.as_secs_f64()).min(1.0) }
                        * 100.0;
                format!("{what}: {percent:>3.0} %, {:.0} requests/s", done as f64 / seconds.max(1e-9))
            });
        }
        if interrupt.came() {
            return Err(Failure::Failed("interrupted".into()));
        }
        let took = start.elapsed();
        progress.clear();
        Ok(Figures { requests: done, took, latency })
    }
}
