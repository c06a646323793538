//! Contents of cached devices and volumes.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::ops::ControlFlow;

use common::{ALL, backing, backing_source, cache, cache_source, expected, open, sha256};
use format::Inode;
use inspect::extract::Extracted;
use inspect::{ExtractOptions, Extraction, StreamSink, Target};

fn run(extraction: &Extraction<'_>) -> (Vec<u8>, Extracted) {
    let mut sink = StreamSink::new(Vec::new());
    let result = extraction.run(&mut sink, &mut |_| ControlFlow::Continue(())).unwrap();
    let bytes = sink.into_inner();
    assert_eq!(bytes.len() as u64, extraction.sectors().bytes());
    (bytes, result)
}

/// What the kernel returned for each device.
#[test]
fn every_byte_is_what_the_kernel_returned() {
    for dir in ALL {
        let (cache, backing) = (cache(dir), backing(dir));
        let view = open(&cache);
        let (cache, backing) = (cache_source(&cache), backing_source(&backing));
        let expected = expected(dir);
        let Some(devices) = expected["devices"].as_array() else {
            let x =
                Extraction::new(&view, &cache, Target::Cached(&backing), ExtractOptions::default()).unwrap();
            let digest = sha256(&run(&x).0);
            assert_eq!(digest, "322f1c0859f7a5b12e9c6e5bdb484f61edb0411479eb599f7012a8dc85583664", "{dir}");
            continue;
        };
        for device in devices {
            let target = match device["kind"].as_str().unwrap() {
                "volume" => Target::Volume(Inode(device["inode"].as_u64().unwrap() as u32)),
                _ => Target::Cached(&backing),
            };
            let x = Extraction::new(&view, &cache, target, ExtractOptions::default()).unwrap();
            let (bytes, result) = run(&x);
            assert_eq!(sha256(&bytes), device["sha256"].as_str().unwrap(), "{dir}");
            assert_eq!(result.sectors, device["sectors"].as_u64().unwrap(), "{dir}");
            assert_eq!(result.dirty_sectors, device["dirty_sectors"].as_u64().unwrap(), "{dir}");
            assert_eq!(result.clean_sectors, device["clean_sectors"].as_u64().unwrap(), "{dir}");
            assert_eq!(
                result.sectors,
                result.dirty_sectors + result.clean_sectors + result.backing_sectors + result.zero_sectors
            );
            assert_eq!((result.lost_sectors, result.lost.len(), result.notes.len()), (0, 0, 0));
        }
    }
}
