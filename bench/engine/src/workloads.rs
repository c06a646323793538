//! Requests for the study of replacement (docs/replacement.md): synthetic workloads from fixed seeds, and a trace.
//!
//! Owns the generators and the offline optimum. Blocks are 4 KiB. Must not know the engine.

use std::collections::BinaryHeap;

use io::Rng;

/// A request: its first block, the number of blocks, and whether it is a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// First block.
    pub block: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Whether it is a write; else it is a read.
    pub write: bool,
}

impl Access {
    fn read(block: u64, blocks: u64) -> Access {
        Access { block, blocks, write: false }
    }
}

/// A number between 0 and 1.
fn fraction(rng: &mut Rng) -> f64 {
    rng.below(1 << 53) as f64 / (1_u64 << 53) as f64
}

/// A generator of numbers below `n`: the k-th most frequent one has a frequency in proportion to `k^-exponent`.
struct Zipf {
    sums: Vec<f64>,
    order: Vec<u64>,
}

impl Zipf {
    fn new(n: u64, exponent: f64, rng: &mut Rng) -> Zipf {
        let mut total = 0.0;
        let weights = (1..=n).map(|k| (k as f64).powf(-exponent));
        let mut sums: Vec<f64> = weights
            .map(|w| {
                total += w;
                total
            })
            .collect();
        sums.iter_mut().for_each(|s| *s /= total);
        let mut order: Vec<u64> = (0..n).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i as u64 + 1) as usize);
        }
        Zipf { sums, order }
    }

    fn next(&self, rng: &mut Rng) -> u64 {
        let u = fraction(rng);
        let rank = self.sums.partition_point(|s| *s < u).min(self.order.len() - 1);
        self.order[rank]
    }
}

/// Names of the synthetic workloads.
pub const NAMES: [&str; 14] = [
    "zipf 0.7",
    "zipf 0.9",
    "zipf 1.1",
    "zipf and scans",
    "loop 1.1",
    "loop 1.5",
    "loop 3",
    "zipf and loop",
    "shifting",
    "shifting fast",
    "recency",
    "database",
    "mixed sizes",
    "file server",
];

/// Generates `requests` requests of a workload for a cache of `cache` blocks.
///
/// # Panics
/// If there is no such workload.
pub fn synthetic(name: &str, cache: u64, requests: usize) -> Vec<Access> {
    let rng = &mut Rng::new(0x5eed);
    match name {
        "zipf 0.7" => zipf(cache, 0.7, requests, rng),
        "zipf 0.9" => zipf(cache, 0.9, requests, rng),
        "zipf 1.1" => zipf(cache, 1.1, requests, rng),
        "zipf and scans" => zipf_and_scans(cache, requests, rng),
        "loop 1.1" => in_a_loop(cache * 11 / 10, requests),
        "loop 1.5" => in_a_loop(cache * 3 / 2, requests),
        "loop 3" => in_a_loop(cache * 3, requests),
        "zipf and loop" => zipf_and_loop(cache, requests, rng),
        "shifting" => shifting(cache, requests, 4, rng),
        "shifting fast" => shifting(cache, requests, 16, rng),
        "recency" => recency(requests, rng),
        "database" => database(cache, requests, rng),
        "mixed sizes" => mixed_sizes(cache, requests, rng),
        "file server" => file_server(cache, requests, rng),
        other => panic!("no workload {other}"),
    }
}

/// Reads six times the cache, with a Zipf distribution over the blocks.
fn zipf(cache: u64, exponent: f64, requests: usize, rng: &mut Rng) -> Vec<Access> {
    let zipf = Zipf::new(cache * 6, exponent, rng);
    (0..requests).map(|_| Access::read(zipf.next(rng), 1)).collect()
}

/// A Zipf distribution over six times the cache, with two scans over all blocks beside it at the same rate.
fn zipf_and_scans(cache: u64, requests: usize, rng: &mut Rng) -> Vec<Access> {
    let (all, zipf) = (cache * 6, Zipf::new(cache * 6, 0.9, rng));
    let begins = [requests * 3 / 10, requests * 13 / 20];
    let mut scanned = 0..0;
    let one = |i| {
        if begins.contains(&i) {
            scanned = 0..all;
        }
        let next = if i % 2 == 0 { scanned.next() } else { None };
        Access::read(next.unwrap_or_else(|| zipf.next(rng)), 1)
    };
    (0..requests).map(one).collect()
}

/// Reads blocks 0 to `blocks`, repeatedly.
fn in_a_loop(blocks: u64, requests: usize) -> Vec<Access> {
    (0..requests as u64).map(|i| Access::read(i % blocks, 1)).collect()
}

/// Alternates between a Zipf distribution over six times the cache and a loop over three quarters of the cache.
fn zipf_and_loop(cache: u64, requests: usize, rng: &mut Rng) -> Vec<Access> {
    let (all, length, zipf) = (cache * 6, cache * 3 / 4, Zipf::new(cache * 6, 0.9, rng));
    let one = |i: u64| match i % 2 {
        0 => Access::read(zipf.next(rng), 1),
        _ => Access::read(all + i / 2 % length, 1),
    };
    (0..requests as u64).map(one).collect()
}

/// Sends four in five requests to a range of half the cache, which has `times` successive positions.
fn shifting(cache: u64, requests: usize, times: usize, rng: &mut Rng) -> Vec<Access> {
    let (all, hot) = (cache * 6, cache / 2);
    let mut base = 0;
    let one = |i: usize| {
        if i.is_multiple_of(requests / times) {
            base = rng.below(all - hot);
        }
        let block = if rng.below(5) < 4 { base + rng.below(hot) } else { rng.below(all) };
        Access::read(block, 1)
    };
    (0..requests).map(one).collect()
}

/// Reads recent blocks again, the more recent the likelier; one request in seven reads a new block.
fn recency(requests: usize, rng: &mut Rng) -> Vec<Access> {
    let (mut blocks, mut new): (Vec<u64>, u64) = (Vec::with_capacity(requests), 0);
    for i in 0..requests {
        if i < 1000 || rng.below(7) == 0 {
            blocks.push(new);
            new += 1;
        } else {
            let back = (fraction(rng) + 1e-9).powf(-1.3) * 200.0;
            blocks.push(blocks[i - (back as usize).clamp(1, i)]);
        }
    }
    blocks.into_iter().map(|b| Access::read(b, 1)).collect()
}

/// A database: two in five requests go to an index of a quarter of the cache, the others to a table of five times the
/// cache.
///
/// One request in ten writes the block that it has read. From time to time 16 MiB of the table are read in order.
fn database(cache: u64, requests: usize, rng: &mut Rng) -> Vec<Access> {
    let (index, table) = (Zipf::new(cache / 4, 0.8, rng), Zipf::new(cache * 5, 0.8, rng));
    let mut accesses = Vec::with_capacity(requests);
    while accesses.len() < requests {
        let block = match rng.below(5000) {
            0 => {
                let from = cache / 4 + rng.below(cache * 5 - 4096);
                accesses.extend((0..128).map(|n| Access::read(from + n * 32, 32)));
                continue;
            }
            1..2000 => index.next(rng),
            _ => cache / 4 + table.next(rng),
        };
        accesses.push(Access::read(block, 1));
        if rng.below(10) == 0 {
            accesses.push(Access { block, blocks: 1, write: true });
        }
    }
    accesses.truncate(requests);
    accesses
}

/// Half of the requests read 4 KiB and half 128 KiB, each kind from three times the cache.
fn mixed_sizes(cache: u64, requests: usize, rng: &mut Rng) -> Vec<Access> {
    let (small, large) = (Zipf::new(cache * 3, 0.9, rng), Zipf::new(cache * 3 / 32, 0.9, rng));
    let one = |_| match rng.below(2) {
        0 => Access::read(small.next(rng), 1),
        _ => Access::read(cache * 3 + large.next(rng) * 32, 32),
    };
    (0..requests).map(one).collect()
}

/// A file server: files of 16 KiB to 256 KiB, with a Zipf distribution.
///
/// Three in ten accesses write the file, the others read it. Each also reads two blocks of metadata (an eighth of the
/// cache); with a written file one of the two is written instead.
fn file_server(cache: u64, requests: usize, rng: &mut Rng) -> Vec<Access> {
    let (meta, files) = (cache / 8, cache * 6 / 64);
    let popular = Zipf::new(files, 0.8, rng);
    let mut accesses = Vec::with_capacity(requests + 8);
    while accesses.len() < requests {
        let file = popular.next(rng);
        let blocks = 4 << (file % 5);
        let write = rng.below(10) < 3;
        for n in 0..2 {
            let block = (file * 31 + n * 7919) % meta;
            accesses.push(Access { block, blocks: 1, write: write && n == 0 });
        }
        let first = meta + file * 64;
        accesses.extend((0..blocks).step_by(16).map(|at| Access {
            block: first + at,
            blocks: (blocks - at).min(16),
            write,
        }));
    }
    accesses.truncate(requests);
    accesses
}

/// Parses a trace with one request a line: microseconds, `R` or `W`, offset and length in bytes. The first line has names.
///
/// Positions are reduced by `shift_bytes` and rounded outward to whole blocks.
///
/// # Errors
/// If a line has another form.
pub fn from_csv(text: &str, shift_bytes: u64) -> Result<Vec<Access>, String> {
    let parse = |(nr, line): (usize, &str)| {
        let wrong = || format!("line {}: expected time, R or W, offset and length, found {line}", nr + 1);
        let mut fields = line.split(',').skip(1);
        let write = match fields.next() {
            Some("R") => false,
            Some("W") => true,
            _ => return Err(wrong()),
        };
        let mut number = || fields.next().and_then(|f| f.trim().parse::<u64>().ok()).ok_or_else(wrong);
        let (offset, length) = (number()?.saturating_sub(shift_bytes), number()?);
        let (block, end) = (offset / 4096, (offset + length).div_ceil(4096));
        Ok(Access { block, blocks: end - block, write })
    };
    text.lines().enumerate().skip(1).map(parse).collect()
}

/// The hit ratio of an optimal cache of `cache` blocks that knows the future, from request `from` on.
///
/// Each block that is read or written is cached or not depending on its next use (Belady's rule, with bypass).
pub fn optimum(accesses: &[Access], cache: usize, from: usize) -> f64 {
    let end = accesses.iter().map(|a| a.block + a.blocks).max().unwrap_or(0) as usize;
    let blocks: Vec<(usize, bool, bool)> = accesses
        .iter()
        .enumerate()
        .flat_map(|(i, a)| (a.block..a.block + a.blocks).map(move |b| (b as usize, a.write, i >= from)))
        .collect();
    const NEVER: usize = usize::MAX;
    let (mut next, mut after) = (vec![NEVER; blocks.len()], vec![NEVER; end]);
    for (i, (block, write, _)) in blocks.iter().enumerate().rev() {
        // A block that is overwritten before it is read need not be cached.
        next[i] = after[*block];
        after[*block] = if *write { NEVER } else { i };
    }
    let (mut cached, mut count) = (vec![NEVER; end], 0);
    let mut latest = BinaryHeap::new();
    let (mut reads, mut hits) = (0_u64, 0_u64);
    for (i, (block, write, counts)) in blocks.iter().enumerate() {
        let was = std::mem::replace(&mut cached[*block], next[i]);
        reads += u64::from(*counts && !write);
        hits += u64::from(*counts && !write && was != NEVER);
        count = count + usize::from(next[i] != NEVER) - usize::from(was != NEVER);
        latest.push((next[i], *block));
        while count > cache
            && let Some((when, block)) = latest.pop()
        {
            if when != NEVER && cached[block] == when {
                cached[block] = NEVER;
                count -= 1;
            }
        }
    }
    hits as f64 / reads.max(1) as f64
}
