//! The settings that are one name out of a few.
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

    /// Position in the list.
    fn position(self) -> usize {
        Self::ALL.iter().position(|(value, _)| *value == self).unwrap_or_default()
    }

    /// The value at a position of the list.
    fn at(position: usize) -> Option<Self> {
        Self::ALL.get(position).map(|(value, _)| *value)
    }
}

/// Which requests that read ahead, or run in the background, are cached.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ReadaheadPolicy {
    /// All of them.
    #[default]
    All,
    /// Those for metadata only.
    MetaOnly,
}

/// What becomes of a cached device without dirty data when its cache set fails. (A device with dirty
/// data is stopped in any case.)
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum StopWhenFailed {
    /// It goes on without a cache.
    #[default]
    Auto,
    /// It is stopped, too.
    Always,
}

/// What an error does that a cache set cannot survive.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum OnError {
    /// The set is disabled and unregistered.
    #[default]
    Unregister,
    /// The whole process ends at once.
    Panic,
}

/// Which requests go through the cache, where the cache mode leaves a choice.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Admission {
    /// By the kernel's rules: streams and congestion bypass.
    Kernel,
    /// By what requests cost the devices and by the room that is left.
    #[default]
    Cost,
}

/// Whether writeback reads what lies between dirty data and writes all of it in one request.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Bridge {
    /// Never.
    Off,
    /// Where it is cheaper than separate requests.
    #[default]
    Auto,
    /// Wherever `writeback_bridge_limit` allows it.
    Always,
}

/// Who says how fast dirty data is written back.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Controller {
    /// The kernel's controller alone.
    Kernel,
    /// The same, but while clients keep the devices busy, writeback rests as much as the room in the cache allows.
    #[default]
    Yield,
}

/// Whether dirty data is overwritten where it is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Overwrite {
    /// Never: each write goes to a new place.
    Off,
    /// Where few buckets are unused or requests cost the cache device little, unless it rotates.
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
