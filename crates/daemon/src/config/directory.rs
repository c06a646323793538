//! Directories in the configuration that the daemon makes, empties, or covers by a mount.
//!
//! Owns the refusal of directories that belong to the host. Must not touch a file.

use std::path::{Component, Path};

use super::mistake::Mistake;

/// The number of the parts of a path; `None` if it is relative or has `..`.
fn depth(path: &Path) -> Option<usize> {
    let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    (path.is_absolute() && path.components().all(is_plain)).then(|| path.components().count() - 1)
}

fn mistake(key: &'static str, expected: &'static str, found: &Path) -> Mistake {
    Mistake::Directory { key, expected, found: found.to_owned() }
}

/// Refuses what cannot be the daemon's own directory.
pub(super) fn check_own(key: &'static str, path: &Path) -> Result<(), Mistake> {
    match depth(path) {
        Some(1..) => Ok(()),
        _ => Err(mistake(key, "the absolute path of a directory of its own", path)),
    }
}

/// Refuses a directory of links in which the daemon, which removes old links there, could find links of others.
pub(super) fn check_links(path: &Path) -> Result<(), Mistake> {
    match depth(path) {
        Some(2..) => Ok(()),
        _ if path.as_os_str().is_empty() => Ok(()),
        _ => {
            let expected = "a directory for the links alone, such as \"/dev/ubcache\", or \"\" for no links";
            Err(mistake("links", expected, path))
        }
    }
}
