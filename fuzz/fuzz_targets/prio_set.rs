//! Prio sets, with any number of entries asked for.
#![no_main]

use format::{BucketPrio, parse_prio_set};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, &[u8])| {
    let (entries, bytes) = input;
    let mut table = vec![BucketPrio::default(); usize::from(entries)];
    let sealed = fuzz::sealed_prio_set(bytes);
    let _ = parse_prio_set(bytes, fuzz::MAGIC, &mut table);
    let _ = parse_prio_set(&sealed, fuzz::MAGIC, &mut table);
});
