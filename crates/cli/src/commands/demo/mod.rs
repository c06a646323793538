//! `ubcache demo`: a demonstration in 90 seconds on sparse files, which removes all of its files.
//!
//! Runs the program's own commands as an operator would (`make`, `up`, `check`, `extract`, `drain`), with a backing device
//! that is slowed down to a disk with a moving head, and a load generator of its own.
//!
//! Invariants: the demonstration ends by itself. However it ends, it removes its files and ends its processes: each of them
//! is owned by a value whose drop does that, and a signal only makes the running step fail.

mod filesystem;
mod load;
mod server;
mod table;
mod target;

use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;

use crate::exports;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::out;
use filesystem::Mounted;
use load::{Load, WorkingSet};
use server::Server;
use table::{PassRow, Table};
use target::RequestTarget;

const SSD_BYTES: u64 = 256 << 20;
const HDD_BYTES: u64 = 2 << 30;
/// Number of blocks of the load: 24 MiB, which fits the cache many times.
const BLOCKS: usize = 6144;
/// Limit of the size of the files.
const SPACE_BYTES: u64 = 512 << 20;
/// Time for which the disk alone is measured.
const ALONE: Duration = Duration::from_secs(12);
/// Time limit of the first pass, which ends early on a slow host.
const FIRST_PASS: Duration = Duration::from_secs(45);
/// Shortest time of the second pass.
const SECOND_PASS: Duration = Duration::from_secs(6);

/// Demonstrate a cache in 90 seconds
///
/// Makes a sparse "SSD" of 256 MiB and a sparse "HDD" of 2 GiB, which is slowed down like a disk with a moving head,
/// and measures random reads and writes on the disk alone and through the cache: as root on a mounted ext4, else by NBD.
/// Then verifies all written data, and removes all files.
#[derive(Args, Debug)]
pub(crate) struct Demo {
    /// Where to put the files [default: the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl Demo {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let mut interrupt = Interrupt::without_exit()?;
        let place = Place::new(self.dir.clone().unwrap_or_else(std::env::temp_dir))?;
        let result = demonstrate(&place, &mut interrupt);
        // A signal makes some step fail with another error. The signal is the reason.
        if interrupt.came() { Err(Failure::Failed("interrupted".into())) } else { result }
    }
}

/// A directory that is removed with everything in it.
struct Place {
    dir: PathBuf,
}

impl Place {
    fn new(parent: PathBuf) -> Result<Place, Failure> {
        let room = rustix::fs::statvfs(&parent).map_err(|e| Failure::at(&parent, "cannot be used", e))?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if free < SPACE_BYTES {
            return Err(Failure::Failed(format!(
                "{}: expected {} of free space, found {}: use another directory with --dir",
                parent.display(),
                crate::size::human(SPACE_BYTES),
                crate::size::human(free)
            )));
        }
        let dir = parent.join(format!("ubcache-demo-{}", std::process::id()));
        let made = DirBuilder::new().mode(0o700).create(&dir);
        made.map_err(|e| Failure::at(&dir, "cannot be created", e))?;
        Ok(Place { dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn sparse(&self, name: &str, bytes: u64) -> Result<PathBuf, Failure> {
        let path = self.path(name);
        let file = File::create_new(&path).and_then(|f| f.set_len(bytes));
        file.map_err(|e| Failure::at(&path, "cannot be created", e))?;
        Ok(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_dir_all(&self.dir) {
            out::warn(format!("{}: cannot be removed: {e}", self.dir.display()));
        }
    }
}

/// How the load reaches the volume.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Through a file on ext4 on a block device.
    Ext4,
    /// Through NBD.
    Nbd,
}

/// The devices of the demonstration.
struct Devices<'a> {
    place: &'a Place,
    ssd: String,
    hdd: String,
}

impl Devices<'_> {
    /// Starts a server, with the backing device slowed down.
    fn serve(&self, way: Way, args: &[&str]) -> Result<Server, Failure> {
        let export = match way {
            Way::Ext4 => exports::files_in(&self.place.path("volumes")),
            Way::Nbd => exports::listening_on(&self.socket()),
        };
        Server::start(self.place, &[&["-B", &self.hdd, "--simulate-hdd"], args].concat(), &export)
    }

    fn socket(&self) -> PathBuf {
        self.place.path("nbd.sock")
    }

    fn mount(&self, server: &Server) -> Result<Mounted, Failure> {
        let device = server.block_device()?;
        let dir = self.place.path("mnt");
        say(&format!("$ mount {device} mnt"))?;
        Mounted::mount(&device, &dir)
    }

    fn target(&self, mounted: Option<&Mounted>) -> Result<RequestTarget, Failure> {
        let target = match mounted {
            Some(m) => RequestTarget::file(&m.file()),
            None => RequestTarget::nbd(&self.socket()),
        };
        target.map_err(|e| Failure::because("the volume cannot be used", e))
    }
}

fn demonstrate(place: &Place, interrupt: &mut Interrupt) -> Result<(), Failure> {
    let ssd = place.sparse("ssd", SSD_BYTES)?.display().to_string();
    let hdd = place.sparse("hdd", HDD_BYTES)?.display().to_string();
    let devices = Devices { place, ssd, hdd };
    say(
        "A cache set on two sparse files: an \"SSD\" of 256 MiB, and an \"HDD\" of 2 GiB that is slowed down",
    )?;
    say("to a disk with a moving head (about 4 ms for short seeks, 8 ms for long ones, 150 MB/s).\n")?;
    run(place, &["make", "-C", &devices.ssd, "-B", &devices.hdd, "--bucket", "64k", "--writeback"])?;
    let way = match filesystem::obstacle() {
        None => Way::Ext4,
        Some(why) => {
            say(&format!("\n(Measured by NBD instead of on a mounted ext4: {why}.)"))?;
            Way::Nbd
        }
    };
    let mut load = Load::new(match way {
        Way::Ext4 => WorkingSet::file(BLOCKS),
        Way::Nbd => WorkingSet::spread(BLOCKS, HDD_BYTES - (1 << 20)),
    });
    let mut table = Table::default();
    measure_alone(&devices, way, &mut load, &mut table, interrupt)?;
    measure_cached(&devices, way, &mut load, &mut table, interrupt)?;
    say("")?;
    out::print(&table.to_string())?;
    say(&table.verdict())?;
    prove(&devices, way, &load)
}

fn measure_alone(
    devices: &Devices<'_>,
    way: Way,
    load: &mut Load,
    table: &mut Table,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    say("\nThe HDD alone: 4 KiB requests at random, 70 % reads, 8 at a time")?;
    let server = devices.serve(way, &["--without-cache"])?;
    let mut mounted = None;
    if way == Way::Ext4 {
        let device = server.block_device()?;
        say(&format!("$ mkfs.ext4 {device}"))?;
        filesystem::make(&device)?;
        let fs = devices.mount(&server)?;
        fs.fill(&load.fill())?;
        mounted = Some(fs);
    }
    let figures = load.run_for(devices.target(mounted.as_ref())?, "HDD alone", ALONE, interrupt)?;
    table.push(PassRow::new("HDD alone", figures));
    mounted.map_or(Ok(()), Mounted::unmount)?;
    server.stop()
}

fn measure_cached(
    devices: &Devices<'_>,
    way: Way,
    load: &mut Load,
    table: &mut Table,
    interrupt: &mut Interrupt,
) -> Result<(), Failure> {
    say("\nWith the cache: the same blocks, first each block once, then repeatedly")?;
    // Every request must go through the cache, even if the cache is congested.
    let args = [
        "-C",
        &devices.ssd,
        "--set=sequential_cutoff=0",
        "--set=congested_read_threshold_us=0",
        "--set=congested_write_threshold_us=0",
        "--set=writeback_delay=3",
        "--set=writeback_percent=10",
    ];
    let mut server = devices.serve(way, &args)?;
    let mounted = if way == Way::Ext4 { Some(devices.mount(&server)?) } else { None };
    let mut before = server.stats()?;
    let figures = load.run_once(devices.target(mounted.as_ref())?, "first pass", FIRST_PASS, interrupt)?;
    let after = server.stats()?;
    table.push(PassRow::new("cached, first pass", figures).with_cache(&before, &after));
    before = after;
    let figures = load.run_for(devices.target(mounted.as_ref())?, "second pass", SECOND_PASS, interrupt)?;
    let after = server.stats()?;
    table.push(PassRow::new("cached, second pass", figures).with_cache(&before, &after));
    mounted.map_or(Ok(()), Mounted::unmount)?;
    server.stop()
}

fn prove(devices: &Devices<'_>, way: Way, load: &Load) -> Result<(), Failure> {
    let Devices { place, ssd, hdd } = devices;
    say("\nStopped in order; the cache has data that is newer than the HDD's. Verifying all of it:")?;
    run(place, &["check", ssd, hdd])?;
    let copy = place.path("copy");
    let copy_arg = copy.display().to_string();
    run(place, &["extract", "-C", ssd, "-B", hdd, "-o", &copy_arg])?;
    let blocks = match way {
        Way::Nbd => verify(load, &copy, 0)?,
        Way::Ext4 => verify_file_system(place, load, &copy_arg)?,
    };
    remove(&copy)?;
    run(place, &["drain", "-C", ssd, "-B", hdd])?;
    run(place, &["check", ssd, hdd])?;
    match way {
        Way::Nbd => verify(load, Path::new(hdd), DATA_OFFSET_BYTES)?,
        Way::Ext4 => verify_file_system(place, load, &format!("{hdd}?offset={DATA_OFFSET_BYTES}"))?,
    };

    say("\nProved:")?;
    say(&format!(
        "  - every one of {} reads under load returned the block's last write",
        load.verified_reads()
    ))?;
    say(&format!("  - cache merged over HDD (extract) has the last write of all {blocks} blocks"))?;
    say("  - after the drain the HDD alone has them too")?;
    if way == Way::Ext4 {
        say("  - both times e2fsck found nothing wrong with the file system")?;
    }
    say("  - check found every structure of the set in order, before and after")
}

/// Checks the file system in an image and verifies the file of the load in it. Returns the number of its blocks.
fn verify_file_system(place: &Place, load: &Load, image: &str) -> Result<usize, Failure> {
    say(&format!("$ e2fsck -fn {}", short(place, &[image])))?;
    filesystem::tool("e2fsck", &["-fn", image])?;
    let out = place.path("load");
    filesystem::tool("debugfs", &["-R", &format!("dump load {}", out.display()), image])?;
    let blocks = verify(load, &out, 0)?;
    remove(&out)?;
    Ok(blocks)
}

/// Offset of the data on the backing device, in bytes.
const DATA_OFFSET_BYTES: u64 = 16 * 512;

fn say(text: &str) -> Result<(), Failure> {
    out::print(&format!("{text}\n"))
}

fn remove(path: &Path) -> Result<(), Failure> {
    std::fs::remove_file(path).map_err(|e| Failure::at(path, "cannot be removed", e))
}

/// Runs the program itself, and prints the command line and the output.
fn run(place: &Place, args: &[&str]) -> Result<(), Failure> {
    say(&format!("$ ubcache {}", short(place, args)))?;
    let output = Command::new(program()?).args(args).output().map_err(Failure::of)?;
    let dir = format!("{}/", place.dir.display());
    let text = [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).replace(&dir, ""));
    for line in text.iter().flat_map(|t| t.lines()) {
        say(&format!("  {line}"))?;
    }
    if output.status.success() {
        return Ok(());
    }
    Err(Failure::Failed(format!("ubcache {} failed ({})", args.first().unwrap_or(&""), output.status)))
}

/// The command line as an operator would type it in the directory of the files.
fn short(place: &Place, args: &[&str]) -> String {
    args.join(" ").replace(&format!("{}/", place.dir.display()), "")
}

fn program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|e| Failure::because("cannot find this program", e))
}

/// Compares every block of the working set with its last write. Returns the number of blocks.
fn verify(load: &Load, path: &Path, offset: u64) -> Result<usize, Failure> {
    let file = File::open(path).map_err(|e| Failure::at(path, "cannot be opened", e))?;
    let mut block = vec![0; load::BLOCK_BYTES];
    let mut count = 0;
    for (position, expected) in load.expected() {
        file.read_exact_at(&mut block, offset + position)
            .map_err(|e| Failure::at(path, "cannot be read", e))?;
        if block != expected {
            return Err(Failure::Failed(format!(
                "{}: sector {}: expected the last write of this block, found something else",
                path.display(),
                (offset + position) / 512
            )));
        }
        count += 1;
    }
    Ok(count)
}
