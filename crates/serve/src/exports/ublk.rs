//! `--export ublk[=N]`: every volume is a block device of the kernel.
//!
//! Owns the identities of the devices, by which a later process recovers them. Must not know the ublk driver.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::rc::Rc;

use blockio::Driver;
use engine::{Volume, VolumeRef};
use export_ublk::{Identities, Identity, Left, Options, Shape, Ublk as Devices, UblkError, left_behind};
use io::sync::{Event, select};
use io::{Handle, Nanos};

use super::spec::SpecError;
use super::{Context, Export, Kind, NbdAccess, Occupied, Opens, Place, SaidBy, Spec, Way, WayKind, Work};
use crate::failure::{Failure, failed};
use crate::pressure::{self, DeviceBuffers};
use crate::{message, ram};

/// Time between two attempts to stop a volume that is in use.
const AGAIN: Nanos = Nanos::from_ms(500);

/// Number of slots of flash-only volumes whose devices are searched when the set is not open.
const SLOTS: u32 = 64;

/// Device numbers of the ublk driver are below 2^20; this leaves room for the numbers of further volumes.
const MAX_NUMBER: u32 = (1 << 20) - 1024;

pub(super) const KIND: Kind = Kind {
    name: "ublk",
    forms: &[
        ("ublk", "Each volume is a block device of the kernel, `/dev/ublkbN`."),
        ("ublk=NUMBER", "Each volume is a block device of the kernel; the first one is `/dev/ublkbNUMBER`."),
    ],
    ways: &[&WAY],
    parse,
    #[cfg(test)]
    example: |_| obstacle().map_or_else(|| Ok("ublk".into()), |why| Err(why.to_string())),
};

static WAY: WayKind = WayKind { name: "ublk", opens: Opens::BlockDevice { prefix: "ublkb" } };

failed!(UblkError);

/// The option has no number of a block device.
#[derive(Debug, thiserror::Error)]
#[error("{found}: expected a device number below {most}")]
struct NumberError {
    /// The text in the place of the number.
    found: String,
    /// All numbers are below this one.
    most: u32,
    /// The reason if it is no number at all.
    source: Option<std::num::ParseIntError>,
}

fn parse(text: &str) -> Option<Result<Spec, SpecError>> {
    if text == "ublk" {
        return Some(Ok(Spec::new(Number(None))));
    }
    let number = text.strip_prefix("ublk=")?;
    Some(match number.parse() {
        Ok(number) if number < MAX_NUMBER => Ok(Spec::new(Number(Some(number)))),
        other => {
            let (found, source) = (number.to_owned(), other.err());
            Err(SpecError::place(NumberError { found, most: MAX_NUMBER, source }))
        }
    })
}

/// Block devices of the ublk driver, with the number of the first one if the operator has named it.
#[derive(Debug)]
struct Number(Option<u32>);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("ublk"),
            Some(number) => write!(f, "ublk={number}"),
        }
    }
}

impl Place for Number {
    fn start<'a>(&'a self, context: &'a Context<'_>) -> Work<'a, Result<Box<dyn Export>, Failure>> {
        Box::pin(async { Ok(Box::new(start(self.0, context).await?) as Box<dyn Export>) })
    }

    fn check(&self, _: &NbdAccess) -> Result<(), Failure> {
        obstacle().map_or(Ok(()), |why| Err(why.into()))
    }

    fn overlaps(&self, other: &dyn Place) -> bool {
        let other = (other as &dyn Any).downcast_ref::<Number>();
        self.0.is_some() && other.is_some_and(|other| self.0 == other.0)
    }

    fn recovers(&self) -> bool {
        true
    }
}

/// The served ublk devices.
pub(super) struct Ublk {
    devices: Devices<VolumeRef>,
    rt: Handle,
    _buffers: Option<DeviceBuffers>,
}

/// Why the host cannot offer block devices this way; `None` if it can.
pub(crate) fn obstacle() -> Option<UblkError> {
    export_ublk::obstacle()
}

/// The identities of a volume's ublk device. `id` is that of the set.
fn identities(id: &str, volume: &Volume) -> Identities {
    match (volume.backing_uuid(), volume.inode()) {
        (Some(uuid), _) => of_backing(id, &uuid.to_string()),
        (None, inode) => of_slot(id, inode.map_or(0, |i| i.0)).into(),
    }
}

/// The identities of the device of a backing device.
///
/// The device is that of the same volume before and after an attach or a detach in use, so its identity has no set. Earlier versions
/// put the UUID of the set in front, and that of the backing device itself if it was served alone.
fn of_backing(id: &str, uuid: &str) -> Identities {
    let of = |id: &str| Identity::of(&[id.as_bytes(), b"backing", uuid.as_bytes()]);
    Identities { new: of(uuid), earlier: (id != uuid).then(|| of(id)) }
}

fn of_slot(id: &str, slot: u32) -> Identity {
    Identity::of(&[id.as_bytes(), b"slot", &slot.to_le_bytes()])
}

/// The processes that serve ublk devices of this set, without duplicates.
pub async fn servers(driver: &Driver, id: &str, backing_uuids: &[String]) -> Result<Vec<i32>, Failure> {
    let mut wanted: Vec<Identity> = backing_uuids.iter().flat_map(|u| of_backing(id, u).all()).collect();
    wanted.extend((0..SLOTS).map(|slot| of_slot(id, slot)));
    let found = driver.reactor().blocking(move || left_behind(&wanted)).await?;
    let mut pids: Vec<i32> = found.iter().filter(|l| l.alive).map(|l| l.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    Ok(pids)
}

/// Warns of ublk devices that an earlier process left and this start does not recover: their users wait.
pub(crate) async fn warn_of_left(context: &Context<'_>) {
    if !std::path::Path::new("/dev/ublk-control").exists() {
        return;
    }
    let wanted: Vec<Identity> =
        context.volumes.iter().flat_map(|v| identities(&context.id, v).all()).collect();
    let found = context.driver.reactor().blocking(move || left_behind(&wanted)).await.unwrap_or_default();
    for warning in found.iter().filter_map(not_served) {
        message::warn(warning);
    }
}

/// The warning about a device that an earlier process left; `None` if a process serves it, such as this one for another export of
/// the same volume.
fn not_served(left: &Left) -> Option<String> {
    let warning = || {
        format!(
            "/dev/ublkb{}, left behind by process {}, is not served: its users wait until it is served again \
             (--export ublk)",
            left.number, left.pid
        )
    };
    (!left.alive).then(warning)
}

/// Makes or recovers a device for each volume.
pub(crate) async fn start(number: Option<u32>, context: &Context<'_>) -> Result<Ublk, UblkError> {
    let served = |v: &Rc<Volume>| (Rc::new(VolumeRef(v.clone())), identities(&context.id, v));
    let volumes = context.volumes.iter().map(served).collect();
    let (shape, mut buffers) = match context.ublk {
        Some(shape) => (shape, None),
        None => {
            let (shape, buffers) = pressure::start_ublk();
            (shape, Some(buffers))
        }
    };
    let options = Options { number, shape };
    let devices = Devices::start(context.driver, volumes, options).await?;
    if let Some(buffers) = &mut buffers {
        buffers.set(devices.buffer_bytes());
    }
    for note in devices.notes() {
        message::note(note);
    }
    for (path, shape) in devices.beyond_memory() {
        let memory = Memory { limited: ram::is_limited_by_operator(), suffices: pressure::may_hold(shape) };
        if let Some(remedy) = remedy(shape, memory, context.nbd.said_by) {
            message::note(beyond_memory(&path, shape, &remedy));
        }
    }
    Ok(Ublk { devices, rt: context.driver.handle(), _buffers: buffers })
}

/// Why the buffers of a device are not resident.
#[derive(Clone, Copy)]
struct Memory {
    /// The operator has limited the memory of the process.
    limited: bool,
    /// The memory suffices for the buffers of this device if no other device has any.
    suffices: bool,
}

/// What an operator can change so that the buffers of a device stay resident; `None` if nothing.
fn remedy(shape: Shape, memory: Memory, said_by: SaidBy) -> Option<String> {
    let is_least = shape.buffer_bytes() <= Shape::LEAST.buffer_bytes();
    let remedies = match said_by {
        SaidBy::Options => [
            (!is_least).then_some("make it smaller (--ublk-queues, --ublk-depth)"),
            memory.limited.then_some("raise --memory-limit"),
        ],
        SaidBy::Configuration => [
            memory
                .suffices
                .then_some("give other volumes another export than ublk (`exports` in the configuration)"),
            memory.limited.then_some("raise `memory_limit` in the configuration"),
        ],
    };
    let possible: Vec<&str> = remedies.into_iter().flatten().collect();
    (!possible.is_empty()).then(|| possible.join(", or "))
}

/// The note about a device whose buffers are not resident.
fn beyond_memory(path: &Path, shape: Shape, remedy: &str) -> String {
    let Shape { queues, depth } = shape;
    format!(
        "{}: the buffers of its requests take {} MiB (queues {queues}, depth {depth}), more than the memory that may be locked for \
         ublk devices has left; if swap is on it, {remedy}",
        path.display(),
        shape.buffer_bytes() >> 20
    )
}

/// Whether another kind of export may be used after this failure.
///
/// It may not if a ublk device of the same volume exists, because a program may use that device.
pub(crate) fn may_fall_back(e: &UblkError) -> bool {
    !matches!(e, UblkError::InService { .. } | UblkError::Changed { .. } | UblkError::NotQuiet { .. })
}

impl Export for Ublk {
    fn ways(&self, volume: &str) -> Vec<Way> {
        let exports = self.devices.exports();
        let mine = exports.iter().filter(|e| e.volume == volume);
        mine.map(|e| Way { kind: &WAY, address: e.path.display().to_string() }).collect()
    }

    /// Waits while a device is in use, until force is used.
    fn stop(self: Box<Self>, force: &Force) -> Work<'_, Result<(), Failure>> {
        Box::pin(async move {
            let mut warned_of = String::new();
            while !force.is_on() {
                let Some(why) = self.devices.in_use().await else { break };
                if why != warned_of {
                    message::warn(format!(
                        "{why}: waiting until it is no longer in use; unmount it to continue"
                    ));
                    warned_of = why;
                }
                select(Box::pin(self.rt.sleep(AGAIN)), Box::pin(force.on())).await;
            }
            if force.is_on() {
                self.devices.fail_everything();
            }
            Ok(self.devices.stop().await?)
        })
    }

    fn stop_if_free(self: Box<Self>) -> Work<'static, Result<(), Occupied>> {
        Box::pin(async move {
            if let Some(why) = self.devices.in_use().await {
                return Err(Occupied { why: Failure::Failed(why), export: self });
            }
            if let Err(e) = self.devices.stop().await {
                message::warn(format!("a ublk device could not be removed in good order: {e}"));
            }
            Ok(())
        })
    }

    fn takes_force(&self) -> bool {
        true
    }

    fn can_be_handed_over(&self) -> bool {
        true
    }

    /// Leaves the devices to the next process, which recovers them.
    fn hand_over(self: Box<Self>) -> Work<'static, Option<Box<dyn Export>>> {
        Box::pin(async move {
            self.devices.hand_over().await;
            Some(self as Box<dyn Export>)
        })
    }

    fn give_up(self: Box<Self>, _force: &Force) -> Work<'_, Result<(), Failure>> {
        Box::pin(async move {
            self.devices.give_up().await;
            Ok(())
        })
    }
}

/// Tells exports that are stopping not to wait for their users.
#[derive(Default)]
pub struct Force {
    on: std::cell::Cell<bool>,
    event: Event,
}

impl Force {
    /// Ends the waits for users from now on.
    pub fn use_it(&self) {
        self.on.set(true);
        self.event.notify_all();
    }

    fn is_on(&self) -> bool {
        self.on.get()
    }

    async fn on(&self) {
        self.event.wait_until(|| self.on.get()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SET: &str = "8e4b9f0a-6f59-4a0c-8c4d-1f3a0c2b7d11";
    const DISK: &str = "0b6f2f6e-9a35-4b57-8f0e-52a3a4f0c9d2";
    const OTHER: &str = "c1d7a1c4-22a5-4a9e-9b1b-7d0f4e6a8b33";

    /// The device of a volume that was detached in use was not recovered after a crash, because its identity had the UUID of the set.
    #[test]
    fn the_device_of_a_backing_device_is_the_same_with_and_without_a_set() {
        let [alone, attached, moved] = [DISK, SET, OTHER].map(|id| of_backing(id, DISK));
        assert_eq!([alone.new, attached.new], [moved.new; 2]);
        assert_ne!(of_backing(SET, OTHER).new, attached.new, "another disk of the set");
        // Without a set, an earlier version gave the same identity; with one, it gave one for each set.
        assert_eq!(alone.earlier, None);
        assert!(attached.earlier.is_some() && attached.earlier != moved.earlier);
        assert!(attached.all().all(|identity| identity != of_slot(SET, 0) && identity != of_slot(DISK, 0)));
    }

    /// Devices outlive the process, so these numbers are part of the interface between versions.
    #[test]
    fn identities_stay_what_they_were_in_earlier_versions() {
        let shown = |identity: Identity| format!("{identity:?}");
        let attached = of_backing(SET, DISK);
        assert_eq!(shown(attached.new), "Identity(5936243635186812719)");
        assert_eq!(attached.earlier.map(shown).as_deref(), Some("Identity(1825419321235814682)"));
        assert_eq!(shown(of_slot(SET, 3)), "Identity(13285434277200509040)");
    }

    /// The daemon has none of the options that its log named, and its devices had the smallest depth already.
    #[test]
    fn the_note_about_memory_names_what_the_operator_can_change() {
        use SaidBy::{Configuration, Options};
        let shape = Shape { queues: 2, depth: 8 };
        let memory = |limited, suffices| Memory { limited, suffices };
        assert_eq!(remedy(shape, memory(false, false), Configuration), None);
        assert_eq!(remedy(Shape::LEAST, memory(false, true), Options), None);
        let of = |shape, memory, said_by| remedy(shape, memory, said_by).expect("something can be changed");
        assert_eq!(
            of(shape, memory(true, true), Configuration),
            "give other volumes another export than ublk (`exports` in the configuration), or raise `memory_limit` in the \
             configuration"
        );
        assert_eq!(of(shape, memory(false, true), Options), "make it smaller (--ublk-queues, --ublk-depth)");
        assert_eq!(of(Shape::LEAST, memory(true, true), Options), "raise --memory-limit");
        let note = beyond_memory(Path::new("/dev/ublkb9"), shape, "use another disk");
        assert!(
            note.starts_with("/dev/ublkb9: the buffers of its requests take 8 MiB (queues 2, depth 8)"),
            "{note}"
        );
        assert!(note.ends_with("if swap is on it, use another disk"), "{note}");
    }

    /// A volume with `exports = ["ublk=7", "nbd=..."]` was said to have been left behind by the process that served it.
    #[test]
    fn a_device_in_service_is_not_left_behind() {
        let left = |alive| Left { number: 7, pid: 42, alive };
        assert_eq!(not_served(&left(true)), None);
        let warning = not_served(&left(false)).expect("a warning");
        assert!(warning.contains("/dev/ublkb7, left behind by process 42, is not served"), "{warning}");
    }
}
