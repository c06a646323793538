//! Every device of this crate against the one conformance suite.

mod common;

use std::rc::Rc;

use blockio::{FileDevice, OpenOptions, conformance};
use common::{drivers, sparse_file};
use io::Disk;

#[test]
fn files_conform() {
    for driver in drivers() {
        for logical_block_bytes in [None, Some(4096)] {
            for buffered in [false, true] {
                let dir = common::dir();
                let mut n = 0;
                let options = OpenOptions { logical_block_bytes, buffered, ..OpenOptions::default() };
                driver.block_on(conformance::check(|sectors| {
                    n += 1;
                    let path = sparse_file(dir.path(), &format!("{n}"), sectors);
                    let device = FileDevice::open(driver.reactor(), &path, &options).unwrap();
                    Disk::new(Rc::new(device), driver.handle())
                }));
            }
        }
    }
}
