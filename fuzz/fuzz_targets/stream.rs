//! Streams of operations, with crashes in between, against the model: see `sim::rot`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sim::rot::fuzz_stream;

fuzz_target!(|input: &[u8]| {
    if let Err(why) = fuzz_stream(input) {
        panic!("{why}");
    }
});
