//! Runs seeds.
fn main() {}
