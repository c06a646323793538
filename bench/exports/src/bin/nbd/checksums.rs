//! The cost of checksums: read hits over NBD of two sets, one with checksums and one without.
//!
//! Both sets are files in a directory that should be in memory, because a slow device hides the cost. The data is dirty and is not
//! written back meanwhile. The sets are measured in turn, so that a change of the machine's speed meets both.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Duration;

use super::pump::{End, Load, run};
use super::{Outcome, Peer, cpu_seconds};

/// Bytes of the volume that are written and read.
const DATA: u64 = 256 << 20;
/// Turns of each set at each depth.
const TURNS: usize = 9;

/// A served set.
struct Set {
    peer: Peer,
    /// What the server prints, one JSON object a line.
    lines: BufReader<ChildStdout>,
    socket: PathBuf,
    /// The name of the export.
    export: String,
}

/// Prints, for each depth, the time and the server's processor time of a read hit with checksums, as ratios to those without.
pub fn compare(program: &str, seconds: u32) -> Outcome<()> {
    let dir = tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" })?;
    let mut with = start(program, &dir.path().join("with"), true)?;
    let mut without = start(program, &dir.path().join("without"), false)?;
    for set in [&with, &without] {
        run(set.load(32, true), End::EachBlock)?;
    }
    println!("read hits of 4 KiB; {TURNS} turns of {seconds} s each; median (least, most)");
    println!(
        "{:<6} {:>12} {:>12} {:>24} {:>24}",
        "depth", "with, us", "without, us", "time, ratio", "cpu, ratio"
    );
    for depth in [1, 32] {
        let (mut times, mut ratios, mut cpu_ratios) = ([vec![], vec![]], vec![], vec![]);
        for _ in 0..TURNS {
            let a = with.measure(depth, seconds)?;
            let b = without.measure(depth, seconds)?;
            times[0].push(a.0);
            times[1].push(b.0);
            ratios.push(a.0 / b.0);
            cpu_ratios.push(a.1 / b.1);
        }
        let [a, b] = times.map(|mut all| median(&mut all).1);
        let spread = |all: &mut Vec<f64>| {
            let (least, median, most) = median(all);
            format!("{median:.3} ({least:.3}, {most:.3})")
        };
        println!(
            "{depth:<6} {a:>12.2} {b:>12.2} {:>24} {:>24}",
            spread(&mut ratios),
            spread(&mut cpu_ratios)
        );
    }
    let (verified, unverified) = with.checked_blocks()?;
    println!(
        "blocks that were compared with a checksum: {verified}; read without a known checksum: {unverified}"
    );
    if without.checked_blocks()?.0 > 0 || verified == 0 {
        return Err("the sets did not verify as they should".into());
    }
    Ok(())
}

/// Least, median and largest value.
fn median(all: &mut [f64]) -> (f64, f64, f64) {
    all.sort_by(f64::total_cmp);
    let at = |i: usize| all.get(i).copied().unwrap_or(f64::NAN);
    (at(0), at(all.len() / 2), at(all.len().saturating_sub(1)))
}

/// Makes a set of two files and serves it.
fn start(program: &str, dir: &Path, checksums: bool) -> Outcome<Set> {
    std::fs::create_dir(dir)?;
    let (cache, disk, socket) = (dir.join("cache"), dir.join("disk"), dir.join("nbd.sock"));
    std::fs::File::create(&cache)?.set_len(4 * DATA)?;
    std::fs::File::create(&disk)?.set_len(2 * DATA)?;
    let checksums = format!("--checksums={}", if checksums { "on" } else { "off" });
    let made = Command::new(program)
        .args(["make", "--writeback", "--block=4k", &checksums, "-C"])
        .arg(&cache)
        .arg("-B")
        .arg(&disk)
        .stdout(Stdio::null())
        .status()?;
    if !made.success() {
        return Err(format!("{program} make failed").into());
    }
    let mut child = Command::new(program)
        .args(["up", "--stdin", "--json", "--set=sequential_cutoff=0", "--set=writeback_running=0"])
        .args(["--set=congested_read_threshold_us=0", "--set=congested_write_threshold_us=0"])
        .args(["-C".as_ref(), cache.as_os_str(), "-B".as_ref(), disk.as_os_str()])
        .arg(format!("--export=nbd={}", socket.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?);
    let mut line = String::new();
    while !line.contains("nbd+unix://") {
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            return Err(format!("{program} up ended").into());
        }
    }
    let uri = line.split("nbd+unix:///").nth(1).and_then(|rest| rest.split('?').next());
    let export = uri.ok_or("no name of the export")?.to_owned();
    Ok(Set { peer: Peer { child, uri: line }, lines, socket, export })
}

impl Set {
    fn load(&self, depth: u64, write: bool) -> Load<'_> {
        Load { socket: &self.socket, export: &self.export, write, size: DATA, depth }
    }

    /// Microseconds and processor microseconds of the server for each read.
    fn measure(&self, depth: u64, seconds: u32) -> Outcome<(f64, f64)> {
        let before = cpu_seconds(self.peer.child.id())?;
        let requests = run(self.load(depth, false), End::Time(Duration::from_secs(seconds.into())))? as f64;
        let cpu = cpu_seconds(self.peer.child.id())? - before;
        Ok((f64::from(seconds) * 1e6 / requests, cpu * 1e6 / requests))
    }

    /// How many blocks matched their checksum when they were read, and how many had none.
    fn checked_blocks(&mut self) -> Outcome<(u64, u64)> {
        let input = self.peer.child.stdin.as_mut().ok_or("no standard input")?;
        writeln!(input, "stats")?;
        let mut line = String::new();
        while self.lines.read_line(&mut line)? > 0 {
            let answer: serde_json::Value = serde_json::from_str(&line)?;
            if answer["event"] == "stats" {
                let figures = &answer["set"]["checksums"];
                let number = |name: &str| figures[name].as_u64().unwrap_or(0);
                return Ok((number("verified_blocks"), number("read_unverified_blocks")));
            }
            line.clear();
        }
        Err("the server ended".into())
    }
}
