//! Runs seeds: `ubcache-sim --seeds N` from a starting seed on, or one with `--seed S`; or a plan: `--plan FILE`.
//!
//! Prints what happened in total; a failing seed is printed with the command that replays it, and the exit code is 1.
//! `--shrink FILE` makes a failing seed or plan short and saves it.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Instant;

use sim::plan::Plan;
use sim::run::{Report, run};
use sim::shrink::Shrink;

const USAGE: &str =
    "usage: ubcache-sim [--seed S | --seeds N [--from S] | --plan FILE] [--keep-going] [--verbose]
                   [--print] [--shrink FILE [--runs N]]
  --seeds N      run N seeds, from 0 or --from on
  --seed S       run one seed
  --plan FILE    run a plan
  --keep-going   go on after a failure
  --verbose      say what happens, event by event
  --print        print the plan instead of running it
  --shrink FILE  if it fails, make the plan short and save it; at most --runs runs (20000)";

struct Args {
    from: u64,
    count: u64,
    plan: Option<String>,
    keep_going: bool,
    verbose: bool,
    print: bool,
    shrink: Option<String>,
    runs: u64,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut it = Args {
        from: 0,
        count: 1000,
        plan: None,
        keep_going: false,
        verbose: false,
        print: false,
        shrink: None,
        runs: 20_000,
    };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg}: expected a value\n{USAGE}"));
        let number = |value: Result<String, String>| {
            let value = value?;
            value.parse::<u64>().map_err(|e| format!("{arg} {value}: {e}"))
        };
        match arg.as_str() {
            "--seed" => (it.from, it.count) = (number(value())?, 1),
            "--seeds" => it.count = number(value())?,
            "--from" => it.from = number(value())?,
            "--plan" => it.plan = Some(value()?),
            "--keep-going" => it.keep_going = true,
            "--verbose" => it.verbose = true,
            "--print" => it.print = true,
            "--shrink" => it.shrink = Some(value()?),
            "--runs" => it.runs = number(value())?,
            #[cfg(feature = "canary")]
            "--bug" => {
                let name = value()?;
                let bug = engine::canary::Bug::ALL.iter().find(|b| format!("{b:?}") == name);
                let Some(bug) = bug else { return Err(format!("unknown bug {name}")) };
                engine::canary::set_bug(Some(*bug));
            }
            _ => return Err(format!("unknown option {arg}\n{USAGE}")),
        }
    }
    Ok(it)
}

fn load(file: &str) -> Result<Plan, String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{file}: {e}"))?;
    Plan::from_text(&text).map_err(|e| format!("{file}: {e}"))
}

/// Makes a plan short and saves it.
fn shrink(plan: &Plan, file: &str, runs: u64) -> Result<(), String> {
    let fails = |p: &Plan| run(p, false).err().map(|f| f.what);
    let Some(search) = Shrink::new(plan, runs, fails) else { return Err("it does not fail".into()) };
    let (short, what) = search.run();
    let first = what.lines().next().unwrap_or_default();
    std::fs::write(file, short.to_text(first)).map_err(|e| format!("{file}: {e}"))?;
    println!("{file}: {} steps of {}: {first}", short.len(), plan.len());
    println!("replay: cargo run -p ubcache-sim --release -- --plan {file} --verbose");
    Ok(())
}

fn go(args: &Args) -> Result<bool, String> {
    let one = args.plan.as_deref().map(load).transpose()?;
    let seeds = if one.is_some() { 0..1 } else { args.from..args.from.saturating_add(args.count) };
    let began = Instant::now();
    let mut total = Report::default();
    let mut failed = 0;
    for seed in seeds {
        let plan = one.clone().unwrap_or_else(|| Plan::from_seed(seed));
        if args.print {
            print!("{}", plan.to_text(""));
            continue;
        }
        match run(&plan, args.verbose) {
            Ok(report) => total.add(&report),
            Err(failure) => {
                println!("{failure}");
                failed += 1;
                if let Some(file) = &args.shrink {
                    shrink(&plan, file, args.runs)?;
                }
                if !args.keep_going {
                    break;
                }
            }
        }
    }
    if args.print {
        return Ok(true);
    }
    println!("{total:#?}");
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{} seeds in {seconds:.1} s, {} crashes: {:.0} crash-and-recover cycles per second, {:.0} per second of \
         processor time; {failed} failed",
        total.runs + failed,
        total.crashes,
        total.crashes as f64 / seconds,
        total.crashes as f64 / processor_seconds().unwrap_or(seconds),
    );
    Ok(failed == 0)
}

/// Processor time of this process, where the system tells.
fn processor_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/schedstat").ok()?;
    let ns: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(ns as f64 / 1e9)
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)).and_then(|args| go(&args)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::from(2)
        }
    }
}
