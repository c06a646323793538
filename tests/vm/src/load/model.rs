//! The expected contents of a volume.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::ops::Range;

use super::plan::{Op, Plan};
use super::stamp::{self, FOREIGN, SECTOR};

/// The versions that the sectors of a volume hold.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Map {
    /// By sector; [`FOREIGN`] for what is no write of this volume to this sector.
    pub versions: Vec<u32>,
    /// The first bytes of some foreign sectors, for messages.
    pub foreign: BTreeMap<u64, Vec<u8>>,
}

impl Map {
    /// Takes in whole sectors, which must follow those before.
    pub fn add(&mut self, first: u64, bytes: &[u8], tag: u32) {
        for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR)) {
            let version = stamp::version(bytes, sector, tag);
            if version == FOREIGN && self.foreign.len() < 8 {
                self.foreign.insert(sector, bytes.iter().take(16).copied().collect());
            }
            self.versions.push(version);
        }
    }

    /// Of the bytes of a whole volume.
    pub fn of(bytes: &[u8], tag: u32) -> Map {
        let mut map = Map::default();
        map.add(0, bytes, tag);
        map
    }

    /// As the program in the guest sends it: a u32 for each sector, little-endian.
    pub fn from_bytes(bytes: &[u8]) -> Map {
        let versions = bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        Map { versions, foreign: BTreeMap::new() }
    }

    /// The reverse of [`Map::from_bytes`].
    pub fn to_bytes(&self) -> Vec<u8> {
        self.versions.iter().flat_map(|v| v.to_le_bytes()).collect()
    }
}

/// The contents that a volume must have, or after a crash may have.
#[derive(Clone, Debug)]
pub struct Model {
    /// The number of the volume.
    pub tag: u32,
    certain: Vec<u32>,
    /// By sector: versions after the certain one, of writes that the power loss interrupted.
    later: BTreeMap<u64, Vec<u32>>,
    /// By sector: versions that the kernel may show after its crash; see [`Model::kernel_interrupted`].
    open: BTreeMap<u64, Vec<u32>>,
    /// Sectors that may have any contents; see [`Model::kernel_forgot`].
    anything: BTreeSet<u64>,
    last_version: u32,
}

impl Model {
    /// A volume of zeros.
    pub fn new(tag: u32, sectors: u64) -> Model {
        Model {
            tag,
            certain: vec![0; sectors as usize],
            later: BTreeMap::new(),
            open: BTreeMap::new(),
            anything: BTreeSet::new(),
            last_version: 0,
        }
    }

    /// Number of sectors of the volume.
    pub fn sectors(&self) -> u64 {
        self.certain.len() as u64
    }

    /// A load for this volume, with versions that no load had before.
    pub fn plan(&self, seed: u64) -> Plan {
        Plan { after_version: self.last_version, ..Plan::random(seed, self.tag, self.sectors()) }
    }

    /// Records that a range was written or discarded completely, by no load.
    pub fn put(&mut self, range: Range<u64>, version: u32) {
        for sector in range {
            self.set(sector, version);
        }
        self.last_version = self.last_version.max(version);
    }

    fn set(&mut self, sector: u64, version: u32) {
        self.later.remove(&sector);
        self.open.remove(&sector);
        self.anything.remove(&sector);
        if let Some(v) = self.certain.get_mut(sector as usize) {
            *v = version;
        }
    }

    /// Records a load that ran to its end.
    pub fn ran(&mut self, plan: &Plan) {
        let all = vec![plan.ops; plan.workers as usize];
        self.interrupted(plan, &all);
    }

    /// A load that was interrupted. `flushed`: for each worker how many of its requests are covered by a flush that
    /// was reported. What it wrote later may be there or not, sector by sector; it can have come no further than to
    /// the second flush after that one, as each report arrives before the next request is made.
    pub fn interrupted(&mut self, plan: &Plan, flushed: &[u32]) {
        assert_eq!((plan.tag, plan.sectors), (self.tag, self.sectors()), "a load for another volume");
        for (worker, flushed) in (0..plan.workers).zip(flushed) {
            let mut flushes = 0;
            for index in 0..plan.ops {
                let (start, sectors, version) = match plan.op(worker, index) {
                    Op::Write { start, sectors, version } => (start, sectors, version),
                    Op::Flush if index > *flushed => {
                        flushes += 1;
                        if flushes == 2 {
                            break;
                        }
                        continue;
                    }
                    Op::Flush | Op::Read { .. } => continue,
                };
                for sector in start..start + u64::from(sectors) {
                    if index < *flushed {
                        self.set(sector, version);
                    } else {
                        self.later.entry(sector).or_default().push(version);
                    }
                }
            }
        }
        self.last_version = self.last_version.max(plan.last_version());
    }

    /// A load that a crash of the kernel interrupted. Its bypassed writes can be on the backing device with an older copy in
    /// the cache, or the reverse, and neither device says which is right: such a sector may change until it is written
    /// again (docs/compat.md, item 5).
    pub fn kernel_interrupted(&mut self, plan: &Plan, flushed: &[u32]) {
        self.interrupted(plan, flushed);
        for (sector, mut versions) in std::mem::take(&mut self.later) {
            let open = self.open.entry(sector).or_default();
            open.append(&mut versions);
        }
    }

    /// A load that a power loss interrupted, on disks that lose unflushed data, served by the kernel. The kernel writes a node
    /// of its index while the data that its keys name is not durable (docs/compat.md, item 4). A sector that the load wrote
    /// after the last flush may have what was in that place of the cache before, until it is written again. The node is
    /// written thirty seconds after its first key, so only a load on a busy machine lasts long enough.
    pub fn kernel_forgot(&mut self, plan: &Plan, flushed: &[u32]) {
        self.kernel_interrupted(plan, flushed);
        self.anything.extend(self.open.keys());
    }

    /// Sectors whose contents a crash left open.
    pub fn open_sectors(&self) -> usize {
        self.later.len() + self.open.len()
    }

    /// Compares every sector. What a crash left open is certain from now on: it must not change any more.
    ///
    /// # Panics
    /// If anything is wrong; the message shows the first sectors.
    #[track_caller]
    pub fn judge(&mut self, found: &Map, what: &str) {
        assert_eq!(found.versions.len(), self.certain.len(), "{what}: size in sectors");
        let later = std::mem::take(&mut self.later);
        let mut wrong = Vec::new();
        for ((sector, found), certain) in (0..).zip(&found.versions).zip(&mut self.certain) {
            if found == certain {
                continue;
            }
            let allowed = later.get(&sector).map_or(&[][..], Vec::as_slice);
            if self.open.get(&sector).is_some_and(|open| open.contains(found))
                || self.anything.contains(&sector)
            {
                continue;
            }
            if allowed.contains(found) {
                *certain = *found;
            } else {
                wrong.push((sector, *certain, allowed, *found));
            }
        }
        if wrong.is_empty() {
            return;
        }
        let mut message = format!("{what}: {} of {} sectors are wrong", wrong.len(), self.certain.len());
        for (sector, certain, allowed, is) in wrong.iter().take(12) {
            let bytes = found.foreign.get(sector).map(|b| format!(" {b:02x?}")).unwrap_or_default();
            let is = if *is == FOREIGN { "foreign bytes".into() } else { format!("version {is}") };
            let _ = write!(
                message,
                "\n  sector {sector}: expected version {certain} or of {allowed:?}, found {is}{bytes}"
            );
        }
        panic!("{message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map_of(model: &Model) -> Map {
        Map { versions: model.certain.clone(), foreign: BTreeMap::new() }
    }

    #[test]
    fn a_crash_of_the_kernel_leaves_it_open_until_the_next_write() {
        let mut model = Model::new(1, 4096);
        let before = map_of(&model);
        let plan = model.plan(1);
        model.kernel_interrupted(&plan, &[0; 4]);
        let (&sector, versions) = model.open.iter().next().unwrap();
        let mut after = before.clone();
        after.versions[sector as usize] = versions[0];
        for map in [&after, &before, &after] {
            model.judge(map, "either is right");
        }
        model.put(0..4096, 0);
        assert!(std::panic::catch_unwind(move || model.judge(&after, "written since")).is_err());
    }

    #[test]
    fn a_kernel_on_disks_that_forget_leaves_anything_where_nothing_was_flushed() {
        let mut model = Model::new(1, 4096);
        let plan = model.plan(1);
        let flushed = [100; 4];
        model.kernel_forgot(&plan, &flushed);
        let mut found = map_of(&model);
        let (&open, _) = model.open.iter().next().unwrap();
        let settled =
            (0..4096).find(|s| !model.open.contains_key(s) && found.versions[*s as usize] > 0).unwrap();
        found.versions[open as usize] = FOREIGN;
        model.judge(&found, "what was on its way");
        found.versions[settled as usize] = 0;
        let mut strict = model.clone();
        assert!(std::panic::catch_unwind(move || strict.judge(&found, "what was flushed")).is_err());
        model.put(0..4096, 0);
        let mut found = map_of(&model);
        found.versions[open as usize] = FOREIGN;
        assert!(std::panic::catch_unwind(move || model.judge(&found, "written since")).is_err());
    }

    #[test]
    fn a_crash_leaves_open_what_was_not_flushed() {
        let mut model = Model::new(1, 4096);
        let first = model.plan(1);
        model.ran(&first);
        let before = map_of(&model);
        model.judge(&before.clone(), "nothing happened");
        let second = model.plan(2);
        assert_eq!(second.after_version, first.last_version());
        model.interrupted(&second, &[0; 4]);
        assert!(model.open_sectors() > 0);
        let mut all = model.clone();
        all.judge(&before, "nothing arrived");
        // The first write of the load arrived.
        let (start, version) = (0..second.ops)
            .find_map(|i| match second.op(0, i) {
                Op::Write { start, version, .. } => Some((start, version)),
                _ => None,
            })
            .unwrap();
        let mut after = before.clone();
        after.versions[start as usize] = version;
        model.judge(&after, "one sector of one write arrived");
        let changed = std::panic::catch_unwind(move || model.judge(&before, "it went away again"));
        assert!(changed.is_err());
    }
}
