//! The load in a guest: runs a plan against a device, or says what the device holds.
//!
//! usage: ubcache-vm-load run DEV KEY=VALUE... | map DEV TAG | files DIR FIRST LAST WORKERS | verify DIR REPORTED... |
//! resume DISK OUT ERR COMMAND...
//!
//! `run` writes a line `<seed> <worker> <requests>` to `/dev/ports/progress` after each flush; `map` writes a u32 for
//! each sector to stdout. `files` reports `files <worker> <request>` in the same way; `verify` takes for each worker the
//! last request that was reported, and prints the newest request found. `resume` starts a server whose clients wait for
//! it, with these files as its output, and prints `<pid> <ready> <moves>`: its process, after how many microseconds it
//! has said that it is ready, and after how many the disk has answered a request.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ubcache_vm::load::racing::{self, Racing};
use ubcache_vm::load::stamp::SECTOR;
use ubcache_vm::load::{FileTarget, Plan, Target, files, run};
use ubcache_vm::said::TIMEOUT;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args[..] {
        ["run", device, ref plan @ ..] => Plan::parse(plan.iter().copied()).and_then(|p| load(device, &p)),
        ["map", device, tag] => map(device, tag),
        ["files", dir, first, last, workers] => replace_files(dir, first, last, workers),
        ["verify", dir, ref reported @ ..] => verify_files(dir, reported),
        ["resume", disk, out, err, command, ref args @ ..] => resume(disk, [out, err], command, args),
        _ => {
            Err("usage: ubcache-vm-load run DEV KEY=VALUE... | map DEV TAG | files DIR FIRST LAST WORKERS | \
                  verify DIR REPORTED... | resume DISK OUT ERR COMMAND..."
                .into())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ubcache-vm-load: {e}");
            ExitCode::FAILURE
        }
    }
}

fn number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|e| format!("{text}: {e}"))
}

fn replace_files(dir: &str, first: &str, last: &str, workers: &str) -> Result<(), String> {
    let (first, last, workers) = (number(first)?, number(last)?, number(workers)?);
    let progress = OpenOptions::new().write(true).open("/dev/ports/progress").map_err(|e| e.to_string())?;
    let progress = Mutex::new(progress);
    let (progress, dir) = (&progress, Path::new(dir));
    let worker = |worker: u32| {
        files::run(dir, worker, first, last, |request| {
            let mut to = progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            to.write_all(format!("files {worker} {request}\n").as_bytes()).expect("the host listens");
        })
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..workers).map(|w| scope.spawn(move || worker(w))).collect();
        let ended = all.into_iter().map(|t| t.join().map_err(|_| "a worker panicked".to_owned()));
        ended.into_iter().try_for_each(|r| r?.map_err(|e| e.to_string()))
    })
}

fn verify_files(dir: &str, reported: &[&str]) -> Result<(), String> {
    let mut newest = 0;
    for (worker, reported) in (0..).zip(reported) {
        newest =
            newest.max(files::verify(Path::new(dir), worker, number(reported)?).map_err(|e| e.to_string())?);
    }
    println!("{newest}");
    Ok(())
}

fn load(device: &str, plan: &Plan) -> Result<(), String> {
    let progress = OpenOptions::new().write(true).open("/dev/ports/progress").map_err(|e| e.to_string())?;
    let progress = Mutex::new(progress);
    let report = |worker: u32, requests: u32| {
        let line = format!("{} {worker} {requests}\n", plan.seed);
        let mut to = progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        to.write_all(line.as_bytes()).expect("the host listens");
    };
    run::run(plan, |_| open(device, true), report).map_err(|e| format!("{device}: {e}"))
}

fn open(device: &str, write: bool) -> io::Result<impl Target> {
    Ok(Racing::new(FileTarget::open(Path::new(device), write)?, racing::counted_by_the_kernel))
}

fn map(device: &str, tag: &str) -> Result<(), String> {
    let tag: u32 = tag.parse().map_err(|e| format!("{tag}: {e}"))?;
    let read = || -> io::Result<_> {
        let bytes = File::open(device)?.seek(SeekFrom::End(0))?;
        let map = run::read_map(&mut open(device, false)?, bytes / SECTOR as u64, tag)?;
        io::stdout().write_all(&map.to_bytes())?;
        Ok(map)
    };
    let map = read().map_err(|e| format!("{device}: {e}"))?;
    for (sector, bytes) in map.foreign {
        eprintln!("sector {sector} begins with {bytes:02x?}");
    }
    Ok(())
}

/// Requests that a disk of the kernel has answered.
fn answered(disk: &str) -> Result<u64, String> {
    let path = format!("/sys/block/{disk}/stat");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let fields: Vec<u64> = text.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    // Reads, writes, discards, flushes.
    Ok([0, 4, 11, 15].into_iter().filter_map(|i| fields.get(i)).sum())
}

fn resume(disk: &str, [out, err]: [&str; 2], command: &str, args: &[&str]) -> Result<(), String> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: io::Error| format!("{what}: {e}")
    };
    let before = answered(disk)?;
    let messages = OpenOptions::new().append(true).create(true).open(err).map_err(failed(err))?;
    let output = File::create(out).map_err(failed(out))?;
    let mut server = Command::new(command);
    server.args(args).stdin(Stdio::null()).stdout(output).stderr(messages);
    let from = Instant::now();
    let mut child = server.spawn().map_err(failed(command))?;
    let (mut ready, mut moves) = (None, None);
    loop {
        if ready.is_none() && std::fs::read_to_string(out).map_err(failed(out))?.contains("ready") {
            ready = Some(from.elapsed());
        }
        if moves.is_none() && answered(disk)? > before {
            moves = Some(from.elapsed());
        }
        if let (Some(ready), Some(moves)) = (ready, moves) {
            println!("{} {} {}", child.id(), ready.as_micros(), moves.as_micros());
            return Ok(());
        }
        if let Some(code) = child.try_wait().map_err(failed(command))? {
            return Err(format!("{command} has ended: {code}"));
        }
        if from.elapsed() > TIMEOUT {
            return Err(format!("ready after {ready:?}, an answer after {moves:?}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
