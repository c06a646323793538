//! The table of mounts, as the kernel lists it in `/proc/self/mountinfo`.
//!
//! Owns the syntax of that file. Must not know what a caller searches for.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountEntry {
    /// Major and minor number of the file system's device; they belong to this file system alone.
    pub device: (u32, u32),
    /// The mount point.
    pub at: PathBuf,
    /// Type of the file system, with its subtype.
    pub fs_type: String,
    /// Source of the mount: a device or a name.
    pub source: OsString,
}

/// Every mount that this process sees, in the order of mounting.
pub fn mounts() -> io::Result<Vec<MountEntry>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

/// The topmost mount at `path`, which must be absolute and without links.
pub fn topmost(path: &Path) -> io::Result<Option<MountEntry>> {
    Ok(mounts()?.into_iter().rfind(|m| m.at == path))
}

fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

/// `ID PARENT MAJOR:MINOR ROOT AT OPTIONS [TAG...] - TYPE SOURCE SUPEROPTIONS`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&b| b == b' ');
    let device = std::str::from_utf8(fields.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let at = unescaped(fields.nth(1)?);
    let mut rest = fields.skip_while(|f| *f != b"-");
    let fs_type = String::from_utf8_lossy(rest.nth(1)?).into_owned();
    let source = unescaped(rest.next()?);
    let device = (major.parse().ok()?, minor.parse().ok()?);
    Some(MountEntry { device, at: PathBuf::from(at), fs_type, source })
}

/// Decodes a field: the kernel writes blanks, tabs, newlines and backslashes as a backslash and three octal digits.
pub fn unescaped(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let code = if first == b'\\' { after.get(..3) } else { None };
        let byte = code
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match byte {
            Some(b) => {
                out.push(b);
                rest = &after[3..];
            }
            None => {
                out.push(first);
                rest = after;
            }
        }
    }
    OsString::from_vec(out)
}

/// Makes `path` comparable with lists of the kernel: absolute, with the links in its directory part resolved.
///
/// The last part stays as it is.
pub fn located(path: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(path)?;
    match (absolute.parent(), absolute.file_name()) {
        // The last part is not accessed: if a dead file system is mounted there, every access fails.
        (Some(parent), Some(name)) if name.as_bytes() != b".." => Ok(parent.canonicalize()?.join(name)),
        _ => absolute.canonicalize(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel() {
        let text = b"22 28 0:21 / /proc rw,relatime shared:12 - proc proc rw\n\
            40 28 7:3 / /mnt/with\\040blank rw - ext4 /dev/loop3 rw\n\
            41 28 0:44 / /srv/vol\\134s rw,nosuid shared:1 master:2 - fuse.ubcache ubcache rw,user_id=0\n\
            nonsense\n";
        let found = parse(text);
        assert_eq!(found.len(), 3);
        assert_eq!(found[1].at, Path::new("/mnt/with blank"));
        assert_eq!((found[1].device, found[1].fs_type.as_str()), ((7, 3), "ext4"));
        assert_eq!(found[1].source, "/dev/loop3");
        assert_eq!(found[2].at, Path::new("/srv/vol\\s"));
        assert_eq!((found[2].fs_type.as_str(), found[2].source.to_str()), ("fuse.ubcache", Some("ubcache")));
    }

    #[test]
    fn this_process_sees_its_root() {
        assert!(topmost(Path::new("/")).unwrap().is_some());
        assert!(topmost(Path::new("/no/such/mount")).unwrap().is_none());
    }

    #[test]
    fn a_path_is_located_without_looking_at_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        std::os::unix::fs::symlink(&real, real.join("link")).unwrap();
        assert_eq!(located(&real.join("link/absent")).unwrap(), real.join("absent"));
        assert_eq!(located(Path::new("/")).unwrap(), Path::new("/"));
    }
}
