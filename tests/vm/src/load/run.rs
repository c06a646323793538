//! Running a plan, and reading what a volume holds.

use std::io;

use super::model::Map;
use super::plan::{Op, Plan};
use super::stamp::{self, SECTOR};
use super::target::Target;

/// Runs all workers to the end, or until the device fails.
///
/// `open` gives a worker its target; `flushed(worker, index)` is called after the flush that was that worker's request
/// number `index`: all its writes before are durable. A last flush is reported with the number of requests.
///
/// # Errors
/// Of the device; or what a read has returned wrongly.
pub fn run<T: Target>(
    plan: &Plan,
    open: impl Fn(u32) -> io::Result<T> + Sync,
    flushed: impl Fn(u32, u32) + Sync,
) -> io::Result<()> {
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..plan.workers)
            .map(|w| {
                let (open, flushed) = (&open, &flushed);
                scope.spawn(move || worker(plan, w, &mut open(w)?, &|index| flushed(w, index)))
            })
            .collect();
        workers
            .into_iter()
            .map(|w| w.join().map_err(|_| io::Error::other("a worker panicked")).and_then(|r| r))
            .fold(Ok(()), Result::and)
    })
}

fn worker<T: Target>(plan: &Plan, worker: u32, target: &mut T, flushed: &dyn Fn(u32)) -> io::Result<()> {
    let part = plan.part(worker);
    // What it wrote itself; before that a sector may hold what it likes, but must be of this volume.
    let mut known = vec![None; (part.end - part.start) as usize];
    let mut bytes = Vec::new();
    for index in 0..plan.ops {
        match plan.op(worker, index) {
            Op::Write { start, sectors, version } => {
                bytes.resize(sectors as usize * SECTOR, 0);
                stamp::fill(&mut bytes, start, version, plan.tag);
                target.write(start, &bytes)?;
                let at = (start - part.start) as usize;
                known.iter_mut().skip(at).take(sectors as usize).for_each(|k| *k = Some(version));
            }
            Op::Read { start, sectors } => {
                let read = target.read(start, sectors)?;
                let at = (start - part.start) as usize;
                for ((sector, bytes), known) in
                    (start..).zip(read.chunks_exact(SECTOR)).zip(known.iter().skip(at))
                {
                    let found = stamp::version(bytes, sector, plan.tag);
                    if found == stamp::FOREIGN || known.is_some_and(|k| k != found) {
                        return Err(io::Error::other(format!(
                            "worker {worker}, request {index}: sector {sector}: expected version {known:?}, found \
                             {found}: {:02x?}",
                            bytes.get(..16)
                        )));
                    }
                }
            }
            Op::Flush => {
                target.flush()?;
                flushed(index);
            }
        }
    }
    target.flush()?;
    flushed(plan.ops);
    Ok(())
}

/// Reads a whole volume.
///
/// # Errors
/// Those of the device.
pub fn read_map<T: Target>(target: &mut T, sectors: u64, tag: u32) -> io::Result<Map> {
    const PIECE: u64 = 1024;
    let mut map = Map::default();
    for start in (0..sectors).step_by(PIECE as usize) {
        let bytes = target.read(start, (sectors - start).min(PIECE) as u32)?;
        map.add(start, &bytes, tag);
    }
    Ok(map)
}
