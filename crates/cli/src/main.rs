//! The `ubcache` program. Everything is in the library beside it, where generators of man pages and
//! completions find it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    ubcache_cli::main(std::env::args_os())
}
