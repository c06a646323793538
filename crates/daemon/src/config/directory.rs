//! Directories in the configuration that the daemon makes, empties, or covers by a mount.
//!
//! Owns the refusal of directories that belong to the host. Must not touch a file.

use std::path::{Component, Path, PathBuf};

use toml::Spanned;

use super::mistake::Mistake;
use super::{ConfigError, Parser};

/// The names of the directories above a path and of its last part; `None` if it is relative or has `..`.
fn depth(path: &Path) -> Option<usize> {
    let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    (path.is_absolute() && path.components().all(is_plain)).then(|| path.components().count() - 1)
}

impl Parser<'_> {
    /// A directory that is the daemon's own.
    pub(super) fn directory(
        &self,
        key: &'static str,
        path: Option<&Spanned<PathBuf>>,
    ) -> Result<Option<PathBuf>, ConfigError> {
        let Some(path) = path else { return Ok(None) };
        match depth(path.get_ref()) {
            Some(1..) => Ok(Some(path.get_ref().clone())),
            _ => {
                Err(self
                    .at(path, mistake(key, "the absolute path of a directory of its own", path.get_ref())))
            }
        }
    }

    /// The directory of the links: the daemon removes old links in it, so it is none that the host has for other things.
    pub(super) fn links(&self, path: Option<&Spanned<PathBuf>>) -> Result<Option<PathBuf>, ConfigError> {
        let Some(path) = path else { return Ok(None) };
        match depth(path.get_ref()) {
            Some(2..) => Ok(Some(path.get_ref().clone())),
            _ if path.get_ref().as_os_str().is_empty() => Ok(Some(PathBuf::new())),
            _ => {
                let expected =
                    "a directory for the links alone, such as \"/dev/ubcache\", or \"\" for no links";
                Err(self.at(path, mistake("links", expected, path.get_ref())))
            }
        }
    }
}

fn mistake(key: &'static str, expected: &'static str, found: &Path) -> Mistake {
    Mistake::Directory { key, expected, found: found.to_owned() }
}
