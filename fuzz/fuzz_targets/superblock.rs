//! Superblocks: what is accepted is written again unchanged.
#![no_main]

use format::{RawSuperblock, Sectors, identify};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let sealed = fuzz::sealed_superblock(bytes);
    for bytes in [bytes, &sealed] {
        let _ = identify(bytes);
        let Ok(raw) = RawSuperblock::from_prefix(bytes) else { continue };
        for device in [Sectors(1 << 17), Sectors(u64::MAX)] {
            if let Ok(sb) = raw.check_cache(device, 512) {
                assert!(sb.encode()[..] == bytes[..4096]);
                assert_eq!(sb.journal_buckets().count(), sb.geometry().njournal as usize);
            }
            if let Ok(sb) = raw.check_backing(device, 512) {
                assert!(sb.encode()[..] == bytes[..4096]);
                let _ = (sb.label(), sb.state(), sb.cache_mode());
            }
        }
    }
});
