//! The heap is resident ahead of need. A process of its own without a test harness: the settings of the allocator are the
//! process's, and a harness has threads before they are made.

use std::time::{Duration, Instant};

use blockio::heap;
use blockio::refill::Refill;

const MIB: usize = 1 << 20;
const RESERVE: usize = 16 * MIB;

/// Page faults of this thread that were served without reading a device.
fn minor_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("procfs");
    let (_, behind_name) = stat.rsplit_once(") ").expect("the name in parentheses");
    let faults = behind_name.split(' ').nth(7).and_then(|word| word.parse().ok());
    faults.unwrap_or_else(|| panic!("{stat}"))
}

/// Waits until the thread has looked at the heap as it is now, and found enough of it resident.
fn until_filled_up(refill: &Refill) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let looks = refill.looks();
    // The first of them may have begun before.
    while refill.looks() < looks + 2 || refill.ahead() < RESERVE - RESERVE / 8 {
        assert!(
            Instant::now() < deadline,
            "{} bytes are ahead after {} looks",
            refill.ahead(),
            refill.looks()
        );
        std::thread::yield_now();
    }
}

/// Much more is used than what is kept ahead, and each page is there before it is used, also after it was given back.
fn main() {
    if !heap::retain_freed_memory() {
        return println!("NOT CHECKED: another C library than glibc");
    }
    // A gap that is larger than the free end of the heap: what is to grow the heap must not go there.
    let freed = vec![1_u8; 3 * MIB];
    let behind = vec![1_u8; 64];
    drop(freed);
    let refill = Refill::start().expect("a thread");
    let had = refill.hold(RESERVE, 32 * MIB);
    assert!(had >= RESERVE - RESERVE / 8, "{had} bytes");
    drop(behind);
    let mut used: Vec<Vec<u8>> = Vec::with_capacity(100);
    let before = minor_faults();
    for n in 0..12 {
        // Large and small, as an index and buffers are.
        used.push(vec![n; 4 * MIB]);
        used.extend((0..8).map(|_| vec![n; MIB / 4]));
        until_filled_up(&refill);
    }
    let faults = minor_faults() - before;
    // 72 MiB are 18432 pages; 16 MiB of them are there without the thread that fills up.
    assert!(faults < 500, "{faults} page faults while {} pieces were used", used.len());
    println!("{faults} page faults for 72 MiB");

    // What is freed between pieces in use goes back, and is there again before it is used again.
    let kept: Vec<Vec<u8>> = used.drain(..).skip(8).step_by(9).collect();
    assert_eq!(kept.len(), 12, "a piece of each round stays in use");
    let full = resident();
    refill.give_back();
    let deadline = Instant::now() + Duration::from_secs(60);
    while resident() + 56 * MIB > full {
        assert!(Instant::now() < deadline, "{} of {full} bytes are resident", resident());
        std::thread::yield_now();
    }
    until_filled_up(&refill);
    let before = minor_faults();
    for n in 0..12 {
        used.extend((0..4).map(|_| vec![n; MIB]));
        until_filled_up(&refill);
    }
    let faults = minor_faults() - before;
    assert!(faults < 500, "{faults} page faults while memory that was given back was used again");
    assert!(resident() < full + 2 * RESERVE, "{} bytes instead of {full}", resident());
    println!("{faults} page faults for 48 MiB that were given back");
}

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages = statm.split(' ').nth(1).and_then(|word| word.parse::<usize>().ok());
    pages.unwrap_or_else(|| panic!("{statm}")) * 4096
}
