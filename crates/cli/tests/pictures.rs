//! The curves in the operator's guide, drawn by the engine's own rules: what is committed is what they say today.
//!
//! `UBCACHE_BOOK_DRAW=1` draws them anew.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use engine::policy::bypass::dirty_limit_percent;
use engine::policy::congestion::{Congestion, Direction};
use engine::policy::cost::{CostModel, Costs};
use engine::policy::sequential::SequentialDetector;
use engine::policy::writeback_rate::{IdleCounter, IdleInputs, RateInputs, RateUpdate, WritebackRate};
use engine::tunables::{DeviceTunables, SetTunables};
use format::{Sector, Sectors};
use io::Nanos;

const BLUE: &str = "#2a78c0";
const ORANGE: &str = "#c0602a";
const GREEN: &str = "#3a9a4a";
const PURPLE: &str = "#8a5ac0";
const GREY: &str = "#888";

const WIDTH: f64 = 720.0;
const LEFT: f64 = 74.0;
const RIGHT: f64 = 20.0;

/// A picture of one or more charts below each other.
struct Picture {
    svg: String,
    height: f64,
}

impl Picture {
    fn new(height: f64, label: &str) -> Picture {
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
             font-size=\"13\" role=\"img\" aria-label=\"{label}\">\n<style>text{{fill:#444}}</style>\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" rx=\"6\" fill=\"#fff\"/>\n"
        );
        Picture { svg, height }
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, colour: &str, text: &str) {
        let fill = if colour.is_empty() { String::new() } else { format!(" style=\"fill:{colour}\"") };
        writeln!(self.svg, "<text x=\"{x:.0}\" y=\"{y:.0}\" text-anchor=\"{anchor}\"{fill}>{text}</text>")
            .unwrap();
    }

    /// The committed file is this picture, or becomes it.
    fn committed(mut self, name: &str) {
        assert!(self.height > 0.0);
        self.svg.push_str("</svg>\n");
        let book: PathBuf =
            Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("docs/book/src");
        let path = book.join(name);
        if std::env::var_os("UBCACHE_BOOK_DRAW").is_some() {
            std::fs::write(&path, &self.svg).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == self.svg,
            "{name} is not what the engine does: draw it anew with UBCACHE_BOOK_DRAW=1"
        );
        let page = std::fs::read_to_string(book.join("tunables.md")).unwrap();
        assert!(page.contains(&format!("]({name})")), "{name} is on no page");
    }
}

/// One chart: where it is in the picture, and what its axes mean.
struct Chart<'a> {
    picture: &'a mut Picture,
    top: f64,
    height: f64,
    x: (f64, f64),
    y: (f64, f64),
    /// Equal steps up are equal factors.
    log: bool,
}

impl<'a> Chart<'a> {
    fn new(picture: &'a mut Picture, top: f64, height: f64, x: (f64, f64), y: (f64, f64)) -> Chart<'a> {
        Chart { picture, top, height, x, y, log: false }
    }

    fn log(mut self) -> Self {
        self.log = true;
        self
    }

    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let scale = |v: f64| if self.log { v.ln() } else { v };
        let share_x = (x - self.x.0) / (self.x.1 - self.x.0);
        let share_y = (scale(y) - scale(self.y.0)) / (scale(self.y.1) - scale(self.y.0));
        let up = share_y.clamp(0.0, 1.0);
        (LEFT + share_x * (WIDTH - LEFT - RIGHT), self.top + (1.0 - up) * self.height)
    }

    /// Lines and numbers at the edges.
    fn axes(&mut self, x: &[(f64, &str)], y: &[(f64, &str)]) {
        for (value, label) in y {
            let (_, at) = self.at((self.x.0, *value));
            self.stroke(&[(self.x.0, *value), (self.x.1, *value)], "#ddd", 1.0, "");
            self.picture.text(LEFT - 8.0, at + 4.0, "end", "", label);
        }
        for (i, (value, label)) in x.iter().enumerate() {
            let (at, _) = self.at((*value, self.y.0));
            let anchor = if i + 1 == x.len() { "end" } else { "middle" };
            self.picture.text(at, self.top + self.height + 18.0, anchor, "", label);
        }
    }

    fn stroke(&mut self, points: &[(f64, f64)], colour: &str, width: f64, dashes: &str) {
        let mut path = String::new();
        for (i, point) in points.iter().enumerate() {
            let (x, y) = self.at(*point);
            write!(path, "{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" }).unwrap();
        }
        let dashes =
            if dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dashes}\"") };
        writeln!(
            self.picture.svg,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"{dashes}/>"
        )
        .unwrap();
    }

    /// What is between a curve and the bottom.
    fn area(&mut self, points: &[(f64, f64)], colour: &str) {
        let mut path = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let (x, y) = self.at((*x, *y));
            write!(path, "{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" }).unwrap();
        }
        let (last, bottom) = self.at((points[points.len() - 1].0, self.y.0));
        let (first, _) = self.at((points[0].0, self.y.0));
        writeln!(
            self.picture.svg,
            "<path d=\"{path}L{last:.1} {bottom:.1}L{first:.1} {bottom:.1}z\" fill=\"{colour}\" opacity=\".35\"/>"
        )
        .unwrap();
    }

    fn dot(&mut self, point: (f64, f64), colour: &str) {
        let (x, y) = self.at(point);
        writeln!(self.picture.svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{colour}\"/>")
            .unwrap();
    }

    fn note(&mut self, point: (f64, f64), colour: &str, text: &str) {
        let (x, y) = self.at(point);
        self.picture.text(x, y, "start", colour, text);
    }
}

const GIB: f64 = 2_097_152.0;
const MIB: f64 = 2048.0;

/// Sectors of this many.
fn sectors(n: f64) -> Sectors {
    Sectors(n as u64)
}

/// A client writes for ten minutes more than the disk takes, then nothing more.
#[test]
fn how_the_controller_goes() {
    let tunables = DeviceTunables::default();
    let (params, cache) = (tunables.rate_params(), 100.0 * GIB);
    let (mut rate, mut idle) = (WritebackRate::new(Nanos(0)), IdleCounter::default());
    let set = IdleInputs { attached_devices: 1, enabled: false, gc_running: false };
    let mut dirty = 4.0 * GIB;
    let (mut amounts, mut rates, mut integral) = (Vec::new(), Vec::new(), Vec::new());
    let mut target = 0.0;
    for second in 0..1800u64 {
        let now = Nanos::from_secs(second);
        if second % u64::from(params.update_seconds) == 0 {
            let inputs = RateInputs {
                nbuckets: cache as u64 / 1024,
                available_buckets: cache as u64 / 1024 * 3 / 4,
                bucket: Sectors(1024),
                in_use_percent: 25,
                volumes_dirty: Sectors(0),
                backing: Sectors(1 << 32),
                all_backing: Sectors(1 << 32),
                has_dirty: true,
                dirty: sectors(dirty),
            };
            target = inputs.target(params.percent) as f64;
            assert_eq!(rate.update(&inputs, &params, &mut idle, &set, now), RateUpdate::Controlled);
            let debug = rate.debug(sectors(dirty), true, now);
            let minute = second as f64 / 60.0;
            let mib_s = |bytes: i64| bytes as f64 / 1_048_576.0;
            amounts.push((minute, dirty / GIB));
            rates.push((minute, mib_s(debug.rate)));
            integral.push((minute, mib_s(debug.integral)));
        }
        let client = if (60..660).contains(&second) { 80.0 * MIB } else { 0.0 };
        // A disk with 60 MiB a second for writeback.
        let written = f64::from(rate.rate()).min(60.0 * MIB).min(dirty);
        let _ = rate.delay_after(sectors(written), false, now);
        dirty += client - written;
    }
    let mut picture = Picture::new(
        366.0,
        "Dirty data rises above its target while a client writes more than the disk takes; the rate of writeback follows it",
    );
    let time = [
        (0.0, "0"),
        (5.0, "5"),
        (10.0, "10"),
        (15.0, "15"),
        (20.0, "20"),
        (25.0, "25"),
        (30.0, "30 minutes"),
    ];
    let top = amounts.iter().map(|p| p.1).fold(0.0, f64::max) * 1.1;
    let mut chart = Chart::new(&mut picture, 20.0, 140.0, (0.0, 30.0), (0.0, top));
    chart.axes(&[], &[(0.0, "0"), (5.0, "5 GiB"), (10.0, "10 GiB"), (15.0, "15 GiB"), (20.0, "20 GiB")]);
    chart.stroke(&[(0.0, target / GIB), (30.0, target / GIB)], GREEN, 1.5, "6 4");
    chart.stroke(&amounts, BLUE, 2.0, "");
    chart.note((14.0, top * 0.8), BLUE, "dirty data");
    chart.note((19.0, target / GIB + 0.5), GREEN, "target: writeback_percent");
    let top = rates.iter().map(|p| p.1).fold(0.0, f64::max) * 1.1;
    let mut chart = Chart::new(&mut picture, 190.0, 140.0, (0.0, 30.0), (0.0, top));
    chart.axes(&time, &[(0.0, "0"), (100.0, "100 MiB/s"), (200.0, "200 MiB/s"), (300.0, "300 MiB/s")]);
    chart.stroke(&[(0.0, 60.0), (30.0, 60.0)], GREY, 1.0, "2 3");
    chart.area(&rates, ORANGE);
    chart.area(&integral, PURPLE);
    chart.stroke(&rates, ORANGE, 2.0, "");
    chart.note((14.0, top * 0.8), ORANGE, "rate that the controller allows");
    chart.note((22.0, 68.0), GREY, "what the disk takes");
    chart.note((4.0, 14.0), PURPLE, "integral term");
    picture.committed("controller.svg");
}

/// Reads of the cache device become slow for a while.
#[test]
fn how_congestion_comes_and_goes() {
    let tunables = SetTunables::default();
    let thresholds = (tunables.congested_read_threshold_us, tunables.congested_write_threshold_us);
    let mut congestion = Congestion::new(thresholds.0, thresholds.1);
    let (mut limits, mut slow) = (Vec::new(), Vec::new());
    for ms in 0..1400u64 {
        let now = Nanos::from_ms(ms + 1);
        let is_slow = (200..600).contains(&ms);
        if is_slow && ms % 20 == 0 {
            congestion.observe_latency(Direction::Read, Nanos::from_ms(30), now);
            slow.push(ms as f64);
        } else if !is_slow && ms % 4 == 0 {
            congestion.observe_latency(Direction::Read, Nanos(150_000), now);
        }
        // Halves of the random bits are set on average.
        let limit = congestion.limit(now, 0x5555_5555).map_or(f64::INFINITY, |l| l.0 as f64 / 2.0);
        limits.push((ms as f64, limit.clamp(1.0, 65_536.0)));
    }
    let mut picture = Picture::new(
        232.0,
        "While reads of the cache device are slow, shorter and shorter streams go past it; afterwards the limit rises again",
    );
    let mut chart = Chart::new(&mut picture, 20.0, 180.0, (0.0, 1400.0), (1.0, 65_536.0)).log();
    chart.axes(
        &[(0.0, "0"), (400.0, "400"), (800.0, "800"), (1400.0, "1400 ms")],
        &[(1.0, "1 KiB"), (16.0, "16 KiB"), (256.0, "256 KiB"), (4096.0, "4 MiB"), (65_536.0, "none")],
    );
    for ms in slow {
        chart.dot((ms, 1.0), ORANGE);
    }
    chart.area(&limits, BLUE);
    chart.stroke(&limits, BLUE, 2.0, "");
    chart.note((205.0, 1.6), ORANGE, "reads of 30 ms");
    chart.note((730.0, 8.0), BLUE, "streams below the line are cached");
    chart.note((30.0, 8192.0), GREY, "no limit");
    picture.committed("congestion.svg");
}

/// One client copies a file, others read and write here and there.
#[test]
fn picture_of_streams() {
    let cutoff = f64::from(DeviceTunables::default().sequential_cutoff) / 1024.0;
    let mut detector = SequentialDetector::new();
    let mut picture = Picture::new(
        242.0,
        "The requests of a stream go past the cache from sequential_cutoff on; scattered requests are always cached",
    );
    let mut chart = Chart::new(&mut picture, 20.0, 190.0, (0.0, 64.0), (2.0, 16_384.0)).log();
    chart.axes(
        &[(0.0, "1st"), (16.0, "16th"), (32.0, "32nd"), (48.0, "48th"), (64.0, "64th request")],
        &[(4.0, "4 KiB"), (64.0, "64 KiB"), (1024.0, "1 MiB"), (16_384.0, "16 MiB")],
    );
    chart.stroke(&[(0.0, cutoff), (64.0, cutoff)], GREEN, 1.5, "6 4");
    let (mut at, mut past) = (1 << 22, 0);
    for request in 0..64u64 {
        let now = Nanos::from_ms(10 * request);
        // Two of three are parts of the stream.
        let (start, length) = if request % 3 == 2 { (request * 7919 % 4096 * 1024, 8) } else { (at, 512) };
        if length == 512 {
            at += 512;
        }
        let known = detector.observe(Sector(start), Sectors(length), now);
        let kib = known.0 as f64 / 2.0;
        past += u32::from(kib >= cutoff);
        chart.dot((request as f64, kib), if kib >= cutoff { ORANGE } else { BLUE });
    }
    assert!((10..40).contains(&past));
    chart.note((1.0, cutoff * 1.15), GREEN, "sequential_cutoff");
    chart.note((44.0, 2000.0), ORANGE, "past the cache");
    chart.note((20.0, 300.0), BLUE, "cached: a stream that is still short");
    chart.note((20.0, 5.2), BLUE, "cached: scattered requests of 4 KiB");
    picture.committed("streams.svg");
}

/// What the two admission policies do with writes, and what a loaded cache device does to requests.
#[test]
fn picture_of_admission() {
    let tunables = SetTunables::default();
    let (soft, hard) = (tunables.cutoff_writeback, tunables.cutoff_writeback_sync);
    let share = |used: u32| {
        let numbers = 0..10_000u32;
        let dirty = numbers.filter(|n| used <= u32::from(dirty_limit_percent(hard, *n))).count();
        dirty as f64 / 100.0
    };
    let by_cost: Vec<_> = (0..=100).map(|used| (f64::from(used), share(used))).collect();
    let (soft, hard) = (f64::from(soft), f64::from(hard));
    let mut picture = Picture::new(
        392.0,
        "Writes become dirty data in smaller and smaller shares as the cache fills; a queue decides",
    );
    let mut chart = Chart::new(&mut picture, 40.0, 110.0, (0.0, 100.0), (0.0, 100.0));
    chart.axes(
        &[(0.0, "0"), (soft, "cutoff_writeback"), (hard, "cutoff_writeback_sync"), (100.0, "100 %")],
        &[(0.0, "0"), (50.0, "50 %"), (100.0, "100 %")],
    );
    chart.area(&by_cost, BLUE);
    chart.stroke(&by_cost, BLUE, 2.0, "");
    chart.stroke(&[(0.0, 98.0), (soft, 98.0), (soft, 0.0)], ORANGE, 1.5, "6 4");
    chart.stroke(&[(soft, 98.0), (hard, 98.0), (hard, 0.0)], PURPLE, 1.5, "2 3");
    chart.note((2.0, 60.0), BLUE, "admission=cost");
    chart.note((soft + 1.0, 30.0), ORANGE, "admission=kernel");
    chart.note((soft + 1.0, 60.0), PURPLE, "kernel, synchronous");
    picture.text(
        LEFT,
        24.0,
        "start",
        "",
        "Share of writes that become dirty data, by the share of buckets in use",
    );

    let (mut ssd, disk) = (CostModel::new(Costs::usual(false)), CostModel::new(Costs::usual(true)));
    let block = Sectors(8);
    let (mut cache, mut backing) = (Vec::new(), Vec::new());
    for queued in 0..96u64 {
        let ms = |time: Nanos| time.0 as f64 / 1e6;
        cache.push((queued as f64, ms(ssd.answer_time(block))));
        backing.push((queued as f64, ms(disk.answer_time(block))));
        let _under_way = ssd.begin(Sector(queued * 1000), block, Nanos(0));
    }
    let crossing = cache.iter().zip(&backing).find(|(c, b)| c.1 > b.1).map(|(c, _)| *c).unwrap();
    let mut chart = Chart::new(&mut picture, 230.0, 130.0, (0.0, 95.0), (0.0, 12.0));
    chart.axes(
        &[(0.0, "0"), (24.0, "24"), (48.0, "48"), (72.0, "72"), (95.0, "requests queued")],
        &[(0.0, "0"), (4.0, "4 ms"), (8.0, "8 ms"), (12.0, "12 ms")],
    );
    chart.stroke(&backing, ORANGE, 2.0, "");
    chart.stroke(&cache, BLUE, 2.0, "");
    chart.dot(crossing, GREEN);
    chart.note((2.0, 7.1), ORANGE, "a disk with nothing to do");
    chart.note((50.0, 3.0), BLUE, "a cache device with a queue");
    chart.note((crossing.0 - 20.0, crossing.1 + 2.2), GREEN, "from here on past the cache");
    picture.text(
        LEFT,
        214.0,
        "start",
        "",
        "When a congested cache is asked: how long would each device take to answer 4 KiB?",
    );
    picture.committed("admission.svg");
}

/// When writing a gap as well is cheaper than another request.
#[test]
fn when_writeback_goes_over_a_gap() {
    let costs = Costs::usual(true);
    let ms = |time: Nanos| time.0 as f64 / 1e6;
    let request = ms(costs.per_request());
    let over =
        |kib: f64| ms(costs.transfer(sectors(kib * 2.0 + 8.0))) + ms(costs.transfer(sectors(kib * 2.0)));
    let curve: Vec<_> = (0..=80).map(|n| (f64::from(n) * 10.0, over(f64::from(n) * 10.0))).collect();
    let crossing = (0..8000).map(|n| f64::from(n) / 10.0).find(|kib| over(*kib) >= request).unwrap();
    let mut picture = Picture::new(
        302.0,
        "Neighbouring dirty extents become one request where reading and writing the gap takes less time than a request",
    );
    // Extents of a disk, and the runs they are written in.
    let extents = [
        (20.0, 14.0),
        (60.0, 10.0),
        (90.0, 26.0),
        (150.0, 10.0),
        (380.0, 16.0),
        (420.0, 10.0),
        (450.0, 20.0),
    ];
    for (runs, colour, top, label) in [
        (extents.iter().map(|(x, w)| (*x, *x + *w)).collect::<Vec<_>>(), ORANGE, 34.0, "off: 7 requests"),
        (vec![(20.0, 160.0), (380.0, 470.0)], BLUE, 70.0, "auto: 2 and 2 reads"),
    ] {
        picture.text(WIDTH - RIGHT, top + 12.0, "end", colour, label);
        for (from, to) in runs {
            writeln!(
                picture.svg,
                "<rect x=\"{:.0}\" y=\"{:.0}\" width=\"{:.0}\" height=\"24\" rx=\"3\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                LEFT + from - 3.0,
                top - 5.0,
                to - from + 6.0
            )
            .unwrap();
        }
        for (x, w) in extents {
            writeln!(
                picture.svg,
                "<rect x=\"{:.0}\" y=\"{top:.0}\" width=\"{w:.0}\" height=\"14\" fill=\"{GREY}\"/>",
                LEFT + x
            )
            .unwrap();
        }
    }
    picture.text(
        LEFT,
        18.0,
        "start",
        "",
        "Dirty extents by their place on the disk, and the requests that write them back",
    );
    let mut chart = Chart::new(&mut picture, 120.0, 150.0, (0.0, 800.0), (0.0, 12.0));
    chart.axes(
        &[(0.0, "0"), (200.0, "200"), (400.0, "400"), (600.0, "600"), (800.0, "gap, KiB")],
        &[(0.0, "0"), (4.0, "4 ms"), (8.0, "8 ms"), (12.0, "12 ms")],
    );
    chart.stroke(&[(0.0, request), (800.0, request)], ORANGE, 2.0, "");
    chart.stroke(&curve, BLUE, 2.0, "");
    chart.dot((crossing, request), GREEN);
    chart.note((8.0, request + 0.5), ORANGE, "another request");
    chart.note((160.0, 1.0), BLUE, "reading the gap and writing it again");
    chart.note((crossing - 130.0, request + 2.2), GREEN, "longer gaps end a run");
    picture.text(LEFT, 336.0, "start", "", "than a millisecond is never bridged.");
    picture.committed("bridging.svg");
}
