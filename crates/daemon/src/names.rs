//! Names of devices, volumes and sets: the only place that resolves a name.
//!
//! Owns the rule, which every command and every path of the API uses. The form of a name decides its kind:
//!
//! 1. a text with a `/` is a path and nothing else; it has to be absolute;
//! 2. a text in the form of a UUID is the UUID of a device or of a set and nothing else;
//! 3. `bcache` and a number is the name of a volume and nothing else;
//! 4. anything else is a label.
//!
//! Labels come last, because a label is written on the disk, also by other hosts. If a name fits several devices or
//! volumes, the error lists all of them and nothing is done. Must not know the command.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serve::{Failure, plain};

use crate::why::SharedFailure;

/// Something that can be named: a registered device with its volume, or a volume without a device of its own.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct Named {
    /// Name of the volume, if the device has or had one.
    pub(crate) name: Option<String>,
    /// Path of the device.
    pub(crate) device: Option<PathBuf>,
    /// UUID of the device.
    pub(crate) uuid: Option<String>,
    /// Label of the device or of the volume; empty if there is none.
    pub(crate) label: String,
    /// UUID of the set, for a cache device.
    pub(crate) set: Option<String>,
    /// Id of the thread that serves the volume.
    #[serde(skip)]
    pub(crate) served_by: Option<String>,
    /// Whether another device is at the path by now.
    #[serde(skip)]
    pub(crate) displaced: bool,
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut more = Vec::new();
        let device = self.device.as_ref().map(|d| d.display().to_string());
        let first = match (&self.name, &self.set) {
            (Some(name), _) => name.clone(),
            (None, Some(set)) => format!("set {set}"),
            (None, None) => device.clone().unwrap_or_else(|| "a volume".into()),
        };
        if let Some(device) = device.filter(|d| *d != first) {
            more.push(device);
        }
        more.extend(self.uuid.iter().map(|uuid| format!("UUID {uuid}")));
        let more = if more.is_empty() { String::new() } else { format!(" ({})", more.join(", ")) };
        write!(f, "{}", plain::escaped(&plain::named(&self.label, first + &more)))
    }
}

/// Why a name does not resolve.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Unresolved {
    /// The text cannot be a name.
    Malformed(String),
    /// No device, set or volume has this name.
    Unknown(String),
    /// No registered device has this path, and the system does not find it either.
    NoPath(SharedFailure),
    /// A path of this host that no registered device has.
    NotRegistered(PathBuf),
    /// Several devices or volumes have this name, or another device is at the path.
    Refused(String),
    /// A set has this name where a volume is needed, or the reverse.
    OtherKind {
        /// What the name stands for, and what is needed.
        why: String,
        /// The name.
        name: String,
        /// Names that would be right.
        names: Vec<String>,
    },
}

impl Unresolved {
    pub(crate) fn unknown(what: impl fmt::Display) -> Unresolved {
        Unresolved::Unknown(what.to_string())
    }
}

impl From<Unresolved> for Failure {
    fn from(unresolved: Unresolved) -> Failure {
        match unresolved {
            Unresolved::Malformed(why) => Failure::Usage(why),
            Unresolved::Unknown(why) | Unresolved::Refused(why) | Unresolved::OtherKind { why, .. } => {
                Failure::Failed(why)
            }
            Unresolved::NotRegistered(path) => {
                Failure::Failed(format!("{}: is not registered", path.display()))
            }
            Unresolved::NoPath(why) => Failure::of(why),
        }
    }
}

/// The four forms of a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Path,
    Uuid,
    Name,
    Label,
}

fn form(text: &str) -> Form {
    if text.contains('/') {
        Form::Path
    } else if plain::is_uuid(text) {
        Form::Uuid
    } else if plain::is_volume_name(text) {
        Form::Name
    } else {
        Form::Label
    }
}

/// Resolves `text` among these.
pub(crate) fn resolve<'a>(text: &str, among: &'a [Named]) -> Result<&'a Named, Unresolved> {
    let shown = plain::escaped(text);
    if text.is_empty() || matches!(text, "." | "..") {
        return Err(Unresolved::Malformed(format!("{text:?}: expected a path, a UUID, a name or a label")));
    }
    let path = Path::new(text);
    let found: Vec<&Named> = match form(text) {
        Form::Path if path.is_relative() => {
            return Err(Unresolved::Malformed(format!("{shown}: expected an absolute path")));
        }
        Form::Path => {
            let place = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            let is_there = |n: &&Named| n.device.as_ref().is_some_and(|d| *d == place || d.as_path() == path);
            among.iter().filter(is_there).collect()
        }
        Form::Uuid => {
            let text = text.to_ascii_lowercase();
            let is = |of: &Option<String>| of.as_ref() == Some(&text);
            among.iter().filter(|n| is(&n.uuid) || is(&n.set)).collect()
        }
        Form::Name => among.iter().filter(|n| n.name.as_deref() == Some(text)).collect(),
        Form::Label => among.iter().filter(|n| n.label == text && plain::is_word(text)).collect(),
    };
    match (found.as_slice(), form(text)) {
        ([one], Form::Path) if one.displaced => Err(Unresolved::Refused(format!(
            "{shown}: the device at this path is not the registered {one}; name that one by its UUID"
        ))),
        ([one], _) => Ok(one),
        ([], Form::Path) => match path.canonicalize() {
            Ok(path) => Err(Unresolved::NotRegistered(path)),
            Err(e) => {
                let what = format_args!("{shown}: no registered device has this path");
                Err(Unresolved::NoPath(Failure::because(what, e).into()))
            }
        },
        ([], Form::Uuid) => {
            Err(Unresolved::unknown(format!("{shown}: no registered device or set has this UUID")))
        }
        ([], Form::Name) => Err(Unresolved::unknown(format!("there is no volume {shown}"))),
        ([], Form::Label) => Err(Unresolved::unknown(format!(
            "there is no volume or set {shown}, and no registered device with this label"
        ))),
        (several, _) => {
            let all: Vec<String> = several.iter().map(ToString::to_string).collect();
            Err(Unresolved::Refused(format!(
                "{shown}: is ambiguous, {} have this name: {}; name one of them by its path or UUID",
                several.len(),
                all.join("; ")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of a path was turned into text.
    #[test]
    fn the_error_of_a_path_is_the_cause() {
        let missing = std::fs::metadata("/nowhere").expect_err("there is no such file").raw_os_error();
        let failure = Failure::from(resolve("/nowhere", &[]).expect_err("nothing is registered"));
        assert_eq!(crate::testing::errno(&failure), missing, "{failure}");
    }

    const ONE: &str = "11111111-1111-1111-1111-111111111111";
    const TWO: &str = "22222222-2222-2222-2222-222222222222";
    const SET: &str = "33333333-3333-3333-3333-333333333333";

    fn named(name: &str, device: &str, uuid: &str, label: &str) -> Named {
        let some = |text: &str| Some(text.to_owned()).filter(|t| !t.is_empty());
        Named {
            name: some(name),
            device: some(device).map(PathBuf::from),
            uuid: some(uuid),
            label: label.into(),
            ..Named::default()
        }
    }

    fn refused(text: &str, among: &[Named]) -> String {
        Failure::from(resolve(text, among).expect_err(text)).to_string()
    }

    #[test]
    fn the_form_of_a_name_decides_its_kind() {
        let cache = Named { set: Some(SET.into()), ..named("", "/nowhere/ssd", TWO, "") };
        let all = [named("bcache0", "/nowhere/hdd", ONE, "data"), cache, named("bcache3", "", "", "flash")];
        for (text, at) in [
            ("/nowhere/hdd", 0),
            (ONE, 0),
            ("bcache0", 0),
            ("data", 0),
            (TWO, 1),
            (&SET.to_uppercase(), 1),
            ("/nowhere/ssd", 1),
            ("flash", 2),
            ("bcache3", 2),
        ] {
            assert_eq!(resolve(text, &all), Ok(&all[at]), "{text}");
        }
        assert!(refused("bcache1", &all).contains("no volume bcache1"));
        assert!(refused("other", &all).contains("with this label"));
        assert!(refused("/nowhere/other", &all).contains("no registered device has this path"));
        assert!(matches!(resolve("nowhere/hdd", &all), Err(Unresolved::Malformed(_))));
        assert!(matches!(resolve("..", &all), Err(Unresolved::Malformed(_))));
        assert!(matches!(resolve("", &all), Err(Unresolved::Malformed(_))));
        assert_eq!(resolve("/", &all), Err(Unresolved::NotRegistered("/".into())));
    }

    /// A disk has a label that is the name of another volume, a path, or the name of a missing device.
    #[test]
    fn a_label_takes_nobodys_place() {
        let hostile = |label: &str| [named("bcache1", "/nowhere/stick", TWO, label)];
        for text in ["bcache0", "/nowhere/hdd", "/dev/none"] {
            assert!(resolve(text, &hostile(text)).is_err(), "{text}");
        }
        let all =
            [named("bcache0", "/nowhere/hdd", ONE, ""), named("bcache1", "/nowhere/stick", TWO, "bcache0")];
        assert_eq!(resolve("bcache0", &all), Ok(&all[0]));
        let all = [named("bcache0", "/nowhere/hdd", ONE, ""), named("bcache1", "/s", TWO, "/nowhere/hdd")];
        assert_eq!(resolve("/nowhere/hdd", &all), Ok(&all[0]));
        // A label with a control character resolves to nothing.
        let odd = [named("bcache1", "/nowhere/stick", TWO, "x\nerror")];
        assert_eq!(
            refused("x\nerror", &odd),
            "there is no volume or set x\\nerror, and no registered device with this label"
        );
    }

    #[test]
    fn an_ambiguous_name_is_refused_and_all_are_listed() {
        let all = [named("bcache0", "/nowhere/hdd", ONE, "data"), named("", "/nowhere/stick", TWO, "data")];
        let said = refused("data", &all);
        for words in [
            "is ambiguous, 2 have this name",
            "bcache0 (/nowhere/hdd, UUID 1111",
            "/nowhere/stick (UUID 2222",
        ] {
            assert!(said.contains(words), "{words}: {said}");
        }
        let copies = [named("bcache0", "/nowhere/hdd", ONE, ""), named("", "/nowhere/copy", ONE, "")];
        assert!(refused(ONE, &copies).contains("is ambiguous, 2 have this name"));
        assert_eq!(resolve("/nowhere/copy", &copies), Ok(&copies[1]));
    }

    #[test]
    fn a_device_that_has_taken_a_path_is_not_the_one_that_had_it() {
        let all = [Named { displaced: true, ..named("bcache0", "/nowhere/hdd", ONE, "") }];
        assert!(refused("/nowhere/hdd", &all).contains("is not the registered"));
        assert_eq!(resolve(ONE, &all), Ok(&all[0]));
    }

    #[test]
    fn a_printed_name_is_one_line() {
        let odd = named("bcache1", "/nowhere/a\nb", TWO, "x\n\u{1b}[2J");
        assert_eq!(odd.to_string(), format!("\"x\\n\\u{{1b}}[2J\", bcache1 (/nowhere/a\\nb, UUID {TWO})"));
    }
}
