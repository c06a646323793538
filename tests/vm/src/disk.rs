//! Directories of tests, and disks in files.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::power::{Power, VolatileCache};
use crate::said::run;

/// A directory for one test, removed at its end; if the test fails and `UBCACHE_VM_KEEP` is set, it stays, images and all.
pub struct Dir {
    dir: tempfile::TempDir,
    since: Instant,
}

impl Dir {
    /// A new one.
    #[allow(clippy::new_without_default)] // it makes something on the disk
    pub fn new() -> Dir {
        let dir = tempfile::Builder::new().prefix("ubcache-vm-").tempdir().expect("a directory");
        Dir { dir, since: Instant::now() }
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new disk of zeros, which takes room only where it is written.
    pub fn disk(&self, name: &str, bytes: u64) -> Disk {
        let path = self.path(&format!("{name}.img"));
        File::create_new(&path).and_then(|f| f.set_len(bytes)).expect("room for a sparse file");
        Disk { name: name.to_owned(), path, iops: None, bytes_per_second: None, cache: None }
    }

    /// Another disk with the same contents as `disk` has now.
    pub fn copy_of(&self, disk: &Disk, name: &str) -> Disk {
        let path = self.path(&format!("{name}.img"));
        run(Path::new("cp"), &[Path::new("--sparse=always"), &disk.path, &path]).ok();
        Disk { name: name.to_owned(), path, cache: None, ..disk.clone() }
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("UBCACHE_VM_KEEP").is_some() {
            self.dir.disable_cleanup(true);
            eprintln!("the images are kept in {}", self.dir.path().display());
        }
        // For `scripts/vm-test`, which says what took long.
        if let Some(path) = std::env::var_os("UBCACHE_VM_TIMES")
            && let Ok(mut times) = File::options().append(true).create(true).open(path)
        {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or_default();
            let _ =
                times.write_all(format!("{:6.1} s  {name}\n", self.since.elapsed().as_secs_f64()).as_bytes());
        }
    }
}

/// A disk: a raw image here, `/dev/disk/<name>` in a guest.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Its serial number in the guest; at most 20 characters.
    pub name: String,
    /// The image.
    pub path: PathBuf,
    /// Requests it takes each second; `None`: as many as come.
    pub iops: Option<u32>,
    /// Bytes it moves each second; `None`: as many as come.
    pub bytes_per_second: Option<u64>,
    /// Its volatile write cache; `None`: a power loss loses nothing that was answered.
    pub(crate) cache: Option<Arc<VolatileCache>>,
}

impl Disk {
    /// Limits the requests a second of the disk: 150 is a hard disk, 3000 an SSD. Each request takes its part of a second, whatever
    /// its size.
    pub fn slow(&self, iops: u32) -> Disk {
        Disk { iops: Some(iops), ..self.clone() }
    }

    /// Limits the bytes a second of the disk, so that large requests are not free.
    pub fn limited(&self, bytes_per_second: u64) -> Disk {
        Disk { bytes_per_second: Some(bytes_per_second), ..self.clone() }
    }

    /// Gives the disk a write cache that a power loss empties. It shares the power with other disks; only one such
    /// disk may be made of an image.
    pub fn volatile(&self, power: &Power) -> Disk {
        Disk { cache: Some(Arc::new(VolatileCache::start(&self.path, power))), ..self.clone() }
    }

    /// Its path in a guest.
    pub fn guest(&self) -> String {
        format!("/dev/disk/{}", self.name)
    }

    /// The path of the image as text.
    pub fn host(&self) -> &str {
        self.path.to_str().expect("a plain path")
    }
}
