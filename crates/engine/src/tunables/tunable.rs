//! A setting as text: its name, its form, how it is parsed, and its range.
//!
//! Owns the table type for both kinds of tunables. A tunable reads and writes one field of `DeviceTunables` or
//! `SetTunables`.

use std::fmt;

use super::error::TunableError;
use super::parse;
use crate::human::Human;

/// The unit of a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// No unit: a number, a choice or a text.
    None,
    /// Bytes; suffixes are accepted.
    Bytes,
    /// Bytes per second; suffixes are accepted.
    BytesPerSecond,
    /// 512-byte sectors.
    Sectors,
    /// 512-byte sectors per second when written; shown in bytes per second.
    SectorsPerSecond,
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Millis,
    /// Units of 1024 ns (semantics section 4.2).
    Micros,
    /// Percent.
    Percent,
    /// I/O requests.
    Ios,
}

impl Unit {
    /// Name of the unit; empty for [`Unit::None`].
    pub const fn name(self) -> &'static str {
        match self {
            Unit::None => "",
            Unit::Bytes => "bytes",
            Unit::BytesPerSecond => "bytes/s",
            Unit::Sectors => "sectors",
            Unit::SectorsPerSecond => "sectors/s",
            Unit::Seconds => "s",
            Unit::Millis => "ms",
            Unit::Micros => "us",
            Unit::Percent => "%",
            Unit::Ios => "I/Os",
        }
    }

    /// The name with a blank in front; empty for [`Unit::None`].
    pub(super) fn suffix(self) -> String {
        if self == Unit::None { String::new() } else { format!(" {}", self.name()) }
    }
}

/// The place in which a setting survives a restart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// The superblock of the backing device or cache device, which must be rewritten after a change.
    Superblock,
    /// A place outside of the devices, in which the program that runs the engine stores the setting.
    Settings,
}

/// The values that a setting can have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Range {
    /// A number in this range, both ends included; other numbers are clamped.
    Number(u64, u64),
    /// 0 or 1; every other number counts as 1.
    Flag,
    /// One of these names.
    Choices(&'static [&'static str]),
    /// Text of at most this many bytes.
    Text(usize),
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Range::Number(min, max) => write!(f, "{min} to {max}"),
            Range::Flag => write!(f, "0 or 1"),
            Range::Choices(names) => write!(f, "{}", names.join(", ")),
            Range::Text(bytes) => write!(f, "at most {bytes} bytes"),
        }
    }
}

/// A setting with its current value, for listings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TunableInfo {
    /// Name, the kernel's if the kernel has it.
    pub name: &'static str,
    /// Value as the kernel shows it: sizes and rates in the "h" format, choices in a list with the
    /// current one in brackets.
    pub value: String,
    /// Value in the form that `set` accepts; programs store this form.
    pub raw: String,
    /// The default, in the form of `raw`.
    pub default: String,
    /// Unit of the value.
    pub unit: Unit,
    /// The values that it can have, given the current values of the settings that limit it.
    pub range: Range,
    /// The place in which it survives a restart.
    pub stored: Stored,
    /// Whether the kernel also has it.
    pub in_kernel: bool,
    /// A description of one line.
    pub doc: &'static str,
}

/// The form in which the number of a tunable is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Show {
    /// As it is.
    Plain,
    /// Bytes in the "h" format.
    Bytes,
    /// Sectors in the "h" format of their bytes.
    Sectors,
}

/// The field behind a tunable.
pub(super) enum Field<T: 'static> {
    Number {
        get: fn(&T) -> u64,
        put: fn(&mut T, u64),
        range: fn(&T) -> (u64, u64),
        show: Show,
    },
    Flag {
        get: fn(&T) -> bool,
        put: fn(&mut T, bool),
    },
    Choice {
        names: &'static [&'static str],
        named: fn(&str) -> Option<usize>,
        get: fn(&T) -> usize,
        put: fn(&mut T, usize),
    },
    Text {
        max_bytes: usize,
        get: fn(&T) -> &str,
        put: fn(&mut T, &str),
    },
}

/// One entry of a table of settings.
pub(super) struct Tunable<T: 'static> {
    pub name: &'static str,
    pub unit: Unit,
    pub stored: Stored,
    pub in_kernel: bool,
    pub doc: &'static str,
    pub field: Field<T>,
}

impl<T> Tunable<T> {
    /// Makes a setting that the kernel has and does not store.
    pub(super) const fn new(
        name: &'static str,
        unit: Unit,
        doc: &'static str,
        field: Field<T>,
    ) -> Tunable<T> {
        Tunable { name, unit, stored: Stored::Settings, in_kernel: true, doc, field }
    }

    /// Marks the setting as stored in the superblock.
    pub(super) const fn in_superblock(mut self) -> Tunable<T> {
        self.stored = Stored::Superblock;
        self
    }

    /// Marks the setting as one that the kernel does not have.
    pub(super) const fn not_in_kernel(mut self) -> Tunable<T> {
        self.in_kernel = false;
        self
    }

    pub(super) fn range(&self, of: &T) -> Range {
        match &self.field {
            Field::Number { range, .. } => {
                let (min, max) = range(of);
                Range::Number(min, max)
            }
            Field::Flag { .. } => Range::Flag,
            Field::Choice { names, .. } => Range::Choices(names),
            Field::Text { max_bytes, .. } => Range::Text(*max_bytes),
        }
    }

    /// The value as the kernel shows it.
    pub(super) fn show(&self, of: &T) -> String {
        match &self.field {
            Field::Number { get, show: Show::Bytes, .. } => Human::bytes(get(of)).to_string(),
            Field::Number { get, show: Show::Sectors, .. } => {
                Human::bytes(format::Sectors(get(of)).bytes()).to_string()
            }
            Field::Choice { names, get, .. } => bracketed(names, get(of)),
            _ => self.raw(of),
        }
    }

    /// The value in the form that [`Tunable::set`] accepts.
    pub(super) fn raw(&self, of: &T) -> String {
        match &self.field {
            Field::Number { get, .. } => get(of).to_string(),
            Field::Flag { get, .. } => u8::from(get(of)).to_string(),
            Field::Choice { names, get, .. } => names.get(get(of)).copied().unwrap_or("").to_owned(),
            Field::Text { get, .. } => get(of).to_owned(),
        }
    }

    /// Sets the value; a number out of range is clamped.
    pub(super) fn set(&self, of: &mut T, text: &str) -> Result<(), TunableError> {
        let (name, unit, range) = (self.name, self.unit, self.range(of));
        let not_a_number = |value: &str| TunableError::NotANumber {
            name,
            value: value.to_owned(),
            unit,
            range: range.clone(),
        };
        // Values for control files come from `echo`, which adds a newline.
        let word = text.trim();
        match &self.field {
            Field::Number { put, range, .. } => {
                let value = parse::number(word, unit).ok_or_else(|| not_a_number(word))?;
                let (min, max) = range(of);
                put(of, value.min(max).max(min));
            }
            Field::Flag { put, .. } => {
                let value = parse::decimal(word).ok_or_else(|| not_a_number(word))?;
                put(of, value != 0);
            }
            Field::Choice { named, put, .. } => {
                let not_a_choice = || TunableError::NotAChoice { name, value: word.to_owned(), range };
                put(of, named(word).ok_or_else(not_a_choice)?);
            }
            Field::Text { max_bytes, put, .. } => {
                // Blanks are part of a text; newlines at the end are not.
                let line = text.trim_end_matches('\n');
                if line.len() > *max_bytes || line.bytes().any(|b| b == 0) {
                    return Err(TunableError::BadText { name, value: line.to_owned(), range });
                }
                put(of, line);
            }
        }
        Ok(())
    }

    /// Refuses a value that [`Tunable::set`] would refuse or clamp.
    pub(super) fn check(&self, of: &T, text: &str) -> Result<(), TunableError>
    where
        T: Clone,
    {
        self.set(&mut of.clone(), text)?;
        let word = text.trim();
        let number = match &self.field {
            Field::Number { .. } => parse::number(word, self.unit),
            Field::Flag { .. } => parse::decimal(word),
            Field::Choice { .. } | Field::Text { .. } => None,
        };
        let (min, max) = match &self.field {
            Field::Number { range, .. } => range(of),
            _ => (0, 1),
        };
        match number {
            Some(number) if !(min..=max).contains(&number) => Err(TunableError::OutOfRange {
                name: self.name,
                value: word.to_owned(),
                unit: self.unit,
                range: self.range(of),
            }),
            _ => Ok(()),
        }
    }

    /// The number that a text stands for, in the unit of the setting; `None` if the setting or the text is no number.
    pub(super) fn number(&self, text: &str) -> Option<u64> {
        match &self.field {
            Field::Number { .. } => parse::number(text.trim(), self.unit),
            Field::Flag { .. } => parse::decimal(text.trim()),
            Field::Choice { .. } | Field::Text { .. } => None,
        }
    }

    pub(super) fn info(&self, of: &T, defaults: &T) -> TunableInfo {
        TunableInfo {
            name: self.name,
            value: self.show(of),
            raw: self.raw(of),
            default: self.raw(defaults),
            unit: self.unit,
            range: self.range(of),
            stored: self.stored,
            in_kernel: self.in_kernel,
            doc: self.doc,
        }
    }
}

/// The tunable called `name`.
pub(super) fn find<'a, T>(table: &'a [Tunable<T>], name: &str) -> Result<&'a Tunable<T>, TunableError> {
    let unknown = || TunableError::Unknown {
        name: name.to_owned(),
        nearest: nearest(name, table.iter().map(|tunable| tunable.name)),
    };
    table.iter().find(|tunable| tunable.name == name).ok_or_else(unknown)
}

/// The name that differs from `name` by a spelling mistake: at most three letters, and at most a third of them. If there is
/// none, the only name that has `name` among its words.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let most = 3.min(name.len() / 3);
    let known: Vec<&str> = known.collect();
    let near = known.iter().map(|one| (strsim::damerau_levenshtein(name, one), *one));
    let near = near.filter(|(distance, _)| *distance <= most).min_by_key(|(distance, _)| *distance);
    let mut with_word = known.iter().filter(|one| one.split('_').any(|word| word == name));
    near.map(|(_, one)| one).or_else(|| with_word.next().filter(|_| with_word.next().is_none()).copied())
}

/// Sets all of `settings`, or none of them if one is invalid.
///
/// The range of a setting can depend on settings that come later in the list, up to two in a row (the three
/// fragmentation factors), so a single pass would clamp values that are valid in the end.
pub(super) fn set_all<'a, T: Clone>(
    table: &[Tunable<T>],
    of: &mut T,
    settings: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> Result<(), TunableError> {
    let mut changed = of.clone();
    for _ in 0..3 {
        for (name, value) in settings.clone() {
            find(table, name)?.set(&mut changed, value)?;
        }
    }
    *of = changed;
    Ok(())
}

/// `lru [fifo] random`: how the kernel shows a choice.
fn bracketed(names: &[&str], current: usize) -> String {
    let shown = names.iter().enumerate().map(|(i, name)| match i == current {
        true => format!("[{name}]"),
        false => (*name).to_owned(),
    });
    shown.collect::<Vec<_>>().join(" ")
}

/// The field of a number: `field: type, smallest, largest`, or `field: type, in range` with a function of the struct if
/// other fields limit it.
macro_rules! number {
    ($field:ident: $type:ty, in $range:expr) => {
        $crate::tunables::tunable::number!($field: $type, in $range, as Plain)
    };
    ($field:ident: $type:ty, in $range:expr, as $show:ident) => {
        $crate::tunables::tunable::Field::Number {
            get: |t| u64::from(t.$field),
            // The range keeps the value within the type, so the conversion never fails.
            put: |t, value| t.$field = <$type>::try_from(value).unwrap_or(<$type>::MAX),
            range: $range,
            show: $crate::tunables::tunable::Show::$show,
        }
    };
    ($field:ident: $type:ty, $min:expr, $max:expr) => {
        $crate::tunables::tunable::number!($field: $type, in |_| ($min, $max), as Plain)
    };
    ($field:ident: $type:ty, $min:expr, $max:expr, as $show:ident) => {
        $crate::tunables::tunable::number!($field: $type, in |_| ($min, $max), as $show)
    };
}

/// The field of a flag: 0 or 1.
macro_rules! flag {
    ($field:ident) => {
        $crate::tunables::tunable::Field::Flag { get: |t| t.$field, put: |t, value| t.$field = value }
    };
}

/// The field of a choice: one of the names of a `Choice`.
macro_rules! choice_of {
    ($field:ident: $type:ty) => {
        $crate::tunables::tunable::Field::Choice {
            names: <$type as $crate::policy::choices::Choice>::NAMES,
            named: <$type as $crate::policy::choices::Choice>::named,
            get: |t| $crate::policy::choices::Choice::position(t.$field),
            put: |t, position| {
                if let Some(value) = <$type as $crate::policy::choices::Choice>::at(position) {
                    t.$field = value;
                }
            },
        }
    };
}

pub(super) use {choice_of, flag, number};
