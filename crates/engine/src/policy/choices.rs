//! Settings with a fixed list of named values.
//!
//! Owns the order and the names of the choices, as control files list them (semantics section 16).
//! Cache modes and replacement policies are stored on disk, so their types belong to the format.

use format::{CacheMode, Replacement};

/// A type with a fixed list of named values.
pub(crate) trait Choice: Copy + PartialEq + 'static {
    /// All values with their names, in the order in which they are listed.
    const ALL: &'static [(Self, &'static str)];
    /// The names, in the same order.
    const NAMES: &'static [&'static str];

    /// The position of the value that a text names: by its name, or by one that it had in an earlier release.
    fn named(text: &str) -> Option<usize> {
        Self::NAMES.iter().position(|name| *name == text)
    }

    /// Position in the list.
    fn position(self) -> usize {
        Self::ALL.iter().position(|(value, _)| *value == self).unwrap_or_default()
    }

    /// The value at a position of the list.
    fn at(position: usize) -> Option<Self> {
        Self::ALL.get(position).map(|(value, _)| *value)
    }
}

/// The read-ahead and background requests that are cached.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ReadaheadPolicy {
    /// All of them.
    #[default]
    All,
    /// Requests for metadata only.
    MetaOnly,
}

/// The reaction of a cached device without dirty data to the failure of its set. A device with dirty data is stopped in
/// any case.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum StopWhenFailed {
    /// The device is served without a cache.
    #[default]
    Auto,
    /// Every request of the device fails.
    Always,
}

/// The reaction to an error that makes a set fail.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum OnError {
    /// The set is disabled and unregistered.
    #[default]
    Unregister,
    /// Accepted, as the kernel does; it has the effect of `Unregister`.
    Panic,
}

/// The rule for requests that the cache mode lets through the cache or past it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Admission {
    /// By the kernel's rules: streams and congestion bypass.
    Kernel,
    /// By what requests cost the devices and by the room that is left.
    #[default]
    Cost,
}

/// Whether writeback reads the gaps between dirty data and writes everything in one request.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Bridge {
    /// Never.
    Off,
    /// Gaps are bridged if that is cheaper than separate requests.
    #[default]
    Auto,
    /// Wherever `writeback_bridge_limit` allows it.
    Always,
}

/// The controller of the writeback rate.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Controller {
    /// The kernel's controller alone.
    Kernel,
    /// The kernel's controller; writeback also pauses while clients keep the devices busy and the cache has room.
    #[default]
    Yield,
}

/// Whether dirty data is overwritten where it is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Overwrite {
    /// Never: each write goes to a new place.
    Off,
    /// Overwrites in place if few buckets are empty or requests to the cache device are cheap; never on a rotating device.
    #[default]
    Auto,
    /// Wherever it can be.
    Always,
}

macro_rules! choice {
    ($type:ty: $($value:path => $name:literal),+) => {
        impl Choice for $type {
            const ALL: &'static [(Self, &'static str)] = &[$(($value, $name)),+];
            const NAMES: &'static [&'static str] = &[$($name),+];
        }
    };
}

choice!(ReadaheadPolicy: ReadaheadPolicy::All => "all", ReadaheadPolicy::MetaOnly => "meta-only");
choice!(StopWhenFailed: StopWhenFailed::Auto => "auto", StopWhenFailed::Always => "always");
choice!(OnError: OnError::Unregister => "unregister", OnError::Panic => "panic");
choice!(Admission: Admission::Kernel => "kernel", Admission::Cost => "cost");
choice!(Bridge: Bridge::Off => "off", Bridge::Auto => "auto", Bridge::Always => "always");
choice!(Controller: Controller::Kernel => "kernel", Controller::Yield => "yield");
choice!(Overwrite: Overwrite::Off => "off", Overwrite::Auto => "auto", Overwrite::Always => "always");
choice!(CacheMode:
    CacheMode::Writethrough => "writethrough",
    CacheMode::Writeback => "writeback",
    CacheMode::Writearound => "writearound",
    CacheMode::None => "none");
choice!(Replacement:
    Replacement::Lru => "lru",
    Replacement::Fifo => "fifo",
    Replacement::Random => "random");
