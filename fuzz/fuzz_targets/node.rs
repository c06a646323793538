//! Btree nodes: reading at once and streaming agree, and nothing is handed out of a bad set.
#![no_main]

use format::{SetKind, check_set_order, for_each_set, parse_node};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let sealed = fuzz::sealed_node(bytes);
    for bytes in [bytes, &sealed] {
        let key = fuzz::node_key(bytes);
        let mut keys = 0;
        let streamed = for_each_set(bytes, &key, fuzz::MAGIC, fuzz::BLOCK, |_, _| keys += 1);
        let node = match (parse_node(bytes, &key, fuzz::MAGIC, fuzz::BLOCK), streamed) {
            (Ok(node), Ok(_)) => node,
            (Err(node), Err(streamed)) => {
                assert_eq!((node.kind, node.error), (streamed.kind, streamed.error));
                node.before
            }
            (node, streamed) => panic!("{node:?} but {streamed:?}"),
        };
        assert_eq!(node.sets.iter().map(|set| set.keys.len()).sum::<usize>(), keys);
        for set in node.sets {
            let _ = check_set_order(SetKind::Leaf, set.keys.iter().copied());
            let _ = check_set_order(SetKind::Internal, set.keys);
        }
    }
});
