//! Load on the NBD server alone, compared with `nbdkit memory`.
//!
//! ```text
//! bench-nbd serve nbd=SOCKET [SIZE_MIB]    serves one volume in memory until its standard input ends
//! bench-nbd compare [SECONDS]              loads both with fio's nbd engine and with the client `pump`
//! bench-nbd checksums UBCACHE [SECONDS]    the cost of checksums: read hits of a set with and of a set without them
//! ```
//!
//! fio makes several system calls for each request, so at a large depth fio is the limit. `pump` sends and receives many requests
//! with one call.
//!
//! Compare the ratios of one run; absolute numbers depend on the machine's load. Needs fio and nbdkit (Debian packages of these
//! names).

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use blockio::{Driver, DriverOptions};
use export_nbd::{Endpoint, Exports, Reach, Server, ServerOptions, uri};
use rig::RamVolume;

mod checksums;
mod pump;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const DEFAULT_MIB: u64 = 1024;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args[..] {
        ["serve", endpoint] => serve(endpoint, DEFAULT_MIB),
        ["serve", endpoint, mib] => mib.parse().map_err(Into::into).and_then(|mib| serve(endpoint, mib)),
        ["compare"] => compare(5),
        ["checksums", program] => checksums::compare(program, 3),
        ["checksums", program, seconds] => {
            seconds.parse().map_err(Into::into).and_then(|seconds| checksums::compare(program, seconds))
        }
        ["compare", seconds] => seconds.parse().map_err(Into::into).and_then(compare),
        _ => {
            eprintln!(
                "usage: bench-nbd serve nbd=SOCKET [SIZE_MIB] | compare [SECONDS] | checksums UBCACHE [SECONDS]"
            );
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench-nbd: {e}");
            ExitCode::FAILURE
        }
    }
}

fn serve(option: &str, mib: u64) -> Outcome<()> {
    let endpoint = Endpoint::from_export_option(option).ok_or("the endpoint has the form nbd=SOCKET")??;
    let driver = Driver::new(DriverOptions::default())?;
    eprintln!("bench-nbd: {}", driver.backend_note());
    let exports = Exports::new();
    exports.add(RamVolume::new("ram", mib << 20).shared())?;
    let server = Server::new(driver.handle(), exports, ServerOptions::default());
    let listener = endpoint.bind(driver.reactor(), Reach::Loopback)?;
    println!("{}", uri(listener.address(), "ram", false));
    std::io::stdout().flush()?;
    server.serve_listener(listener);
    driver.block_on(async {
        // The parent closes the standard input at the end of the measurement.
        driver.reactor().blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await?;
        server.stop().await;
        Ok(())
    })
}

/// A server in another process. Dropping it ends the server.
struct Peer {
    child: Child,
    uri: String,
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ours(socket: &Path) -> Outcome<Peer> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["serve", &format!("nbd={}", socket.display())])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    Ok(Peer { child, uri: line.trim().to_string() })
}

fn nbdkit(socket: &Path) -> Outcome<Peer> {
    let child = Command::new("nbdkit")
        .args(["--foreground", "--unix"])
        .arg(socket)
        .args(["memory", &format!("{DEFAULT_MIB}M")])
        .spawn()
        .map_err(|e| format!("nbdkit (Debian package nbdkit) cannot be started: {e}"))?;
    let peer = Peer { child, uri: format!("nbd+unix:///?socket={}", socket.display()) };
    let deadline = Instant::now() + Duration::from_secs(10);
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        if Instant::now() > deadline {
            return Err("nbdkit does not listen".into());
        }
        std::thread::yield_now();
    }
    Ok(peer)
}

struct Figures {
    iops: f64,
    p99_us: f64,
    /// Processor time of the server per request.
    cpu_us: f64,
}

fn fio(peer: &Peer, job: &[&str], seconds: u32) -> Outcome<Figures> {
    let before = cpu_seconds(peer.child.id())?;
    let output = Command::new("fio")
        .args(["--name=load", "--ioengine=nbd", "--time_based", "--output-format=json", "--norandommap"])
        .arg(format!("--runtime={seconds}"))
        .arg(format!("--uri={}", peer.uri))
        .args(job)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("fio (Debian package fio) cannot be started: {e}"))?;
    if !output.status.success() {
        return Err(format!("fio failed: {}", String::from_utf8_lossy(&output.stdout)).into());
    }
    let cpu = cpu_seconds(peer.child.id())? - before;
    // Notes may come before the report.
    let start = output.stdout.iter().position(|b| *b == b'{').ok_or("fio printed no report")?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout[start..])?;
    let mut figures = Figures { iops: 0.0, p99_us: 0.0, cpu_us: 0.0 };
    let mut requests = 0.0;
    for direction in ["read", "write"] {
        let side = &report["jobs"][0][direction];
        let number = |v: &serde_json::Value| v.as_f64().unwrap_or(0.0);
        figures.iops += number(&side["iops"]);
        figures.p99_us = figures.p99_us.max(number(&side["clat_ns"]["percentile"]["99.000000"]) / 1000.0);
        requests += number(&side["total_ios"]);
    }
    figures.cpu_us = cpu * 1e6 / requests.max(1.0);
    Ok(figures)
}

/// Processor time that a process has used, from /proc.
fn cpu_seconds(pid: u32) -> Outcome<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit_once(')').ok_or("no name in stat")?.1;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let ticks: u64 =
        fields.get(11..13).ok_or("stat is short")?.iter().filter_map(|f| f.parse::<u64>().ok()).sum();
    // The kernel counts in hundredths of a second for user space, whatever its own clock is.
    Ok(ticks as f64 / 100.0)
}

fn compare(seconds: u32) -> Outcome<()> {
    let dir = std::env::temp_dir().join(format!("nbd-load-{}", std::process::id()));
    std::fs::create_dir(&dir)?;
    let result = compare_in(&dir, seconds);
    std::fs::remove_dir_all(&dir)?;
    result
}

fn compare_in(dir: &Path, seconds: u32) -> Outcome<()> {
    let jobs: [(&str, &[&str]); 7] = [
        ("4k randread qd1", &["--rw=randread", "--bs=4k", "--iodepth=1"]),
        ("4k randread qd32", &["--rw=randread", "--bs=4k", "--iodepth=32"]),
        ("4k randwrite qd1", &["--rw=randwrite", "--bs=4k", "--iodepth=1"]),
        ("4k randwrite qd32", &["--rw=randwrite", "--bs=4k", "--iodepth=32"]),
        ("4k randwrite qd32 fsync 10", &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--fsync=10"]),
        ("1M read qd8", &["--rw=read", "--bs=1M", "--iodepth=8"]),
        ("1M write qd8", &["--rw=write", "--bs=1M", "--iodepth=8"]),
    ];
    let our_server = ours(&dir.join("ours.sock"))?;
    let yardstick = nbdkit(&dir.join("nbdkit.sock"))?;
    for peer in [&our_server, &yardstick] {
        // Memory that was never written costs less to read.
        fio(peer, &["--rw=write", "--bs=1M", "--iodepth=8", "--size=1G", "--loops=1"], 2)?;
    }
    println!(
        "{:<28} {:>9} {:>9} {:>6} {:>10} {:>10} {:>9} {:>9}",
        "job", "ours/s", "nbdkit/s", "ratio", "p99 us", "p99 us", "cpu us", "cpu us"
    );
    for (name, job) in jobs {
        let a = fio(&our_server, job, seconds)?;
        let b = fio(&yardstick, job, seconds)?;
        println!(
            "{name:<28} {:>9.0} {:>9.0} {:>6.2} {:>10.0} {:>10.0} {:>9.2} {:>9.2}",
            a.iops,
            b.iops,
            a.iops / b.iops,
            a.p99_us,
            b.p99_us,
            a.cpu_us,
            b.cpu_us
        );
    }
    for (name, write) in [("pump 4k randread qd32", false), ("pump 4k randwrite qd32", true)] {
        let measure = |peer: &Peer, socket: &str| -> Outcome<(f64, f64)> {
            let before = cpu_seconds(peer.child.id())?;
            let socket = &dir.join(socket);
            let load = pump::Load { socket, export: "", write, size: DEFAULT_MIB << 20, depth: 32 };
            let requests = pump::run(load, pump::End::Time(Duration::from_secs(seconds.into())))?;
            let cpu = cpu_seconds(peer.child.id())? - before;
            Ok((requests as f64 / f64::from(seconds), cpu * 1e6 / requests as f64))
        };
        let (a, a_cpu) = measure(&our_server, "ours.sock")?;
        let (b, b_cpu) = measure(&yardstick, "nbdkit.sock")?;
        println!(
            "{name:<28} {a:>9.0} {b:>9.0} {:>6.2} {:>10} {:>10} {a_cpu:>9.2} {b_cpu:>9.2}",
            a / b,
            "",
            ""
        );
    }
    Ok(())
}
