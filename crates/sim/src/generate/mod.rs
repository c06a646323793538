//! Generates a plan from a seed.
//!
//! Owns the drawing of plans. Every plan draws a random part of all possible ingredients, with random weights, so that rare
//! ingredients are common in some plans. Each ingredient is drawn on its own, so that none excludes another
//! (`tests/ingredient_pairs.rs` counts the pairs). Most plans are brief, with crash after crash on small devices, because
//! most mistakes show there. Must not know how a plan is carried out.
//!
//! `devices` draws the hardware, `settings` the settings of a boot, `mix` the weights of a plan, `requests` the requests of
//! clients, `operator` the operator actions, `faults` failures and the ends of boots, `later` and `ingredients` later
//! additions, `episodes` short sequences that only make sense together, `hung` long boots with a device that hangs.

mod devices;
mod episodes;
mod faults;
mod hung;
mod ingredients;
mod later;
mod mix;
mod operator;
mod requests;
mod settings;

use io::Rng;

use crate::hardware::Layout;
use crate::plan::{BootPlan, Cut, Plan};
use crate::world::Order;
use mix::{Lean, Mix};

/// The kind of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    /// Crash after crash on small devices.
    Brief,
    /// Some of everything.
    Common,
    /// The cache is small for the data that is written, and does not empty in time.
    Pressure,
    /// The cache is small for the data that is written, until the generations of buckets wrap around.
    Churn,
    /// The index has several levels.
    Forest,
}

impl Life {
    fn draw(rng: &mut Rng) -> Life {
        match rng.below(1000) {
            0..660 => Life::Brief,
            660..860 => Life::Common,
            860..863 => Life::Forest,
            863..866 => Life::Churn,
            _ => Life::Pressure,
        }
    }

    fn boots(self, rng: &mut Rng) -> u64 {
        match self {
            Life::Brief => 4 + rng.below(10),
            Life::Pressure | Life::Forest => 3 + rng.below(10),
            Life::Common => 1 + rng.below(6),
            Life::Churn => 1 + rng.below(4),
        }
    }
}

fn one_of<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.below(of.len() as u64) as usize]
}

/// State that all boots of a plan share.
struct Drawn {
    mix: Mix,
    layout: Layout,
    /// Sizes of the volumes in sectors.
    sizes: Vec<u64>,
    /// The boot from which every boot is copied.
    like: BootPlan,
}

impl Drawn {
    fn boot(&self, rng: &mut Rng, number: u64) -> BootPlan {
        let (mix, layout) = (&self.mix, &self.layout);
        let mut boot = self.like.clone();
        if rng.chance(1, if mix.leans { 8 } else { 3 }) {
            boot.settings = settings::draw(rng, mix.life);
        }
        if matches!(mix.life, Life::Common | Life::Brief) && rng.chance(1, 4) {
            boot.settings.cache_mode = rng.chance(2, 3).then(|| devices::mode(rng).name().to_owned());
        }
        if rng.chance(1, 5) {
            (boot.cache_speed, boot.backing_speed) = (devices::speed(rng), devices::speed(rng));
        }
        boot.alone = rng.below(100) < mix.alone_percent;
        let absent = rng.below(100) < mix.absent_percent;
        boot.absent = (0..layout.backings.len()).filter(|_| absent && rng.chance(1, 2)).collect();
        boot.faults =
            (rng.below(100) < mix.faulty_percent).then(|| mix.faults(rng, layout, self.sizes.len()));
        let (requests, effects) = mix.length(rng, number, boot.faults.as_ref());
        let script = mix.script(rng, requests, &self.sizes, &boot.absent);
        (boot.requests, boot.actions) = (script.requests, script.actions);
        mix.crash(rng, &mut boot, (effects, number == 0), &script.ends);
        boot
    }
}

impl Plan {
    /// Generates the plan of a seed. Its last boot writes all remaining data back, without faults.
    pub fn from_seed(seed: u64) -> Plan {
        let rng = &mut Rng::new(seed ^ 0x6f70_7469_6f6e_7321);
        let life = Life::draw(rng);
        let mut layout = devices::layout(rng, life);
        // Drawn from another source, so that the seeds without checksums stay as they were before there were any.
        layout.checksums = Rng::new(seed ^ 0x6368_6563_6b73_756d).chance(1, 3);
        let mut mix = Mix::draw(rng, life, &layout);
        let leanings = Lean::draw(rng, life);
        let mut settings = settings::draw(rng, life);
        for lean in &leanings {
            mix.lean(rng, *lean, &mut layout);
            settings::lean(rng, *lean, &mut settings);
        }
        let flash_sectors = devices::flash(rng, life, &layout);
        let mut sizes: Vec<u64> =
            layout.backings.iter().map(|b| b.data_sectors / b.block_sectors * b.block_sectors).collect();
        if flash_sectors > 0 {
            sizes.push(flash_sectors);
        }
        let like = BootPlan {
            cache_speed: devices::speed(rng),
            backing_speed: devices::speed(rng),
            settings,
            alone: false,
            absent: Vec::new(),
            faults: None,
            read_back_percent: mix.read_back_percent,
            requests: Vec::new(),
            actions: Vec::new(),
            drain: false,
            stops_set_alone: false,
            crash: None,
            crash_in_durable_write: None,
            aim: None,
            cut: Cut::Kill,
            cut_with_faults: false,
            late: None,
            older: None,
            substitute: None,
            off_seconds: 0,
        };
        let drawn = Drawn { mix, layout, sizes, like };
        let boots = life.boots(rng);
        let mut plan = Plan {
            seed,
            flash_sectors,
            order: one_of(rng, &[Order::Fifo, Order::Lifo, Order::Random, Order::Random]),
            depth: drawn.mix.requests.depth,
            kernel_boots: 0,
            first_gen: if rng.chance(1, 5) { one_of(rng, &[250, 254, 255]) } else { 0 },
            crash_log: drawn.mix.crash_log,
            lying: None,
            boots: (0..boots).map(|n| drawn.boot(rng, n)).collect(),
            layout: drawn.layout.clone(),
        };
        episodes::add(&mut plan, &mut Rng::new(seed ^ 0x6570_6973_6f64_6573), life);
        plan.finish(rng, &drawn, &leanings);
        plan
    }

    /// Adds the last boots, and makes the later additions, each from a random source of its own.
    fn finish(&mut self, rng: &mut Rng, drawn: &Drawn, leanings: &[Lean]) {
        let boots = self.boots.len();
        self.end_well(rng, drawn);
        let source = |number: u64| Rng::new(self.seed ^ number);
        let (mut later, mut scrubs) = (source(0x6c61_7465_7220_6f6e), source(0x7363_7275_6200_6f6e));
        let (mut ingredients, mut hung) = (source(0x6e65_7720_6261_6421), source(0x6861_6e67_2072_696e));
        later::add(self, &mut later, leanings);
        later::scrubs(self, &mut scrubs);
        ingredients::add(self, boots, &mut ingredients, leanings);
        hung::add(self, boots, &mut hung, &drawn.sizes);
    }

    /// Adds the last boots, which have no faults, so every operation has to succeed.
    fn end_well(&mut self, rng: &mut Rng, drawn: &Drawn) {
        let cut = drawn.mix.cut(rng);
        let mut last = BootPlan { read_back_percent: 100, cut, ..drawn.like.clone() };
        let drains: &[bool] = if rng.chance(1, 2) { &[true] } else { &[true, false, true] };
        for drain in drains {
            last.drain = *drain;
            last.requests = drawn.mix.script(rng, 10, &drawn.sizes, &[]).requests;
            self.boots.push(last.clone());
        }
    }
}
