//! Archives as the kernel wants them for its first root filesystem: cpio, format "newc", uncompressed.
//!
//! Owns the encoding and the parent directories; must not know what goes in. The same files can go into a directory.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

enum Entry {
    Directory,
    File { mode: u32, content: Vec<u8> },
    Link(String),
}

/// An archive under construction; paths are absolute.
#[derive(Default)]
pub struct Archive {
    entries: BTreeMap<String, Entry>,
}

impl Archive {
    /// A directory, with its parents.
    pub fn directory(&mut self, path: &str) {
        let path = path.trim_matches('/');
        for (i, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let parent = path.get(..i).unwrap_or_default();
            if !parent.is_empty() && !self.entries.contains_key(parent) {
                self.entries.insert(parent.to_owned(), Entry::Directory);
            }
        }
    }

    fn parents(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
    }

    /// A regular file; `mode` without the type, for example 0o755.
    pub fn file(&mut self, path: &str, mode: u32, content: Vec<u8>) {
        self.parents(path);
        self.entries.insert(path.trim_matches('/').to_owned(), Entry::File { mode, content });
    }

    /// A symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entries.insert(path.trim_matches('/').to_owned(), Entry::Link(target.to_owned()));
    }

    /// Whether something is there.
    pub fn has(&self, path: &str) -> bool {
        self.entries.contains_key(path.trim_matches('/'))
    }

    /// Writes it all into a directory instead.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn unpack(&self, to: &Path) -> io::Result<()> {
        // Parents are before what is in them.
        for (path, entry) in &self.entries {
            let path = to.join(path);
            match entry {
                Entry::Directory => fs::create_dir_all(path)?,
                Entry::File { mode, content } => {
                    fs::write(&path, content)?;
                    fs::set_permissions(path, fs::Permissions::from_mode(*mode))?;
                }
                Entry::Link(target) => symlink(target, path)?,
            }
        }
        Ok(())
    }

    /// Writes it all.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        // Inode numbers need to differ only where there are hard links.
        for (inode, (path, entry)) in (1..).zip(&self.entries) {
            match entry {
                Entry::Directory => member(to, inode, 0o040_755, path, &[])?,
                Entry::File { mode, content } => member(to, inode, 0o100_000 | mode, path, content)?,
                Entry::Link(target) => member(to, inode, 0o120_777, path, target.as_bytes())?,
            }
        }
        member(to, 0, 0, "TRAILER!!!", &[])
    }
}

/// Header of 110 characters, name with its NUL, and content, the last two padded so that what follows is aligned to 4.
fn member(to: &mut impl Write, inode: u32, mode: u32, name: &str, content: &[u8]) -> io::Result<()> {
    let size = u32::try_from(content.len()).map_err(io::Error::other)?;
    let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
    write!(to, "070701")?;
    let (owner, links, device) = (0, 1, 0);
    let fields = [inode, mode, owner, owner, links, 0, size, device, device, device, device, name_size, 0];
    for f in fields {
        write!(to, "{f:08x}")?;
    }
    to.write_all(name.as_bytes())?;
    to.write_all(&[0; 4][..1 + pad(110 + name.len() + 1)])?;
    to.write_all(content)?;
    to.write_all(&[0; 3][..pad(content.len())])
}

fn pad(len: usize) -> usize {
    len.wrapping_neg() % 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_aligned_and_parents_come_first() {
        let mut archive = Archive::default();
        archive.file("/usr/bin/tool", 0o755, b"12345".to_vec());
        archive.link("/zlink", "elsewhere");
        let mut bytes = Vec::new();
        archive.write(&mut bytes).unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let at = |name: &str| text.find(name).unwrap();
        assert!(at("usr\0") < at("usr/bin\0") && at("usr/bin\0") < at("usr/bin/tool\0"));
        assert_eq!(at("12345") % 4, 0);
        assert!(text.contains("TRAILER!!!"));
    }
}
