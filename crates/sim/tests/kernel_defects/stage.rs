//! The set that the scenarios use: one set with one backing device, and power losses at every effect of a scene.

use std::rc::Rc;

use engine::{CacheSet, SetOptions, Volume};
use format::{BackingState, CacheMode, RawSuperblock, Sector, Sectors};
use io::{Disk, Handle, Nanos, Rng, VolumeError, WriteFlags};
use sim::disk::{Retained, SimDisk};
use sim::hardware::{Hardware, Layout};
use sim::image::Image;
use sim::judge;
use sim::stamp::{Content, SECTOR, decode, fill_data};
use sim::world::{Machine, Order, Outcome, World};

/// One boot: the set is open, its only device is registered.
#[derive(Clone)]
pub struct Boot {
    pub rt: Handle,
    pub hardware: Rc<Hardware>,
    pub set: CacheSet,
    pub v: Rc<Volume>,
}

/// The devices in a new world.
pub fn new_hardware(seed: u64, layout: Layout) -> Rc<Hardware> {
    Rc::new(Hardware::new(&World::new(seed), layout))
}

/// A set with buckets of 32 KiB: many requests at once find room without waiting for buckets.
pub fn roomy(mode: CacheMode) -> Layout {
    let mut layout = Layout::small(mode);
    layout.bucket_sectors = 64;
    layout
}

/// Switches the machine on and opens the set.
pub fn boot(hardware: &Rc<Hardware>, order: Order) -> (Machine, Boot) {
    let mut m = hardware.boot(order);
    let (rt, parts) = (m.handle(), hardware.parts(&m));
    let (set, mut volumes) = m.block_on(async move { parts.open(SetOptions::default()).await.unwrap() });
    let b = Boot { rt, hardware: hardware.clone(), set, v: volumes.remove(0) };
    (m, b)
}

/// Runs a scenario without a crash.
pub fn play<F: Future<Output = ()> + 'static>(layout: Layout, script: impl FnOnce(Boot) -> F) {
    let hardware = new_hardware(7, layout);
    let (mut m, b) = boot(&hardware, Order::Fifo);
    m.block_on(script(b.clone()));
    b.end();
}

impl Boot {
    /// Stops the set in order, which writes all of the index, and opens it again.
    pub async fn restart(self) -> Boot {
        self.v.stop().await.unwrap();
        self.set.stop().await.unwrap();
        let disk = |d: &Rc<SimDisk>| Disk::new(d.clone(), self.rt.clone());
        let (cache, backing) = (disk(&self.hardware.cache), disk(&self.hardware.backings[0]));
        let set = CacheSet::open(cache, SetOptions::default()).await.unwrap();
        let v = set.register(backing).await.unwrap();
        Boot { rt: self.rt, hardware: self.hardware, set, v }
    }

    pub async fn try_write(&self, at: u64, n: u64, write: u32, fua: bool) -> Result<(), VolumeError> {
        let mut b = self.rt.pool().take(n as usize * SECTOR);
        for (i, s) in b.as_mut().chunks_mut(SECTOR).enumerate() {
            fill_data(s, 0, at + i as u64, write);
        }
        self.v.write(Sector(at), Sectors(n), b, 0, WriteFlags { fua, ..WriteFlags::default() }).await
    }

    pub async fn write(&self, at: u64, n: u64, write: u32) {
        self.try_write(at, n, write, false).await.unwrap();
    }

    pub async fn try_read(&self, at: u64, n: u64) -> Result<Vec<Content>, VolumeError> {
        let b = self.rt.pool().take(n as usize * SECTOR);
        let (b, r) = self.v.read(Sector(at), Sectors(n), b, 0).await;
        r.map(|()| b.as_slice().chunks(SECTOR).map(decode).collect())
    }

    /// The numbers of the writes that the sectors come from; anything but a sector's own data fails.
    pub async fn versions(&self, at: u64, n: u64) -> Vec<u32> {
        versions_of(at, &self.try_read(at, n).await.unwrap())
    }

    pub async fn flush(&self) {
        self.v.flush().await.unwrap();
    }

    pub async fn tune(&self, name: &str, value: &str) {
        self.v.set(name, value).await.unwrap();
    }

    pub async fn tune_set(&self, name: &str, value: &str) {
        self.set.set(name, value).await.unwrap();
    }

    pub async fn sleep_ms(&self, ms: u64) {
        self.rt.sleep(Nanos::from_ms(ms)).await;
    }

    pub fn backing(&self) -> Rc<SimDisk> {
        self.hardware.backings[0].clone()
    }

    /// The process ends where it stands; set and volumes would keep each other alive.
    pub fn end(self) {
        self.set.abandon();
    }
}

/// The writes that sectors come from.
#[track_caller]
pub fn versions_of(at: u64, contents: &[Content]) -> Vec<u32> {
    let one = |(i, c): (usize, &Content)| match *c {
        Content::Data { volume: 0, sector, write } if sector == at + i as u64 => write,
        other => panic!("sector {}: {other:?}", at + i as u64),
    };
    contents.iter().enumerate().map(one).collect()
}

/// What the backing device itself has.
pub fn on_backing(hardware: &Hardware, at: u64, n: u64) -> Vec<u32> {
    on_image(&hardware.backings[0].image(), at, n)
}

/// What an image of the backing device has.
pub fn on_image(image: &Image, at: u64, n: u64) -> Vec<u32> {
    let bytes = image.read_vec(Sector(at + 16), Sectors(n));
    versions_of(at, &bytes.chunks(SECTOR).map(decode).collect::<Vec<_>>())
}

/// The state that a superblock in an image of the backing device says.
pub fn state_of(image: &Image) -> BackingState {
    let raw = image.read_vec(Sector(8), Sectors(8));
    let raw = RawSuperblock::from_prefix(&raw).unwrap();
    raw.check_backing(image.size(), 512).unwrap().state()
}

/// What the backing device would have if the power failed now and its volatile cache were lost.
pub fn durable(disk: &SimDisk) -> Image {
    disk.medium().after_power_loss(Retained::Nothing, &mut Rng::new(1))
}

/// Whom the power fails, and what survives of what is not durable.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// Every device.
    All(Retained),
    /// The cache device only; the other one keeps everything.
    CacheOnly(Retained),
    /// The backing device only.
    BackingOnly(Retained),
}

pub const CUTS: [Cut; 4] = [
    Cut::All(Retained::Nothing),
    Cut::All(Retained::Some(4)),
    Cut::CacheOnly(Retained::Nothing),
    Cut::BackingOnly(Retained::Nothing),
];

pub fn cut(hardware: &Hardware, m: Machine, b: Boot, cut: Cut) {
    hardware.world.cut_power();
    drop(m);
    b.end();
    let (cache, backing) = match cut {
        Cut::All(k) => (Some(k), Some(k)),
        Cut::CacheOnly(k) => (Some(k), None),
        Cut::BackingOnly(k) => (None, Some(k)),
    };
    for (disk, retained) in [(&hardware.cache, cache), (&hardware.backings[0], backing)] {
        match retained {
            Some(k) => disk.power_loss(k),
            None => disk.kill(),
        }
    }
}

/// Plays `before`, which may restart the set, then cuts the power at every `step`-th effect of `scene` until the scene ends uncut; each time
/// the images must be sound, and `after` judges the set that comes back. It gets whether the scene had ended.
/// Returns the number of cuts.
pub fn at_every_effect<A, B, C>(
    layout: &Layout,
    step: u64,
    before: impl Fn(Boot) -> A,
    scene: impl Fn(Boot) -> B,
    after: impl Fn(Boot, bool) -> C,
) -> u64
where
    A: Future<Output = Boot> + 'static,
    B: Future<Output = ()> + 'static,
    C: Future<Output = ()> + 'static,
{
    let mut cuts = 0;
    for at in (0..).step_by(step as usize) {
        let how = CUTS[cuts as usize % CUTS.len()];
        let hardware = new_hardware(at / step, layout.clone());
        let order = [Order::Fifo, Order::Random, Order::Lifo][cuts as usize % 3];
        let (mut m, b) = boot(&hardware, order);
        let b = m.block_on(before(b));
        hardware.world.cut_power_at(Some(hardware.world.effects() + at));
        let task = m.handle().spawn(scene(b.clone()));
        let ended = match m.run(&task, Nanos::from_secs(600)) {
            Outcome::Done(()) => true,
            Outcome::PowerLoss => false,
            Outcome::Stuck(why) => panic!("cut at {at}: {why}"),
        };
        drop(task);
        cut(&hardware, m, b, how);
        let judged = judge::check(&hardware.cache.image(), &[hardware.backings[0].image()]);
        judged.unwrap_or_else(|e| panic!("cut {how:?} at effect {at}: {e}"));
        let (mut m, b) = boot(&hardware, Order::Fifo);
        let judged = m.handle().spawn(after(b.clone(), ended));
        m.run(&judged, Nanos::from_secs(600)).done();
        drop(m);
        b.end();
        cuts += 1;
        if ended {
            // Each way of cutting has met the end as well.
            if cuts % CUTS.len() as u64 == 0 {
                break;
            }
        }
    }
    cuts
}
