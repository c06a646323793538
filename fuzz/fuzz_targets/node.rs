//! Btree nodes: reading at once and streaming agree, and nothing is handed out of a bad bset.
#![no_main]

use format::{BsetKind, check_bset_order, for_each_bset, parse_node};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let sealed = fuzz::sealed_node(bytes);
    for bytes in [bytes, &sealed] {
        let key = fuzz::node_key(bytes);
        let mut keys = 0;
        let streamed = for_each_bset(bytes, &key, fuzz::MAGIC, fuzz::BLOCK, |_, _| keys += 1);
        let node = match (parse_node(bytes, &key, fuzz::MAGIC, fuzz::BLOCK), streamed) {
            (Ok(node), Ok(_)) => node,
            (Err(node), Err(streamed)) => {
                assert_eq!((node.kind, node.error), (streamed.kind, streamed.error));
                node.before
            }
            (node, streamed) => panic!("{node:?} but {streamed:?}"),
        };
        assert_eq!(node.bsets.iter().map(|bset| bset.keys.len()).sum::<usize>(), keys);
        for bset in node.bsets {
            let _ = check_bset_order(BsetKind::Leaf, bset.keys.iter().copied());
            let _ = check_bset_order(BsetKind::Internal, bset.keys);
        }
    }
});
