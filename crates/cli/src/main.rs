//! The `ubcache` program. Its code is in the library beside it, which the generators of man pages and completions use, too.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: blockio::own_mapping::Allocator = blockio::own_mapping::Allocator;

fn main() -> ExitCode {
    ubcache_cli::main(std::env::args_os())
}
