//! Load on the FUSE export alone, compared with a loop device over a file in memory.
//!
//! ```text
//! bench-fuse serve DIR [MIB] [THREADS]     serves one volume in memory until its standard input ends
//! bench-fuse compare [SECONDS] [THREADS]   loads both with fio
//! ```
//!
//! Compare the figures of one run; absolute numbers depend on the machine's load. Needs root and fio (Debian package of that
//! name).

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;

use blockio::bridge::oneshot;
use blockio::{Driver, DriverOptions};
use export_fuse::{Fuse, FuseOptions, ServeOptions, serve};
use rig::{RamDisk, RamVolume};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const MIB: u64 = 1 << 20;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: u64| args.get(i).map_or(Ok(default), |a| a.parse::<u64>());
    let threads = |i| number(i, FuseOptions::default().threads as u64);
    let outcome = match args.first().map(String::as_str) {
        Some("serve") if args.len() > 1 => (|| {
            let ended = Box::new(|_: &Path, _: &Path| {
                let mut rest = Vec::new();
                std::io::stdin().read_to_end(&mut rest)?;
                Ok(())
            });
            with_export(Path::new(&args[1]), number(2, 1024)?, threads(3)? as usize, ended)
        })(),
        Some("compare") => (|| compare(number(1, 5)?, threads(2)? as usize))(),
        _ => {
            eprintln!("usage: bench-fuse serve DIR [MIB] [THREADS] | bench-fuse compare [SECONDS] [THREADS]");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench-fuse: {e}");
            ExitCode::FAILURE
        }
    }
}

type Work = Box<dyn FnOnce(&Path, &Path) -> Outcome<()>>;

/// Does `work` with the file and the loop device of a volume in memory.
fn with_export(dir: &Path, mib: u64, threads: usize, work: Work) -> Outcome<()> {
    let (ready, started) = mpsc::channel();
    let (stop, stopped) = oneshot::<()>();
    let at = dir.to_path_buf();
    let server = std::thread::spawn(move || -> Outcome<()> {
        let driver = Driver::new(DriverOptions::default())?;
        let volume = RamVolume::on(RamDisk::new("ram", mib * MIB).with_garbage().shared()).shared();
        let served = serve(&driver.handle(), volume, ServeOptions::default());
        driver.block_on(async {
            let options = FuseOptions { threads, ..FuseOptions::default() };
            let mut fuse = Fuse::mount(&at, vec![served], options).await?;
            fuse.attach_loop_devices().await?;
            let exported = fuse.exports().next().cloned();
            let _ = ready.send(exported);
            // Ends when the sender is used or dropped.
            let _ = stopped.await;
            Ok(fuse.stop().await.map_err(|refused| refused.error)?)
        })
    });
    let result = match started.recv() {
        Ok(Some(exported)) => {
            let device = exported.loop_device.unwrap_or_default();
            println!("ram ready: {} (file {})", device.display(), exported.file.display());
            work(&exported.file, &device)
        }
        // The thread returns the error.
        _ => Ok(()),
    };
    stop.send(());
    server.join().map_err(|_| "the server's thread panicked")??;
    result
}

fn compare(seconds: u64, threads: usize) -> Outcome<()> {
    let dir = tempfile::tempdir()?;
    let image = PathBuf::from("/dev/shm/ubcache-load.img");
    std::fs::File::create(&image)?.set_len(256 * MIB)?;
    let plain = text(&["losetup", "--show", "--direct-io=on", "-f", &image.to_string_lossy()])?;
    let plain = PathBuf::from(plain.trim());
    let yardstick = plain.clone();
    let work: Work = Box::new(move |file, device| {
        println!("{:<26}{:>12}{:>12}{:>14}", "4k, IOPS", "FUSE file", "loop", "loop on tmpfs");
        for (what, depth) in [("randread", 1), ("randwrite", 1), ("randread", 16), ("randwrite", 16)] {
            let figures =
                [file, device, &yardstick].map(|target| fio(target, what, ("4k", depth), seconds, "iops"));
            let [file, device, plain] = figures;
            let (file, device, plain) = (file?, device?, plain?);
            println!("{:<26}{file:>12.0}{device:>12.0}{plain:>14.0}", format!("{what} qd{depth}"));
        }
        println!("{:<26}{:>12}{:>12}{:>14}", "1M, MiB/s", "", "", "");
        for what in ["read", "write"] {
            let figures =
                [file, device, &yardstick].map(|target| fio(target, what, ("1M", 4), seconds, "bw"));
            let [file, device, plain] = figures;
            let (file, device, plain) = (file? / 1024.0, device? / 1024.0, plain? / 1024.0);
            println!("{:<26}{file:>12.0}{device:>12.0}{plain:>14.0}", format!("{what} qd4"));
        }
        Ok(())
    });
    let result = with_export(&dir.path().join("m"), 256, threads, work);
    text(&["losetup", "-d", &plain.to_string_lossy()])?;
    std::fs::remove_file(&image)?;
    result
}

/// `requests`: their size and how many are under way.
fn fio(target: &Path, what: &str, requests: (&str, u32), seconds: u64, figure: &str) -> Outcome<f64> {
    let (block, depth) = requests;
    let (target, depth) = (format!("--filename={}", target.display()), format!("--iodepth={depth}"));
    let (what_option, block) = (format!("--rw={what}"), format!("--bs={block}"));
    let runtime = format!("--runtime={seconds}");
    let report = text(&[
        "fio",
        "--name=load",
        &target,
        &what_option,
        &block,
        &depth,
        &runtime,
        "--time_based",
        "--direct=1",
        "--ioengine=io_uring",
        "--size=256m",
        "--output-format=terse",
        "--terse-version=3",
    ])?;
    // Fields of the terse format, counted from 0: read bandwidth 6 and IOPS 7, write bandwidth 47, IOPS 48.
    let at = if what.ends_with("read") { 6 } else { 47 } + usize::from(figure == "iops");
    let line = report.lines().find(|l| l.starts_with("3;")).ok_or("fio said nothing")?;
    Ok(line.split(';').nth(at).ok_or("fio said too little")?.parse()?)
}

fn text(command: &[&str]) -> Outcome<String> {
    let output = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{}: {said}", command[0]).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
