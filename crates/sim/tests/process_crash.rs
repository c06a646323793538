//! A process crash, with memory that outlives the process (`io::CrashLogMemory`): no answered write is lost, flushed or not.
//! Without such memory the same scenario loses writes, as at a power loss.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::rc::Rc;

use engine::{SetOptions, Volume};
use format::{CacheMode, Sector, Sectors};
use io::{CrashLogRef, Handle, Nanos, Rng, WriteFlags, ZeroFlags};
use sim::crash_log::Memory;
use sim::hardware::{Hardware, Layout};
use sim::stamp::{Content, SECTOR, decode, fill_data};
use sim::world::{Order, Outcome, World};

const SIZE: u64 = 2048;
const WORKERS: u64 = 8;
const LIVES: u64 = 5;

/// What each sector may hold: what was answered last, and what was asked for since.
struct Model {
    allowed: Vec<Vec<Content>>,
    write: u32,
    answered: usize,
}

impl Model {
    fn ask(&mut self, at: u64, n: u64, content: impl Fn(u64) -> Content) {
        for s in at..at + n {
            self.allowed[s as usize].push(content(s));
        }
    }

    fn answered(&mut self, at: u64, n: u64) {
        self.answered += 1;
        for s in at..at + n {
            let allowed = &mut self.allowed[s as usize];
            allowed.drain(..allowed.len() - 1);
        }
    }
}

async fn work(rt: Handle, v: Rc<Volume>, model: Rc<RefCell<Model>>, worker: u64) {
    let mut rng = Rng::new(rt.random());
    let region = SIZE / WORKERS;
    loop {
        let n = 1 + rng.next_u64() % 24;
        let at = worker * region + rng.next_u64() % (region - n);
        let (sector, sectors) = (Sector(at), Sectors(n));
        let result = match rng.next_u64() % 16 {
            0 => v.flush().await,
            1 => {
                model.borrow_mut().ask(at, n, |_| Content::Zero);
                let result = v.write_zeroes(sector, sectors, ZeroFlags::default()).await;
                model.borrow_mut().answered(at, n);
                result
            }
            dice => {
                let mut b = rt.pool().take(n as usize * SECTOR);
                let write = {
                    let m = &mut *model.borrow_mut();
                    m.write += 1;
                    let write = m.write;
                    m.ask(at, n, |sector| Content::Data { volume: 0, sector, write });
                    write
                };
                for (i, s) in b.as_mut().chunks_mut(SECTOR).enumerate() {
                    fill_data(s, 0, at + i as u64, write);
                }
                let result = v
                    .write(sector, sectors, b, 0, WriteFlags { fua: dice == 2, ..WriteFlags::default() })
                    .await;
                model.borrow_mut().answered(at, n);
                result
            }
        };
        result.unwrap();
        if rng.next_u64().is_multiple_of(4) {
            rt.sleep(Nanos(rng.next_u64() % 2_000_000)).await;
        }
    }
}

/// Lives one after the other; the sectors that were not as they should be, and how many requests were answered.
fn lives(seed: u64, survives: bool) -> (Vec<String>, usize) {
    let world = World::new(seed);
    let mut rng = Rng::new(seed ^ 0x5eed);
    let modes = [CacheMode::Writeback, CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Writearound];
    let mode = modes[(rng.next_u64() % 4) as usize];
    let mut layout = Layout::small(mode);
    layout.bucket_sectors = [8, 16, 64][(rng.next_u64() % 3) as usize];
    let hardware = Hardware::new(&world, layout);
    let memory = Rc::new(Memory::default());
    let first = |sector| vec![Content::Data { volume: 0, sector, write: 0 }];
    let model = Model { allowed: (0..SIZE).map(first).collect(), write: 0, answered: 0 };
    let model = Rc::new(RefCell::new(model));
    let wrong = Rc::new(RefCell::new(Vec::new()));
    for life in 0..LIVES {
        let mut m = hardware.boot(Order::Random);
        let (rt, parts) = (m.handle(), hardware.parts(&m));
        let crash_log = survives.then(|| CrashLogRef(memory.clone()));
        let options = SetOptions { seed, crash_log, ..SetOptions::default() };
        let (theirs, errors) = (model.clone(), wrong.clone());
        let lets_it_live = life == LIVES - 1;
        let task = m.handle().spawn(async move {
            let (set, volumes) = parts.open(options).await.unwrap();
            let v = volumes[0].clone();
            v.set("sequential_cutoff", "0").await.unwrap();
            for start in (0..SIZE).step_by(64) {
                let (b, r) = v.read(Sector(start), Sectors(64), rt.pool().take(64 * SECTOR), 0).await;
                r.unwrap();
                for (sector, found) in (start..).zip(b.as_slice().chunks(SECTOR).map(decode)) {
                    let allowed = &mut theirs.borrow_mut().allowed[sector as usize];
                    if !allowed.contains(&found) {
                        let said = format!(
                            "life {life}, sector {sector}: expected one of {allowed:?}, found {found:?}"
                        );
                        errors.borrow_mut().push(said);
                    }
                    *allowed = vec![found];
                }
            }
            if lets_it_live {
                set.stop().await.unwrap();
                return;
            }
            let workers: Vec<_> =
                (0..WORKERS).map(|i| rt.spawn(work(rt.clone(), v.clone(), theirs.clone(), i))).collect();
            for w in workers {
                w.await;
            }
        });
        let span = if lets_it_live { Nanos::from_secs(1000) } else { Nanos(rng.next_u64() % 1_000_000_000) };
        let outcome = m.run(&task, span);
        assert_eq!(matches!(outcome, Outcome::Done(())), lets_it_live, "seed {seed}, life {life}");
        hardware.kill(m);
    }
    (wrong.take(), model.borrow().answered)
}

#[test]
fn nothing_that_was_answered_is_lost() {
    let mut answered = 0;
    for seed in 0..12 {
        let (wrong, n) = lives(seed, true);
        assert!(wrong.is_empty(), "seed {seed}: {} sectors, the first: {}", wrong.len(), wrong[0]);
        answered += n;
    }
    assert!(answered > 3_000, "{answered} requests are no test");
}

#[test]
fn without_memory_that_outlives_the_process_writes_are_lost() {
    assert!((0..20).any(|seed| !lives(seed, false).0.is_empty()));
}
