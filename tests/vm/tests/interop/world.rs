//! The state and settings that the tests share.

pub use ubcache_vm::bcache::Served;
pub use ubcache_vm::load::stamp::FOREIGN;
pub use ubcache_vm::{Dir, Disk, Kernel, Model, Plan, Power, Set, Vm};

/// Most caches: 1024 buckets of 64 KiB. Fewer than 513 a kernel does not take.
pub const CACHE_BYTES: u64 = 64 << 20;
/// Most backing devices.
pub const BACKING_BYTES: u64 = 48 << 20;
/// Where data begins if nothing else is said.
pub const DATA_OFFSET: u64 = 16;
/// Options of ours for what the kernel's tool does in a guest with `-b 64k --writeback`.
pub const USUAL: &[&str] = &["--bucket", "64k", "--block", "512", "--writeback"];
/// Options that turn writeback off and put all writes into the cache: on a busy host the cache device would count as congested
/// at times, and writes would bypass it.
pub const WRITEBACK_OFF: &[&str] = &[
    "--set",
    "writeback_running=0",
    "--set",
    "congested_read_threshold_us=0",
    "--set",
    "congested_write_threshold_us=0",
];

/// The model of a new cached device.
pub fn model(tag: u32, backing_bytes: u64) -> Model {
    Model::new(tag, backing_bytes / 512 - DATA_OFFSET)
}

/// A cache and a backing device, and the model of what they hold together.
pub struct World {
    pub cache: Disk,
    pub backing: Disk,
    pub model: Model,
    pub dir: Dir,
    /// Blocks of the cached device.
    pub block_sectors: u32,
}

impl World {
    /// Empty devices.
    pub fn new() -> World {
        World::with_cache(CACHE_BYTES)
    }

    /// Empty devices, with a cache of this size.
    pub fn with_cache(bytes: u64) -> World {
        let dir = Dir::new();
        let (cache, backing) = (dir.disk("cache", bytes), dir.disk("backing", BACKING_BYTES));
        World { cache, backing, model: model(1, BACKING_BYTES), dir, block_sectors: 1 }
    }

    /// Devices that ubcache has formatted in the usual way.
    pub fn made() -> World {
        let w = World::new();
        w.set().make(USUAL);
        w
    }

    /// Devices that ubcache has formatted, on disks with volatile caches.
    pub fn volatile(power: &Power) -> World {
        let mut w = World::made();
        w.cache = w.cache.volatile(power);
        w.backing = w.backing.volatile(power);
        w
    }

    pub fn set(&self) -> Set<'_> {
        Set::new(&self.dir, &self.cache, &[&self.backing])
    }

    /// A machine that has both registered.
    #[track_caller]
    pub fn kernel(&self, label: &str) -> Kernel {
        let mut kernel = Kernel::boot(label, &[&self.cache, &self.backing]);
        kernel.register(&[&self.cache, &self.backing]);
        kernel
    }

    /// The next load.
    pub fn plan(&self, seed: u64) -> Plan {
        Plan { block_sectors: self.block_sectors, ..self.model.plan(seed) }
    }

    /// The images are sound and hold what they must.
    #[track_caller]
    pub fn check(&mut self) {
        self.set().check();
        let extracted = self.set().extract(0, self.model.tag);
        self.model.judge(&extracted, "extract");
    }

    /// We take over, find everything, run a load, and stop.
    #[track_caller]
    pub fn our_turn(&mut self, seed: u64, options: &[&str]) {
        let plan = self.plan(seed);
        let up = self.set().up(1, options);
        up.judge(0, &mut self.model);
        up.load(0, &plan, &mut self.model);
        up.judge(0, &mut self.model);
        up.stop();
        self.check();
    }

    /// A kernel takes over, finds everything, runs a load, and stops.
    #[track_caller]
    pub fn kernels_turn(&mut self, label: &str, seed: u64) {
        let mut kernel = self.kernel(label);
        kernel.judge(&self.backing, &mut self.model);
        let plan = self.plan(seed);
        kernel.load(&self.backing, &plan, &mut self.model);
        kernel.judge(&self.backing, &mut self.model);
        kernel.stop();
        self.check();
    }

    /// The backing device alone has everything.
    #[track_caller]
    pub fn all_is_written_back(&mut self) {
        let offset =
            self.set().superblock(&self.backing)["backing"]["data_offset"].as_u64().expect("a number");
        let found = ubcache_vm::load::raw_map(&self.backing.path, offset, self.model.tag);
        self.model.judge(&found, "the backing device alone");
    }

    /// What the superblock of the backing device says: `none`, `clean`, `dirty`, `stale`.
    #[track_caller]
    pub fn state(&self) -> String {
        text(&self.set().superblock(&self.backing)["backing"]["state_name"])
    }
}

pub fn text(value: &serde_json::Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value}: not a text")).to_owned()
}

/// Leaves the test if the user asked for that.
macro_rules! unless_skipped {
    ($name:expr) => {
        if ubcache_vm::skipped($name) {
            return;
        }
    };
}
pub(crate) use unless_skipped;
