//! Runs seeds: `ubcache-sim --seeds N` from a starting seed on, or one with `--seed S`.
//!
//! Prints what happened in total; a failing seed is printed with its options and the command that replays it, and the
//! exit code is 1.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Instant;

use sim::run::{Report, run_seed};

const USAGE: &str = "usage: ubcache-sim [--seed S | --seeds N [--from S]] [--keep-going] [--verbose]";

struct Args {
    from: u64,
    count: u64,
    keep_going: bool,
    verbose: bool,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut it = Args { from: 0, count: 1000, keep_going: false, verbose: false };
    while let Some(arg) = args.next() {
        let mut number = || {
            let value = args.next().ok_or_else(|| format!("{arg}: expected a number"))?;
            value.parse::<u64>().map_err(|e| format!("{arg} {value}: {e}"))
        };
        match arg.as_str() {
            "--seed" => (it.from, it.count) = (number()?, 1),
            "--seeds" => it.count = number()?,
            "--from" => it.from = number()?,
            "--keep-going" => it.keep_going = true,
            "--verbose" => it.verbose = true,
            _ => return Err(format!("unknown option {arg}\n{USAGE}")),
        }
    }
    Ok(it)
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(a) => a,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::from(2);
        }
    };
    if args.count == 1 {
        eprintln!("{:#?}", sim::options::Options::from_seed(args.from));
    }
    let began = Instant::now();
    let mut total = Report::default();
    let mut failed = 0;
    for seed in args.from..args.from.saturating_add(args.count) {
        match run_seed(seed, args.verbose) {
            Ok(report) => total.add(&report),
            Err(failure) => {
                println!("{failure}");
                failed += 1;
                if !args.keep_going {
                    break;
                }
            }
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("{total:#?}");
    println!(
        "{} seeds in {seconds:.1} s ({:.0}/s), {failed} failed",
        total.runs + failed,
        total.runs as f64 / seconds
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
