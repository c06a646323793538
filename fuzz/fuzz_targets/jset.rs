//! Journal buckets, and the choice among the entries found in them.
#![no_main]

use format::replay::check_last_seq;
use format::{parse_bucket, select_replay};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let sealed = fuzz::sealed_jset(bytes);
    for bytes in [bytes, &sealed] {
        let Ok(scan) = parse_bucket(bytes, fuzz::MAGIC, fuzz::BLOCK) else { continue };
        assert!(scan.stopped_at <= bytes.len());
        for (_, jset) in &scan.entries {
            let _ = jset.check_roots(&fuzz::geometry(), 0);
            let _ = jset.check_keys(&fuzz::geometry());
        }
        if let Ok(replay) = select_replay(scan.entries.into_iter().map(|(_, jset)| jset), true) {
            let _ = check_last_seq(&replay);
        }
    }
});
