//! Side by side: raw devices, kernel bcache, dm-cache, dm-writecache and ubcache over ublk, on the same devices with
//! the same jobs, in one boot of one virtual machine; and, on this machine, the engine beside OCF and NBD beside nbdkit.
//!
//! `subject` puts each contender onto the devices, `jobs` has one file per benchmark, `target` knows what they should
//! reach, `report` writes JSON, a table and plots: of each benchmark the newest results. Figures are for comparison
//! inside one run only: the machine is emulated.

mod fio;
mod jobs;
mod machine;
mod plot;
mod profile;
mod report;
mod result;
mod subject;
mod target;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use jobs::{Job, Work};
use machine::{Conditions, Lab};
use result::Results;
use subject::Subject;

/// Benchmarks of ubcache beside its peers, most of them in a virtual machine.
#[derive(Parser, Debug)]
#[command(name = "side-by-side", version, max_term_width = 100)]
struct Cli {
    /// Which benchmarks; all if none is named
    #[arg(value_enum, ignore_case = true)]
    jobs: Vec<Job>,
    /// How many times each is run; the median and the spread are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    repeat: u32,
    /// Adds repetitions to those that are there of the same commit, instead of replacing them
    #[arg(long)]
    add: bool,
    /// Only these contenders
    #[arg(long = "subject", value_enum, ignore_case = true)]
    subjects: Vec<Subject>,
    /// Divide run times and amounts of work by N, to try a job out: such figures are not comparable
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=60))]
    shorten_by: u32,
    /// Where results go; those of benchmarks that do not run now stay [default: bench/results]
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
    /// A document with a place for the table; not with `--profile` or `--awake`, whose figures are others
    #[arg(long)]
    document: Option<PathBuf>,
    /// Also says where the time goes while fio or sysbench runs in the virtual machine, in files beside the results (needs
    /// perf, which costs speed itself)
    #[arg(long, requires = "out")]
    profile: bool,
    /// Processors of the virtual machine never halt (idle=poll), so that waking one costs little: to see how much of a figure
    /// that is
    #[arg(long, requires = "out")]
    awake: bool,
}

impl Cli {
    fn out(&self) -> &Path {
        self.out.as_deref().unwrap_or(Path::new("bench/results"))
    }

    /// The document, if it is to have these figures.
    fn document(&self) -> Option<&Path> {
        self.document.as_deref().filter(|_| !self.profile && !self.awake)
    }

    fn conditions(&self) -> Conditions {
        Conditions { shorten_by: self.shorten_by, profile: self.profile, awake: self.awake }
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let all = |chosen: &[Job]| if chosen.is_empty() { Job::ALL.to_vec() } else { chosen.to_vec() };
    let subjects = if cli.subjects.is_empty() { Subject::ALL.to_vec() } else { cli.subjects.clone() };
    if let Err(e) = measure(&all(&cli.jobs), &subjects, &cli) {
        eprintln!("{}: {e}", cli.out().display());
        return ExitCode::FAILURE;
    }
    let table = report::read_all(cli.out()).and_then(|all| {
        report::write_table(&all, cli.out(), cli.document())?;
        Ok(report::markdown(&all))
    });
    match table {
        Ok(text) => println!("{text}\nwritten to {}", cli.out().display()),
        Err(e) => {
            eprintln!("{}: {e}", cli.out().display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// All repetitions of these benchmarks, those of this machine before the virtual one is there and takes a part of it.
fn measure(jobs: &[Job], subjects: &[Subject], cli: &Cli) -> io::Result<()> {
    let mut in_machine = Vec::new();
    for job in jobs {
        match job.work() {
            Work::OnHost(run) => on_host(*job, run, cli)?,
            Work::InMachine(run) => in_machine.push((*job, run)),
        }
    }
    if in_machine.is_empty() {
        return Ok(());
    }
    let mut lab = Lab::boot(cli.conditions());
    for (job, run) in in_machine {
        let mut results = report::begin(job, lab.describe(), cli.shorten_by, cli.out(), cli.add)?;
        for repetition in 1..=cli.repeat {
            // They take turns.
            for subject in subjects.iter().copied().filter(|s| job.suits(*s)) {
                eprintln!("{} {repetition}/{}: {}", job.name(), cli.repeat, subject.name());
                let samples = lab.measured(|lab| run(lab, subject, &mut results));
                if let Some(samples) = samples {
                    let name = format!("{}-{}.txt", job.name(), subject.name().replace(' ', "-"));
                    std::fs::create_dir_all(cli.out())?;
                    std::fs::write(cli.out().join(name), samples)?;
                }
                // What is there so far: a run takes long, and a part of it is worth keeping.
                report::write(&results, cli.out())?;
            }
        }
    }
    Ok(())
}

fn on_host(job: Job, run: fn(&mut Results), cli: &Cli) -> io::Result<()> {
    let mut results = report::begin(job, machine::host(), cli.shorten_by, cli.out(), cli.add)?;
    for repetition in 1..=cli.repeat {
        eprintln!("{} {repetition}/{}", job.name(), cli.repeat);
        run(&mut results);
        report::write(&results, cli.out())?;
    }
    Ok(())
}
