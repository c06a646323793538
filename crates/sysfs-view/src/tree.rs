//! The tree of paths.
//!
//! Owns the directories and links, which follow from a snapshot: sets under `fs/bcache`, devices under `block`. Links are
//! relative, so a mount can be anywhere. Must not know FUSE.

use engine::figures::{SetFigures, VolumeFigures};
use engine::stats::View;

use crate::names::disk;
use crate::owner::{Owner, Snapshot};
use crate::table::{self, File, Place, Subject};

/// The entry at a path.
pub(crate) enum Found {
    /// A directory, with the entries in it.
    Dir(Vec<(String, Kind)>),
    /// A link to this target.
    Link(String),
    /// A file of the table.
    File(&'static File, Place),
}

/// The kind of a directory entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Dir,
    Link,
    File,
}

/// A snapshot as a tree.
pub(crate) struct Tree<'a> {
    pub(crate) snapshot: &'a Snapshot,
}

/// A volume and the set that it belongs to.
#[derive(Clone, Copy)]
struct Member<'a> {
    set: Option<&'a SetFigures>,
    volume: &'a VolumeFigures,
}

impl Member<'_> {
    /// The directory in `block` that has the volume's files.
    fn home(&self) -> String {
        self.volume.backing_name.as_deref().and_then(disk).unwrap_or_else(|| self.block_device().to_owned())
    }

    /// The name by which its owner knows the volume.
    fn block_device(&self) -> &str {
        &self.volume.name
    }

    fn place(&self) -> Place {
        if self.volume.is_flash_only() { Place::Volume } else { Place::Backing }
    }
}

/// An entry, and the set and volume that it belongs to.
pub(crate) struct Located<'a> {
    pub(crate) found: Found,
    set: Option<&'a SetFigures>,
    volume: Option<&'a VolumeFigures>,
    view: Option<View>,
}

impl<'a> Located<'a> {
    fn plain(found: Found) -> Located<'a> {
        Located { found, set: None, volume: None, view: None }
    }

    /// The subject of the file, from which its text is made.
    pub(crate) fn subject(&self, owner: &'a dyn Owner) -> Subject<'a> {
        let cache = self.volume.map(|v| &v.cache).or_else(|| self.set.map(|s| &s.cache));
        let view = self.view.and_then(|view| Some(cache?.view(view)));
        Subject { owner, set: self.set, volume: self.volume, view }
    }
}

fn dirs(names: &[&str]) -> Found {
    Found::Dir(names.iter().map(|n| ((*n).to_owned(), Kind::Dir)).collect())
}

/// The directory in `block` that holds the files of a cache device.
fn cache_home(set: &SetFigures) -> String {
    disk(&set.status.device).unwrap_or_else(|| set.status.set_uuid.to_string())
}

/// The names of the views' directories.
fn views() -> impl Iterator<Item = (String, Kind)> {
    View::ALL.iter().map(|v| (v.name().to_owned(), Kind::Dir))
}

fn files(place: Place) -> impl Iterator<Item = (String, Kind)> {
    table::of(place).iter().map(|f| (f.name.to_owned(), Kind::File))
}

/// The file of this name in a place.
fn file(place: Place, name: &str) -> Option<Found> {
    table::of(place).iter().find(|f| f.name == name).map(|f| Found::File(f, place))
}

impl<'a> Tree<'a> {
    fn members(&self) -> impl Iterator<Item = Member<'a>> + '_ {
        let of_sets = self.snapshot.sets.iter().flat_map(|s| s.volumes.iter().map(move |v| (Some(s), v)));
        let all = of_sets.chain(self.snapshot.alone.iter().map(|v| (None, v)));
        all.map(|(set, volume)| Member { set, volume })
    }

    /// The entry at a path below the root, if there is one.
    pub(crate) fn find(&self, path: &[&str]) -> Option<Located<'a>> {
        match path {
            [] => Some(Located::plain(dirs(&["block", "fs"]))),
            ["fs"] => Some(Located::plain(dirs(&["bcache"]))),
            ["fs", "bcache"] => {
                let sets = self.snapshot.sets.iter().map(|s| (s.status.set_uuid.to_string(), Kind::Dir));
                Some(Located::plain(Found::Dir(files(Place::Global).chain(sets).collect())))
            }
            ["fs", "bcache", name] if file(Place::Global, name).is_some() => {
                file(Place::Global, name).map(Located::plain)
            }
            ["fs", "bcache", uuid, rest @ ..] => {
                let set = self.snapshot.sets.iter().find(|s| s.status.set_uuid.to_string() == *uuid)?;
                self.in_set(set, rest)
            }
            ["block"] => Some(Located::plain(self.block())),
            ["block", name, rest @ ..] => self.in_block(name, rest),
            _ => None,
        }
    }

    fn in_set(&self, set: &'a SetFigures, path: &[&str]) -> Option<Located<'a>> {
        let (found, view) = match path {
            [] => {
                let mut names: Vec<(String, Kind)> = files(Place::Set).chain(views()).collect();
                names.push(("internal".to_owned(), Kind::Dir));
                names.extend(self.links(set).into_iter().map(|(name, _)| (name, Kind::Link)));
                (Found::Dir(names), None)
            }
            ["internal"] => (Found::Dir(files(Place::Internal).collect()), None),
            ["internal", name] => (file(Place::Internal, name)?, None),
            [name, rest @ ..] if view_of(name).is_some() => stats(name, rest)?,
            [name] => match self.links(set).into_iter().find(|(link, _)| link == name) {
                Some((_, target)) => (Found::Link(target), None),
                None => (file(Place::Set, name)?, None),
            },
            _ => return None,
        };
        Some(Located { found, set: Some(set), volume: None, view })
    }

    /// The links of a set to its devices.
    fn links(&self, set: &SetFigures) -> Vec<(String, String)> {
        let to = |home: String| format!("../../../block/{home}/bcache");
        let mut links = vec![("cache0".to_owned(), to(cache_home(set)))];
        let mine = self.members().filter(|m| m.set.is_some_and(|s| s.status.set_uuid == set.status.set_uuid));
        for m in mine {
            let Some(inode) = m.volume.inode else { continue };
            let kind = if m.volume.is_flash_only() { "volume" } else { "bdev" };
            links.push((format!("{kind}{}", inode.0), to(m.home())));
        }
        links
    }

    fn block(&self) -> Found {
        let mut names: Vec<String> = self.snapshot.sets.iter().map(cache_home).collect();
        names.extend(self.members().flat_map(|m| [m.home(), m.block_device().to_owned()]));
        names.sort_unstable();
        names.dedup();
        Found::Dir(names.into_iter().map(|n| (n, Kind::Dir)).collect())
    }

    fn in_block(&self, name: &str, path: &[&str]) -> Option<Located<'a>> {
        if let Some(member) = self.members().find(|m| m.home() == name) {
            return self.in_device(member, path);
        }
        if let Some(member) = self.members().find(|m| m.block_device() == name) {
            let found = match path {
                [] => Found::Dir(vec![("bcache".to_owned(), Kind::Link)]),
                ["bcache"] => Found::Link(format!("../{}/bcache", member.home())),
                _ => return None,
            };
            return Some(Located::plain(found));
        }
        let set = self.snapshot.sets.iter().find(|s| cache_home(s) == name)?;
        let found = match path {
            [] => dirs(&["bcache"]),
            ["bcache"] => {
                let link = [("set".to_owned(), Kind::Link)];
                Found::Dir(files(Place::Cache).chain(link).collect())
            }
            ["bcache", "set"] => Found::Link(format!("../../../fs/bcache/{}", set.status.set_uuid)),
            ["bcache", file_name] => file(Place::Cache, file_name)?,
            _ => return None,
        };
        Some(Located { found, set: Some(set), volume: None, view: None })
    }

    fn in_device(&self, m: Member<'a>, path: &[&str]) -> Option<Located<'a>> {
        let own = m.place() == Place::Backing;
        let (found, view) = match path {
            [] => (dirs(&["bcache"]), None),
            ["bcache"] => {
                let mut names: Vec<(String, Kind)> = files(m.place()).collect();
                if own {
                    names.extend(views());
                    names.push(("dev".to_owned(), Kind::Link));
                }
                if m.set.is_some() {
                    names.push(("cache".to_owned(), Kind::Link));
                }
                (Found::Dir(names), None)
            }
            ["bcache", "dev"] if own => (Found::Link(format!("../../{}", m.block_device())), None),
            ["bcache", "cache"] => {
                (Found::Link(format!("../../../fs/bcache/{}", m.set?.status.set_uuid)), None)
            }
            ["bcache", name, rest @ ..] if own && view_of(name).is_some() => stats(name, rest)?,
            ["bcache", name] => (file(m.place(), name)?, None),
            _ => return None,
        };
        Some(Located { found, set: m.set, volume: Some(m.volume), view })
    }
}

fn view_of(name: &str) -> Option<View> {
    View::ALL.into_iter().find(|v| v.name() == name)
}

/// The directory of a view, or a file in it.
fn stats(name: &str, rest: &[&str]) -> Option<(Found, Option<View>)> {
    match rest {
        [] => Some((Found::Dir(files(Place::Stats).collect()), None)),
        [name_of_file] => Some((file(Place::Stats, name_of_file)?, view_of(name))),
        _ => None,
    }
}
