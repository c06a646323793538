//! Episodes: short sequences of requests, operator actions and faults that matter only together and in this order.
//!
//! An episode takes the place of most requests of one boot. Its places, sizes, pauses and faults are random. Everything else of
//! the plan stays, and each of its ingredients is also drawn on its own. Owns the drawing of episodes. Must not know how a plan
//! is carried out.

use format::CacheMode;
use io::{Nanos, Rng};

use super::{Life, one_of};
use crate::disk::{Landmark, Retained};
use crate::landmark::Aim;
use crate::plan::{BridgeSettings, Cut, FailedWrites, Loss, NOT_AGAIN, OperatorAction, Plan, Request};

/// The number of device effects after which a boot with an episode crashes at the latest.
const LATEST_CRASH: u64 = 30_000;

/// A pause after which leaves are dropped from memory.
const PAUSE_MS: u64 = 10_000;

/// The longest pause in ns until a write of the backing device fails.
const LONGEST_WAIT_NS: u64 = 60_000_000_000;

/// Adds at most a few episodes to a plan. Plans that fill their devices have none.
pub(super) fn add(plan: &mut Plan, rng: &mut Rng, life: Life) {
    if !matches!(life, Life::Brief | Life::Common) || !rng.chance(1, 6) {
        return;
    }
    let episode = one_of(rng, &EPISODES);
    // Most episodes need their order.
    if rng.chance(7, 8) {
        plan.depth = 1;
    }
    let volume = rng.below(plan.layout.backings.len() as u64) as usize;
    let boot = rng.below(plan.boots.len() as u64) as usize;
    episode(plan, rng, boot, volume);
}

type Episode = fn(&mut Plan, &mut Rng, usize, usize);

const EPISODES: [Episode; 6] =
    [failed_writeback, dropped_copy, look_up_over_leaves, flush_without_waiter, wiped_footer, full_entries];

/// The requests and actions of an episode.
struct Sequence {
    rng: Rng,
    volume: usize,
    size: u64,
    requests: Vec<Request>,
    actions: Vec<(u64, OperatorAction)>,
}

impl Sequence {
    /// Begins an episode in a boot, after a few of its requests. Clears what prevents it: absent devices, and most often other
    /// faults. The volume caches all writes.
    fn begin(plan: &mut Plan, rng: &mut Rng, number: usize, volume: usize) -> Sequence {
        let mut size = 0;
        if let Some(b) = plan.layout.backings.get_mut(volume) {
            b.mode = CacheMode::Writeback;
            size = b.data_sectors / b.block_sectors * b.block_sectors;
        }
        let mut rng = Rng::new(rng.next_u64());
        let mut requests = Vec::new();
        if let Some(boot) = plan.boots.get_mut(number) {
            (boot.alone, boot.substitute) = (false, None);
            boot.absent.clear();
            if rng.chance(7, 8) {
                boot.faults = None;
            }
            let s = &mut boot.settings;
            (s.sequential_cutoff, s.congestion, s.cutoffs) = (0, false, (70, 90));
            s.cache_mode = Some("writeback".into());
            s.journal_delay_ms = one_of(&mut rng, &[100, 2000, 30_000]);
            let own = boot.requests.iter().filter(|(v, _)| *v == volume).map(|(_, r)| r.clone());
            requests = own.take(one_of(&mut rng, &[0, 0, 3, 10])).collect();
        }
        Sequence { rng, volume, size, requests, actions: Vec::new() }
    }

    fn add(&mut self, request: Request) {
        self.requests.push(request);
    }

    fn write(&mut self, start: u64, sectors: u64, fua: bool) {
        self.add(Request::Write { start, sectors, fua });
    }

    /// Adds writes of one sector each, anywhere.
    fn writes(&mut self, count: u64, fua_one_in: u64) {
        for _ in 0..count {
            let (at, fua) = (self.rng.below(self.size), self.rng.chance(1, fua_one_in));
            self.write(at, 1, fua);
        }
    }

    fn read(&mut self, start: u64, sectors: u64) {
        self.add(Request::Read { start, sectors });
    }

    fn pause_ms(&mut self, ms: u64) {
        self.add(Request::Pause { ns: ms * 1_000_000 });
    }

    /// Adds actions that happen during a pause.
    fn operate(&mut self, actions: impl IntoIterator<Item = OperatorAction>, pause_ms: u64) {
        self.pause_ms(pause_ms);
        let at = self.requests.len() as u64;
        self.actions.extend(actions.into_iter().map(|a| (at, a)));
    }

    fn tune(&mut self, name: &str, value: &str) {
        let action = OperatorAction::Tune { volume: self.volume, name: name.into(), value: value.into() };
        self.operate([action], 10);
    }

    /// A range of at most `most` sectors, in whole blocks of any size.
    fn range(&mut self, most: u64) -> (u64, u64) {
        let most = most.min(self.size / 8 * 8);
        let sectors = (1 + self.rng.below(most)).next_multiple_of(8).min(most);
        (self.rng.below((self.size - sectors) / 8 + 1) * 8, sectors)
    }

    /// Puts the episode into a boot that crashes right after its last answer, or soon after that.
    fn end(mut self, plan: &mut Plan, number: usize, cut: Cut) {
        let is_answer = |r: &&Request| {
            matches!(
                r,
                Request::Write { .. }
                    | Request::Flush
                    | Request::FlushGivenUp { .. }
                    | Request::Discard { .. }
                    | Request::Zeroes { .. }
            )
        };
        let nth = (self.requests.iter().filter(is_answer).count() as u64).max(1);
        let effects = one_of(&mut self.rng, &[0, 0, 1, 4, 20]);
        self.end_at(plan, number, (Aim { at: Landmark::Answer, nth, effects }, cut));
    }

    /// Puts the episode into a boot that crashes at a landmark, and nowhere before.
    fn end_at(self, plan: &mut Plan, number: usize, (aim, cut): (Aim, Cut)) {
        self.end_with_action(plan, number, cut);
        if let Some(boot) = plan.boots.get_mut(number) {
            boot.aim = Some(aim);
        }
    }

    /// Puts the episode into a boot that crashes at an action.
    fn end_with_action(self, plan: &mut Plan, number: usize, cut: Cut) {
        let Some(boot) = plan.boots.get_mut(number) else { return };
        boot.requests = self.requests.into_iter().map(|r| (self.volume, r)).collect();
        boot.actions = self.actions;
        (boot.aim, boot.crash, boot.crash_in_durable_write) = (None, Some(LATEST_CRASH), None);
        (boot.cut, boot.cut_with_faults, boot.late, boot.older) = (cut, true, None, None);
    }
}

/// Power loss of all devices, which most often keep nothing.
fn power(rng: &mut Rng) -> Cut {
    let retained = one_of(rng, &[Retained::Nothing, Retained::Nothing, Retained::Nothing, Retained::Some(4)]);
    Cut::Power(retained, retained)
}

/// Gives the set and all devices blocks of one sector, and the set buckets of this size.
fn small_blocks(plan: &mut Plan, bucket_sectors: u64) {
    (plan.layout.block_sectors, plan.layout.logical_block_bytes) = (1, 512);
    for b in &mut plan.layout.backings {
        (b.block_sectors, b.logical_block_bytes) = (1, 512);
    }
    // The flash-only volume keeps its size, so its set must not become smaller.
    if plan.flash_sectors == 0 || plan.layout.bucket_sectors < bucket_sectors {
        plan.layout.bucket_sectors = bucket_sectors;
    }
}

/// Writeback fails and leaves a part of its data. The client discards the dirty data and reads that part. Then keys fill the
/// leaf, or the device leaves the set, so that the copy becomes durable; the device loses its part in a power loss.
fn failed_writeback(plan: &mut Plan, rng: &mut Rng, number: usize, volume: usize) {
    let mut sequence = Sequence::begin(plan, rng, number, volume);
    if let Some(b) = plan.layout.backings.get_mut(volume) {
        b.discard = rng.chance(1, 4);
    }
    if let Some(boot) = plan.boots.get_mut(number) {
        let s = &mut boot.settings;
        (s.writeback_running, s.writeback_percent, s.writeback_delay) = (true, 0, one_of(rng, &[0, 1]));
        let (after, count) = (one_of(rng, &[0, 0, 1]), one_of(rng, &[1, 1, 3]));
        let faults = boot.faults.get_or_insert_default();
        faults.failed_writes = Some(FailedWrites { device: volume + 1, after, count });
    }
    let (start, sectors) = sequence.range(64);
    sequence.write(start, sectors, true);
    sequence.add(Request::PauseUntilFailure { ns: LONGEST_WAIT_NS });
    if rng.chance(1, 2) {
        sequence.tune("writeback_running", "0");
    }
    sequence.add(Request::Discard { start, sectors });
    sequence.read(start, sectors);
    sequence.pause_ms(200);
    let cut = power(rng);
    if rng.chance(1, 2) {
        sequence.writes(60 + rng.below(80), 10);
        return sequence.end(plan, number, cut);
    }
    let ns = one_of(rng, &[0, 1_000_000, NOT_AGAIN, NOT_AGAIN]);
    let release = OperatorAction::Release { volume, ns };
    sequence.operate([release, OperatorAction::Gc, OperatorAction::PowerFails], 1000);
    sequence.end_with_action(plan, number, cut);
}

/// A clean copy lies between dirty data when the backing device drops what it is a copy of. A client reads the older data; then
/// writeback begins, and fills gaps.
fn dropped_copy(plan: &mut Plan, rng: &mut Rng, number: usize, volume: usize) {
    let mut sequence = Sequence::begin(plan, rng, number, volume);
    if let Some(boot) = plan.boots.get_mut(number) {
        let s = &mut boot.settings;
        (s.writeback_running, s.writeback_percent, s.writeback_delay) = (false, 0, one_of(rng, &[0, 1]));
        s.bridge = BridgeSettings { writeback_bridge: "always".into(), writeback_bridge_limit: 1 << 20 };
        boot.read_back_percent = one_of(rng, &[0, 0, 100]);
        let (after, retained) = (one_of(rng, &[0, 0, 1, 2]), Retained::Nothing);
        boot.faults.get_or_insert_default().lossy_flush = Some(Loss { device: volume + 1, after, retained });
    }
    let third = 8 * (1 + rng.below(2));
    let start = rng.below((sequence.size - 3 * third) / 8 + 1) * 8;
    sequence.tune("cache_mode", "writethrough");
    sequence.write(start + third, third, false);
    sequence.tune("cache_mode", "writeback");
    sequence.write(start, third, false);
    sequence.write(start + 2 * third, third, false);
    sequence.add(Request::Flush);
    sequence.read(start + third, third);
    sequence.tune("writeback_running", "1");
    sequence.pause_ms(5000);
    sequence.read(start, 3 * third);
    sequence.add(Request::Flush);
    let cut = power(rng);
    sequence.end(plan, number, cut);
}

/// Reads over several leaves of an index that is larger than its memory, each beside a write into the range. The reads of the
/// backing device are slow, so that meanwhile the write can be written back and dropped from the small cache.
fn look_up_over_leaves(plan: &mut Plan, rng: &mut Rng, number: usize, volume: usize) {
    small_blocks(plan, 8);
    if plan.flash_sectors == 0 {
        plan.layout.nbuckets = 160 + rng.below(80);
    }
    if let Some(b) = plan.layout.backings.get_mut(volume) {
        (b.data_sectors, b.discard) = (b.data_sectors.max(4000), rng.chance(1, 2));
    }
    let mut sequence = Sequence::begin(plan, rng, number, volume);
    plan.depth = one_of(rng, &[3, 6]);
    if let Some(boot) = plan.boots.get_mut(number) {
        let s = &mut boot.settings;
        (s.node_cache_bytes, s.writeback_percent, s.writeback_delay) = (1, 0, one_of(rng, &[0, 1]));
        (s.writeback_running, boot.read_back_percent) = (true, 0);
        // A leaf arrives late, and a write is quick, by chance.
        let speed = &mut boot.cache_speed;
        (speed.base, speed.spread, speed.slow_one_in) =
            (Nanos::from_us(1), Nanos::from_ms(one_of(rng, &[2, 20])), 0);
        let speed = &mut boot.backing_speed;
        (speed.base, speed.spread) = (Nanos::from_us(100), Nanos::from_ms(1));
        (speed.slow_one_in, speed.slow) = (one_of(rng, &[3, 10]), Nanos::from_secs(90));
    }
    let step = 4 + rng.below(4);
    (0..sequence.size / step).take(500).for_each(|n| sequence.write(n * step, 1, false));
    sequence.add(Request::Flush);
    sequence.pause_ms(100_000);
    for _ in 0..10 + rng.below(20) {
        let length = 600 + rng.below(1200);
        let start = rng.below(sequence.size - length);
        let far = one_of(rng, &[8, 200, length]);
        let at = start + rng.below(far);
        // The write begins during the read of another client.
        let most = one_of(rng, &[1_000_000, 5_000_000, 30_000_000]);
        sequence.add(Request::PauseUntilRead { ns: rng.below(most) });
        sequence.read(start, length);
        sequence.write(at, 1, false);
        for _ in 0..rng.below(20) {
            let (at, sectors) = (rng.below(sequence.size - 64), 1 + rng.below(64));
            sequence.read(at, sectors);
        }
        sequence.pause_ms(PAUSE_MS);
        sequence.read(at, 1);
    }
    sequence.pause_ms(PAUSE_MS);
    sequence.read(0, sequence.size);
    let cut = power(rng);
    sequence.end(plan, number, cut);
}

/// A client overwrites data in place, flushes it, and gives the flush up. The device fails the flush and loses the data. Then the
/// process dies, and its crash log remains.
fn flush_without_waiter(plan: &mut Plan, rng: &mut Rng, number: usize, volume: usize) {
    let mut sequence = Sequence::begin(plan, rng, number, volume);
    plan.crash_log = true;
    if let Some(boot) = plan.boots.get_mut(number) {
        boot.settings.overwrite_in_place = "always".into();
        boot.settings.writeback_running = false;
        boot.settings.journal_delay_ms = 30_000;
        boot.faults.get_or_insert_default();
        boot.cache_speed.spread = Nanos::from_ms(one_of(rng, &[2, 20]));
        (boot.cache_speed.base, boot.cache_speed.slow_one_in) = (Nanos::from_us(1), 0);
    }
    let (start, sectors) = sequence.range(16);
    sequence.write(start, sectors, false);
    sequence.add(Request::Flush);
    sequence.pause_ms(1000);
    sequence.write(start, sectors, false);
    sequence.operate([OperatorAction::NextFlushLoses { device: 0 }], 1);
    sequence.add(Request::FlushGivenUp { ns: rng.below(5_000_000) });
    // This write begins before the dirty data, so it does not overwrite it in place.
    let (at, size) = (start.saturating_sub(8), sequence.size);
    sequence.write(at, (sectors + 8).min(size - at), false);
    // The flush fails now, unless it has failed before.
    sequence.pause_ms(50);
    sequence.operate([OperatorAction::PowerFails], 1);
    sequence.end_with_action(plan, number, Cut::Kill);
}

/// A wipe that is given up overwrites a footer, and not durably. Data of its bucket is overwritten in place, durably, and then
/// the power fails.
fn wiped_footer(plan: &mut Plan, rng: &mut Rng, number: usize, volume: usize) {
    plan.layout.checksums = true;
    if plan.flash_sectors == 0 {
        plan.layout.nbuckets = plan.layout.nbuckets.min(256);
    }
    small_blocks(plan, 8);
    let mut sequence = Sequence::begin(plan, rng, number, volume);
    let next = number + 1;
    let (buckets, most) = (1 + rng.below(4), sequence.size / 7);
    let start = rng.below(most.saturating_sub(buckets) + 1) * 7;
    for n in 0..buckets {
        sequence.write(start + n * 7, 7, true);
    }
    let (aim, cut) = (Aim { at: Landmark::Answer, nth: u64::MAX, effects: 0 }, Cut::Kill);
    sequence.end_at(plan, number, (aim, cut));
    if let Some(boot) = plan.boots.get_mut(number) {
        // It stops in order, so the footer is on the device.
        (boot.aim, boot.crash, boot.faults) = (None, None, None);
        boot.settings.writeback_running = false;
    }
    let mut sequence = Sequence::begin(plan, rng, next, volume);
    sequence.requests.clear();
    if let Some(boot) = plan.boots.get_mut(next) {
        boot.settings.overwrite_in_place = "always".into();
        boot.settings.writeback_running = false;
        (boot.settings.journal_delay_ms, boot.read_back_percent) = (30_000, 0);
    }
    sequence.pause_ms(1000);
    let ns = 100_000 << rng.below(9);
    sequence.operate([OperatorAction::Wipe { ns: ns + rng.below(ns) }], 100);
    sequence.read(start, buckets * 7);
    for _ in 0..1 + rng.below(2) {
        let at = start + rng.below(buckets * 7);
        sequence.write(at, 1, true);
    }
    let cut = power(rng);
    sequence.end(plan, next, cut);
}

/// So many clients write that an entry grows while the entry before it is written.
fn full_entries(plan: &mut Plan, rng: &mut Rng, number: usize, volume: usize) {
    small_blocks(plan, 32);
    plan.layout.nbuckets = plan.layout.nbuckets.max(256);
    if let Some(b) = plan.layout.backings.get_mut(volume) {
        b.data_sectors = b.data_sectors.max(4096);
    }
    let mut sequence = Sequence::begin(plan, rng, number, volume);
    plan.depth = one_of(rng, &[200, 400, 400]);
    if let Some(boot) = plan.boots.get_mut(number) {
        boot.settings.writeback_running = false;
        boot.settings.journal_delay_ms = 100;
        let speed = &mut boot.cache_speed;
        (speed.base, speed.spread, speed.slow_one_in) = (Nanos::from_us(100), Nanos::from_ms(2), 0);
        speed.nodes = Nanos::from_ms(one_of(rng, &[3, 5, 8]));
    }
    let (count, one_in) = (one_of(rng, &[800, 1000]), one_of(rng, &[100, 1_000_000]));
    sequence.writes(count / 2, one_in);
    sequence.pause_ms(300);
    sequence.writes(count / 2, one_in);
    let aim = Aim { at: Landmark::RingOverwrite, nth: 1 + rng.below(3), effects: one_of(rng, &[0, 0, 0, 1]) };
    // A part of the entry that is being written reaches the device.
    let retained = one_of(rng, &[Retained::Some(2), Retained::Some(4), Retained::Some(6)]);
    let cut = Cut::Power(retained, Retained::Everything);
    sequence.end_at(plan, number, (aim, cut));
}
