//! Key lists: what is read is written again unchanged, up to the first error.
#![no_main]

use format::{Keys, Sectors};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut written = Vec::new();
    for key in Keys::new(bytes).flatten() {
        key.encode_into(&mut written);
        let _ = (key.start(), fuzz::geometry().ptr_bucket(key.ptr, key.size()));
        let mut cut = key;
        cut.cut_front(Sectors(key.size().0 / 2));
        cut.cut_back(Sectors(u64::MAX));
        assert_eq!(cut.size(), Sectors::ZERO);
    }
    assert!(bytes.starts_with(&written));
});
