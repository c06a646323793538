//! Superblocks that make a process allocate more than there is.

use crate::place::*;
use crate::world::*;

/// A stick with a false capacity, or a sparse file: two thousand million buckets, each of which takes a place in tables.
/// The daemon aborted on an allocation of 8 GiB, and with it every other volume went down.
#[test]
fn a_superblock_that_wants_too_much_memory_is_refused_alone() {
    let place = Place::new();
    let daemon = place.start_registered();
    let mut client = place.client("bcache0");
    client.write(0, &[1; 4096]).unwrap();
    let huge = place.dir.sparse("huge", 8 << 40);
    run(&["make", "-C", &huge, "--bucket", "4k", "--block", "4k"]).ok();
    daemon.run(&["register", &huge]).refused(&[
        "2147483648 buckets of 8 sectors",
        "bytes of memory",
        "larger",
    ]);
    assert_eq!(client.read(0, 4096).unwrap(), [1; 4096], "the other set is served");
    assert_eq!(daemon.devices().len(), 2);
    // Offline, the same superblock ends no command by an abort either.
    run(&["up", "-C", &huge, "--export", &format!("nbd={}", place.dir.path("up.sock"))])
        .refused(&["bytes of memory"]);
    run(&["super", &huge]).ok();
    let said = run(&["check", &huge]);
    assert!(said.code >= 0, "a signal has ended it: {said}");
    daemon.stop();
}
