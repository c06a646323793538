//! The load in a guest: runs a plan against a device, or says what the device holds.
//!
//! usage: ubcache-vm-load run DEV KEY=VALUE... | ubcache-vm-load map DEV TAG
//!
//! `run` writes a line `<seed> <worker> <requests>` to `/dev/ports/progress` after each flush; `map` writes a u32 for
//! each sector to stdout.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;

use ubcache_vm::load::stamp::SECTOR;
use ubcache_vm::load::{FileTarget, Plan, run};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args[..] {
        ["run", device, ref plan @ ..] => Plan::parse(plan.iter().copied()).and_then(|p| load(device, &p)),
        ["map", device, tag] => map(device, tag),
        _ => Err("usage: ubcache-vm-load run DEV KEY=VALUE... | map DEV TAG".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ubcache-vm-load: {e}");
            ExitCode::FAILURE
        }
    }
}

fn load(device: &str, plan: &Plan) -> Result<(), String> {
    let progress = OpenOptions::new().write(true).open("/dev/ports/progress").map_err(|e| e.to_string())?;
    let progress = Mutex::new(progress);
    let report = |worker: u32, requests: u32| {
        let line = format!("{} {worker} {requests}\n", plan.seed);
        let mut to = progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        to.write_all(line.as_bytes()).expect("the host listens");
    };
    run::run(plan, |_| FileTarget::open(Path::new(device), true), report)
        .map_err(|e| format!("{device}: {e}"))
}

fn map(device: &str, tag: &str) -> Result<(), String> {
    let tag: u32 = tag.parse().map_err(|e| format!("{tag}: {e}"))?;
    let read = || -> io::Result<_> {
        let bytes = File::open(device)?.seek(SeekFrom::End(0))?;
        let map =
            run::read_map(&mut FileTarget::open(Path::new(device), false)?, bytes / SECTOR as u64, tag)?;
        io::stdout().write_all(&map.to_bytes())?;
        Ok(map)
    };
    let map = read().map_err(|e| format!("{device}: {e}"))?;
    for (sector, bytes) in map.foreign {
        eprintln!("sector {sector} begins with {bytes:02x?}");
    }
    Ok(())
}
