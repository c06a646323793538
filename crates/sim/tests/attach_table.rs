//! The decision table of registration: what the backing superblock says × whose set it names × what the cache has of
//! the device × what became of the journal. Every combination has exactly one row, and the engine does what it says.
#![allow(clippy::unwrap_used)]

use std::rc::Rc;

use engine::{DeviceRefusal, EngineError, Refusal, SetOptions, Volume};
use format::{BackingState, CacheMode, RawSuperblock, Sector, Sectors, Uuid};
use io::{Completer, Device, DeviceInfo, Disk, Request};
use sim::disk::{Retained, SimDisk};
use sim::hardware::{Layout, SET_UUID};
use sim::scenario::{Boot, Scenario};
use sim::stamp::Content;

/// Whom the superblock names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Named {
    Nobody,
    Us,
    Another,
}

/// What the cache has of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Slot {
    /// No slot: it never saw the device.
    Absent,
    /// An invalid slot.
    Invalid,
    /// A slot, and a clean copy.
    Clean,
    /// A slot, and dirty data in leaves.
    Dirty,
    /// A slot, and dirty data whose keys are in the journal alone.
    DirtyInJournal,
}

/// What the engine must do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Row {
    /// It is part of another set.
    RefuseOther,
    /// It has dirty data somewhere, and not here.
    RefuseUnknownDirty,
    /// It comes up with what the cache has of it.
    Known,
    /// It comes up empty; what the cache had is invalid.
    Fresh,
}

const STATES: [BackingState; 4] =
    [BackingState::None, BackingState::Clean, BackingState::Dirty, BackingState::Stale];
const NAMED: [Named; 3] = [Named::Nobody, Named::Us, Named::Another];
const SLOTS: [Slot; 5] = [Slot::Absent, Slot::Invalid, Slot::Clean, Slot::Dirty, Slot::DirtyInJournal];

/// The table: the first row that fits.
fn row(state: BackingState, named: Named, slot: Slot) -> Row {
    let attached = matches!(state, BackingState::Clean | BackingState::Dirty);
    let live = !matches!(slot, Slot::Absent | Slot::Invalid);
    match () {
        () if attached && named != Named::Us => Row::RefuseOther,
        () if !attached => Row::Fresh,
        () if live => Row::Known,
        () if state == BackingState::Dirty => Row::RefuseUnknownDirty,
        () => Row::Fresh,
    }
}

/// A set as it is after a crash, with this in it; nothing has been done to the superblock yet.
fn prepared(slot: Slot) -> Scenario {
    let mut scenario = Scenario::new(3, Layout::small(CacheMode::Writeback), 0);
    scenario.boot(move |b| async move {
        if slot == Slot::Absent {
            // The set exists, the device has never met it.
            engine::CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
            return;
        }
        b.open().await;
        b.stay_dirty(0).await;
        match slot {
            Slot::Dirty | Slot::DirtyInJournal => {
                assert!(b.clients[0].write(0, 16, true).await);
            }
            _ => assert!(b.clients[0].read(0, 16).await.is_some()),
        }
        if slot != Slot::DirtyInJournal {
            // By now the leaf is written.
            b.sleep_ms(90_000).await;
        }
        if slot == Slot::Invalid {
            b.set().detach(&b.volume(0)).await.unwrap();
        }
    });
    scenario.power_loss(Retained::Nothing);
    scenario
}

fn say(b: &Boot, state: BackingState, named: Named) {
    let image = b.backings[0].image();
    let bytes = image.read_vec(Sector(8), Sectors(8));
    let mut sb = RawSuperblock::from_prefix(&bytes).unwrap().check_backing(image.size(), 512).unwrap();
    sb.set_state(state);
    sb.set_set_uuid(match named {
        Named::Nobody => Uuid::NIL,
        Named::Us => SET_UUID,
        Named::Another => Uuid([9; 16]),
    });
    b.backings[0].put(Sector(8), &sb.encode());
}

/// Which write the first sector comes from, past every judge: some combinations cannot come about, and lose data.
async fn first_sector(b: &Boot, volume: &std::rc::Rc<Volume>) -> u32 {
    let (buffer, result) = volume.read(Sector(0), Sectors(1), b.rt.pool().take(512), 0).await;
    result.unwrap();
    match sim::stamp::decode(&buffer.as_slice()[..512]) {
        Content::Data { volume: 0, sector: 0, write } => write,
        other => panic!("sector 0 holds {other:?}"),
    }
}

#[test]
fn every_combination_has_its_row() {
    let mut rows = Vec::new();
    for slot in SLOTS {
        for (state, named) in STATES.iter().flat_map(|s| NAMED.map(|n| (*s, n))) {
            let expected = row(state, named, slot);
            rows.push(expected);
            prepared(slot).boot(move |b| async move {
                say(&b, state, named);
                let case = format!("{state:?}, names {named:?}, slot {slot:?}");
                let set = engine::CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
                let result = set.register(b.parts.backings[0].clone()).await;
                let found = match &result {
                    Ok(_) if expected == Row::Known => Row::Known,
                    Ok(_) => Row::Fresh,
                    Err(e) if e.to_string().contains("attached to cache set") => Row::RefuseOther,
                    Err(e) if e.to_string().contains("does not know") => Row::RefuseUnknownDirty,
                    Err(e) => panic!("{case}: {e}"),
                };
                assert_eq!(found, expected, "{case}");
                let Ok(volume) = result else {
                    let image = b.backings[0].image();
                    let bytes = image.read_vec(Sector(8), Sectors(8));
                    let sb =
                        RawSuperblock::from_prefix(&bytes).unwrap().check_backing(image.size(), 512).unwrap();
                    assert_eq!(sb.state(), state, "{case}: refused, but the superblock changed");
                    return;
                };
                let dirty = matches!(slot, Slot::Dirty | Slot::DirtyInJournal);
                let newest = u32::from(expected == Row::Known && dirty);
                assert_eq!(first_sector(&b, &volume).await, newest, "{case}");
                assert_eq!(volume.dirty_sectors(), Sectors(16 * u64::from(newest)), "{case}");
                let says = volume.state().unwrap();
                match newest {
                    1 => assert_eq!(says, BackingState::Dirty, "{case}"),
                    // Nothing is dirty: whether writeback has found that out yet does not matter.
                    _ if expected == Row::Known && state == BackingState::Dirty => {
                        assert!(matches!(says, BackingState::Dirty | BackingState::Clean), "{case}");
                    }
                    _ => assert_eq!(says, BackingState::Clean, "{case}"),
                }
            });
        }
    }
    for r in [Row::RefuseOther, Row::RefuseUnknownDirty, Row::Known, Row::Fresh] {
        assert!(rows.contains(&r), "no combination for {r:?}");
    }
    assert_eq!(rows.len(), STATES.len() * NAMED.len() * SLOTS.len());
}

/// The same device without the cache: it is served alone, or refused, by what it says alone.
#[test]
fn alone_every_state_has_its_row() {
    for (state, named) in STATES.iter().flat_map(|s| NAMED.map(|n| (*s, n))) {
        for slot in SLOTS {
            prepared(slot).boot(move |b| async move {
                say(&b, state, named);
                let result = Volume::pass_through(b.parts.backings[0].clone(), false).await;
                let says = match state {
                    BackingState::Dirty => {
                        assert!(result.map(drop).unwrap_err().to_string().contains("dirty data"));
                        return;
                    }
                    BackingState::None => BackingState::None,
                    BackingState::Clean | BackingState::Stale => BackingState::Stale,
                };
                assert_eq!(result.unwrap().state(), Some(says), "{state:?}, names {named:?}");
            });
        }
    }
}

/// Two registrations of one device that come at the same time: each had looked whether the device is there before the other
/// one had put it there, and it was served twice, by volumes that knew nothing of each other's requests.
#[test]
fn of_two_registrations_at_once_one_is_refused() {
    Scenario::new(1, Layout::small(CacheMode::Writeback), 0).boot(|b| async move {
        b.open().await;
        b.set().detach(&b.volume(0)).await.unwrap();
        let register = || {
            let (set, disk) = (b.set(), b.parts.backings[0].clone());
            b.rt.spawn(async move { set.register(disk).await.map(drop) })
        };
        let both = [register(), register()];
        let mut refused = Vec::new();
        for one in both {
            refused.extend(one.await.err().map(|e| e.to_string()));
        }
        assert!(matches!(&refused[..], [why] if why.contains("attached")), "{refused:?}");
    });
}

/// A device that says that it is larger than it is.
struct Enlarged {
    disk: Rc<SimDisk>,
    info: DeviceInfo,
}

impl Device for Enlarged {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&self, request: Request, completer: Completer) {
        self.disk.submit(request, completer);
    }
}

/// The keys of the index cannot name an end beyond 2^47 - 1 sectors. A write there asserted in the index.
#[test]
fn a_device_that_is_too_large_for_the_index_is_refused() {
    const MOST: u64 = (1 << 47) - 1;
    for (sectors, fits) in [(MOST, true), (MOST + 1, false), (1 << 50, false)] {
        Scenario::new(1, Layout::small(CacheMode::Writeback), 0).boot(move |b| async move {
            let set = engine::CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
            let before = b.backings[0].image().read_vec(Sector(8), Sectors(8));
            let info = DeviceInfo { sectors: Sectors(sectors), ..b.backings[0].info().clone() };
            let disk = Disk::new(Rc::new(Enlarged { disk: b.backings[0].clone(), info }), b.rt.clone());
            let result = set.register(disk).await;
            if fits {
                assert_eq!(result.unwrap().state(), Some(BackingState::Clean));
                return;
            }
            let Err(EngineError::Refused(refusal)) = result else { panic!("{sectors} sectors are accepted") };
            let Refusal::Device { why: DeviceRefusal::TooLarge { most }, .. } = &*refusal else {
                panic!("{refusal}")
            };
            assert_eq!(most.0, MOST);
            let after = b.backings[0].image().read_vec(Sector(8), Sectors(8));
            assert_eq!(before, after, "refused, but the superblock changed");
        });
    }
}

/// A disk with the UUID of a flash-only volume took the slot of the volume: both had one range of keys.
#[test]
fn a_device_with_the_uuid_of_a_flash_only_volume_is_refused() {
    Scenario::new(1, Layout::small(CacheMode::Writeback), 0).boot(|b| async move {
        let set = engine::CacheSet::open(b.parts.cache.clone(), SetOptions::default()).await.unwrap();
        let superblock = || b.backings[0].image().read_vec(Sector(8), Sectors(8));
        let before = superblock();
        let raw = RawSuperblock::from_prefix(&before).unwrap();
        let uuid = raw.check_backing(b.backings[0].info().sectors, 512).unwrap().uuid();
        let volume = set.create_volume(uuid, Sectors(64), "flash").await.unwrap();
        let refused = set.register(b.parts.backings[0].clone()).await.map(drop).unwrap_err();
        assert!(refused.to_string().contains("which a flash-only volume of set"), "{refused}");
        assert_eq!(before, superblock(), "refused, but the superblock changed");
        assert_eq!(set.slot(volume.inode().unwrap()).map(|(of, _)| of), Some(uuid));
    });
}
