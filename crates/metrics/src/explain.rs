//! Explanations of a volume's behaviour, in sentences.
//!
//! Owns the wording. The figures answer three questions: why writeback runs at its rate, which requests bypassed the cache in the
//! last minutes and why, and why reads hit or miss. Each answer names the tunable that changes the behaviour. Must not know how
//! the sentences are shown.

use std::fmt;

use engine::figures::{RateReason, SetFigures, VolumeFigures};
use engine::policy::bypass::BypassReason;
use engine::stats::{OpKind, Outcome, Tally, View};
use format::{CacheMode, SECTOR_BYTES, Sectors, counted, form};

/// The answers, one or two sentences in each string.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Explanation {
    /// The reasons for the rate of writeback.
    pub writeback: Vec<String>,
    /// Which requests bypassed the cache in the last five minutes.
    pub bypassed: Vec<String>,
    /// Why reads of the last five minutes hit or missed.
    pub hits: Vec<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [("Writeback", &self.writeback), ("Bypassed", &self.bypassed), ("Hits", &self.hits)];
        for (i, (title, sentences)) in parts.into_iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            writeln!(f, "{title}")?;
            for s in sentences {
                writeln!(f, "  {s}")?;
            }
        }
        Ok(())
    }
}

/// What is said without requests.
const NO_REQUESTS: &str = "There were no requests in the last five minutes.";
/// What is said without reads.
const NO_READS: &str = "There were no reads through the cache in the last five minutes.";

impl Explanation {
    /// The explanation of a volume that waits for a device: requests that are not answered are in no count.
    #[must_use]
    pub fn waiting_for(mut self, device: &str, requests: u64, seconds: u64) -> Explanation {
        let wait = form(requests, "waits", "wait");
        let text = format!(
            "{device} has not answered for {seconds} s: {} to it {wait}.",
            counted(requests, "request")
        );
        self.writeback.insert(0, text);
        for (list, said) in [(&mut self.bypassed, NO_REQUESTS), (&mut self.hits, NO_READS)] {
            if list.first().is_some_and(|first| first == said) {
                *list = vec!["No such request was answered in the last five minutes.".to_owned()];
            }
        }
        self
    }
}

/// Explains a volume; `set` is the volume's set, if it has one.
pub fn explain(volume: &VolumeFigures, set: Option<&SetFigures>) -> Explanation {
    let Some(set) = set else {
        let alone =
            "The device is served without a cache: every request goes to the backing device.".to_owned();
        return Explanation {
            writeback: vec![alone.clone()],
            bypassed: vec![alone.clone()],
            hits: vec![alone],
        };
    };
    if let Some(why) = &set.status.failed {
        let failed = failed(volume, why);
        return Explanation {
            writeback: vec![failed.clone()],
            bypassed: vec![failed.clone()],
            hits: vec![failed],
        };
    }
    Explanation {
        writeback: writeback(volume, set),
        bypassed: past_the_cache(volume),
        hits: hits(volume, set),
    }
}

/// The answer to every question about a volume whose set is disabled.
fn failed(volume: &VolumeFigures, why: &str) -> String {
    let rest = match volume.dirty {
        Sectors::ZERO => "this volume has no dirty data in it".to_owned(),
        dirty => format!(
            "{} of dirty data are on the cache device alone, cannot be written back until it works again, and the volume fails \
             every request",
            Size::sectors(dirty)
        ),
    };
    format!("The set is disabled: {why}; {rest}. `ubcache status` has the next step.")
}

/// A number of bytes in messages: three or four digits, with a unit that is a power of 1024.
struct Size(f64);

impl Size {
    fn of(bytes: u64) -> Size {
        Size(bytes as f64)
    }

    fn sectors(sectors: Sectors) -> Size {
        Size::of(sectors.bytes())
    }

    fn signed(bytes: i64) -> Size {
        Size(bytes as f64)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0;
        let mut unit = "bytes";
        for next in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
            // From 1023.95 on, one decimal would be 1024.0.
            if value.abs() < 1023.95 {
                break;
            }
            value /= 1024.0;
            unit = next;
        }
        if unit == "bytes" { write!(f, "{value} bytes") } else { write!(f, "{value:.1} {unit}") }
    }
}

fn percent(part: u64, all: u64) -> u64 {
    let share = u128::from(part) * 100 / u128::from(all.max(1));
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// The rate at which dirty data is written back, and the reason.
fn speed(v: &VolumeFigures, set: &SetFigures) -> String {
    let (t, rate) = (&v.tunables, &v.writeback.rate);
    let dirty = Size::sectors(v.dirty);
    let fast = "as fast as the devices allow";
    match v.writeback.rate_reason {
        RateReason::Never if v.is_flash_only() => {
            "The volume is flash-only: its data is in the cache alone, and nothing is written back."
                .to_owned()
        }
        RateReason::Never => "The device is not attached to a cache: nothing is written back.".to_owned(),
        RateReason::NothingDirty => "Nothing is dirty: there is nothing to write back.".to_owned(),
        RateReason::Stopped => format!(
            "{dirty} are dirty and nothing is written back, because writeback_running is 0. Set \
             writeback_running=1 to resume writeback."
        ),
        RateReason::Detaching => {
            format!("The device is being detached: the {dirty} that are dirty are written back {fast}.")
        }
        RateReason::Draining => {
            format!("A drain is running: the {dirty} that are dirty are written back {fast}.")
        }
        RateReason::CacheStarved => format!(
            "The cache has no bucket left that can be reused: {dirty} are dirty and are written back {fast}, \
             whatever the rate says. A smaller writeback_percent (now {}) keeps more buckets clean.",
            t.writeback_percent
        ),
        RateReason::Filling => format!(
            "The cache is nearly full ({} % in use): the {dirty} that are dirty are written back {fast}, \
             whatever the rate says. From 88 % on, writes that need new room wait for it, for {} ms at most \
             (writeback_latency_ms).",
            set.status.in_use_percent, t.writeback_latency_ms
        ),
        RateReason::Unthrottled => format!(
            "writeback_percent is 0: the {dirty} that are dirty are written back {fast}. Set writeback_percent to the share \
             of the cache that may stay dirty, 10 for example, to spare the backing device."
        ),
        RateReason::Delayed => format!(
            "{dirty} are dirty and wait: data is written back when it is {} s old (writeback_delay), so that \
             data which is overwritten soon is written back only once.",
            t.writeback_delay
        ),
        RateReason::Idle => format!(
            "The set has had no requests for a while: the {dirty} that are dirty are written back {fast}, \
             until the next request arrives (idle_max_writeback_rate=0 turns this off)."
        ),
        RateReason::Fragmented => format!(
            "Writeback runs at {}/s. {dirty} are dirty, spread thinly over a cache that is {} % in use: the \
             fragmentation term of {}/s replaces the proportional term, to free buckets. The factors are \
             writeback_rate_fp_term_low, _mid and _high; writeback_consider_fragment=0 turns them off.",
            Size::signed(rate.rate),
            set.status.in_use_percent,
            Size::signed(rate.proportional)
        ),
        RateReason::Controlled => controlled(v),
    }
}

fn writeback(v: &VolumeFigures, set: &SetFigures) -> Vec<String> {
    let mut said = vec![speed(v, set)];
    if v.writeback.share < 0.95
        && matches!(v.writeback.rate_reason, RateReason::Controlled | RateReason::Fragmented)
    {
        said.push(format!(
            "Requests keep the devices busy and the cache has room: writeback takes at most {:.0} % of the \
             time, and more as dirty data grows from {} to {} % of the cache (cutoff_writeback, \
             cutoff_writeback_sync). writeback_controller=kernel turns this off.",
            v.writeback.share * 100.0,
            set.tunables.cutoff_writeback,
            set.tunables.cutoff_writeback_sync
        ));
    }
    if let Some(error) = v.writeback.last_error.as_ref().filter(|_| v.writeback.failures > 0) {
        said.push(format!(
            "The last {} failed: {error}. Writeback tries again each second.",
            counted(v.writeback.failures, "batch")
        ));
    }
    said
}

/// Explains the rate by the controller's proportional and integral terms.
fn controlled(v: &VolumeFigures) -> String {
    let (t, rate) = (&v.tunables, &v.writeback.rate);
    let (dirty, target) = (v.dirty.bytes(), v.dirty_target.bytes());
    let now = Size::signed(rate.rate);
    let minimum = Sectors(u64::from(t.writeback_rate_minimum)).bytes();
    let goal = format!(
        "{} (writeback_percent {} of the cache, this device's share)",
        Size::of(target),
        t.writeback_percent
    );
    let terms = format!(
        "the proportional term, the distance divided by {} (writeback_rate_p_term_inverse), is {}/s, the integral term {}/s",
        t.writeback_rate_p_term_inverse,
        Size::signed(rate.proportional),
        Size::signed(rate.integral)
    );
    if dirty <= target && u64::try_from(rate.rate).unwrap_or(0) <= minimum {
        return format!(
            "Writeback runs at its minimum, {now}/s (writeback_rate_minimum): {} are dirty, which is no more \
             than the target of {goal}. A smaller writeback_percent, or a larger writeback_rate_minimum, \
             cleans more.",
            Size::of(dirty)
        );
    }
    if dirty <= target {
        return format!(
            "Writeback runs at {now}/s although the {} that are dirty are no more than the target of {goal}: \
             {terms}; the rate falls with each update, every {} s.",
            Size::of(dirty),
            t.writeback_rate_update_seconds
        );
    }
    format!(
        "Writeback runs at {now}/s: {} are dirty, {} above the target of {goal}; {terms}. A larger \
         writeback_percent slows it down, a smaller writeback_rate_p_term_inverse speeds it up.",
        Size::of(dirty),
        Size::of(dirty - target)
    )
}

/// The meaning of a bypass reason, and the tunable that changes it.
fn advice(reason: BypassReason, v: &VolumeFigures) -> String {
    let t = &v.tunables;
    match reason.name() {
        "detaching" => "the device is being detached".into(),
        "discard" => "they were discards, which are not cached".into(),
        "stopping" => "the set is being stopped".into(),
        "cache_full" => {
            "more than 95 % of the buckets are in use; use a smaller writeback_percent or a larger \
                         cache"
                .into()
        }
        "mode_none" => "cache_mode is none, which caches nothing; choose another cache_mode".into(),
        "writearound" => {
            "cache_mode is writearound, which caches no writes; choose writethrough or writeback".into()
        }
        "readahead" => "they were read-ahead; readahead_cache_policy=all caches it".into(),
        "background" => "they were background reads; readahead_cache_policy=all caches them".into(),
        "unaligned" => {
            "they did not cover whole blocks of the cache; use a file system with larger blocks, or \
                        another data offset"
                .into()
        }
        "sequential" => format!(
            "they were part of sequential streams of {} or more; sequential_cutoff sets this limit, 0 caches \
             all streams",
            Size::of(u64::from(t.sequential_cutoff))
        ),
        "congested" => "the cache device was slow; congested_read_threshold_us and \
                        congested_write_threshold_us set the limits, 0 turns them off"
            .into(),
        "no_bucket" => "no bucket was free; use a smaller writeback_percent or a larger cache".into(),
        other => format!("the reason was {other}"),
    }
}

fn past_the_cache(v: &VolumeFigures) -> Vec<String> {
    let all = OpKind::ALL.iter().map(|op| v.recent.all_of(*op)).fold(Tally::default(), Tally::plus);
    if all.requests == 0 {
        return vec![NO_REQUESTS.to_owned()];
    }
    let mut reasons: Vec<(BypassReason, Tally)> = BypassReason::ALL
        .iter()
        .map(|r| (*r, v.recent.bypassed(*r)))
        .filter(|(_, n)| n.requests > 0)
        .collect();
    // The most frequent reason first. Reasons with equal counts keep the order in which the cache checks them.
    reasons.sort_by_key(|(_, n)| std::cmp::Reverse(n.requests));
    let past = reasons.iter().fold(Tally::default(), |n, (_, more)| n.plus(*more));
    let mut said = Vec::new();
    let asked = counted(all.requests, "request");
    if reasons.is_empty() {
        said.push(format!("Of {asked} in the last five minutes none bypassed the cache."));
    } else {
        let (part, size) = (percent(past.requests, all.requests), Size::of(past.bytes));
        said.push(format!(
            "Of {asked} in the last five minutes {} ({part} %, {size}) bypassed the cache:",
            past.requests
        ));
    }
    for (reason, n) in reasons {
        let (requests, size) = (counted(n.requests, "request"), Size::of(n.bytes));
        said.push(format!("{requests} ({size}, {}): {}.", reason.name(), advice(reason, v)));
    }
    if v.recent.not_cached.requests > 0 {
        said.push(format!(
            "{} of data were not cached because no bucket was free.",
            Size::of(v.recent.not_cached.bytes)
        ));
    }
    said
}

/// The amount of cached data, as a reason for misses.
fn held(set: &SetFigures) -> String {
    let s = &set.status;
    let cache = Sectors(u64::from(s.nbuckets).saturating_mul(s.bucket_sectors.0));
    let held = percent(s.cached_sectors.0, cache.0);
    if held < 80 {
        format!(
            "The cache is still filling: it holds {}, {held} % of {}. Misses fill it.",
            Size::sectors(s.cached_sectors),
            Size(cache.0 as f64 * SECTOR_BYTES as f64)
        )
    } else {
        format!(
            "The cache is full ({} of {}) and evicts data as cache_replacement_policy says (the least recently \
             used by default): the working set is larger than the cache, or data is read only once.",
            Size::sectors(s.cached_sectors),
            Size(cache.0 as f64 * SECTOR_BYTES as f64)
        )
    }
}

fn hits(v: &VolumeFigures, set: &SetFigures) -> Vec<String> {
    let count = |outcome| v.recent.of(OpKind::Read, outcome).requests;
    let (hit, miss, partial) = (count(Outcome::Hit), count(Outcome::Miss), count(Outcome::Partial));
    let reads = hit + miss + partial;
    if reads == 0 {
        return vec![NO_READS.to_owned()];
    }
    let mut said = vec![format!(
        "Of {} through the cache in the last five minutes {} % were hits ({hit} hits, {miss} misses, {partial} found a part).",
        counted(reads, "read"),
        percent(hit, reads)
    )];
    if percent(hit, reads) >= 90 {
        return said;
    }
    if v.is_flash_only() {
        said.push("The volume is flash-only: a miss reads a range that was never written, as zeros.".into());
        return said;
    }
    let bypassed = BypassReason::ALL.iter().map(|r| count(Outcome::Bypass(*r))).fold(0, u64::saturating_add);
    if bypassed > reads / 4 {
        said.push(format!(
            "{} more bypassed the cache and were not cached: see the reasons above.",
            counted(bypassed, "read")
        ));
    }
    if v.tunables.cache_mode == CacheMode::Writearound {
        said.push("cache_mode is writearound: written data is cached only when it is read.".into());
    }
    if percent(v.recent.not_cached.bytes, v.recent.all_of(OpKind::Read).bytes) >= 10 {
        said.push(
            "Much of the data of misses was not cached because dirty data held all buckets: use a smaller \
             writeback_percent or a larger cache."
                .into(),
        );
    }
    let collisions = v.cache.view(View::FiveMinute).cache_miss_collisions;
    if collisions > (miss + partial) / 10 {
        said.push(format!(
            "{} were not cached because the same blocks were written meanwhile.",
            counted(collisions, "miss").replace("misss", "misses")
        ));
    }
    said.push(held(set));
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_for_people() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            ((1 << 30) - 8192, "1.0 GiB"),
            (2 << 30, "2.0 GiB"),
        ] {
            assert_eq!(Size::of(bytes).to_string(), text);
        }
        assert_eq!(Size::signed(-5 << 20).to_string(), "-5.0 MiB");
        assert_eq!(
            (percent(1, 3), percent(0, 0), counted(1, "read"), counted(2, "read")),
            (33, 0, "1 read".into(), "2 reads".into())
        );
    }
}
