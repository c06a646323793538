//! UUID tables in both forms: what is read in the new form is written again unchanged.
#![no_main]

use format::uuid_table::{check_uuid_table, encode_uuid_table, parse_uuid_table};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for version in [0, 1] {
        let Ok(slots) = parse_uuid_table(bytes, version) else { continue };
        let _ = check_uuid_table(&slots);
        slots.iter().for_each(|slot| drop(slot.label()));
        let mut written = vec![0xff; bytes.len()];
        encode_uuid_table(&mut written, &slots);
        assert!(version == 0 || written == bytes);
    }
});
