//! The names and arguments of bcache-tools.
//!
//! Owns the translation of command lines of `make-bcache`, `bcache-super-show` and `bcache …` into those of ubcache.
//! Commands that used the kernel's control files need a daemon. Must not know what a command does.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::failure::Failure;

/// Translates a command line, whose first word is the name of the program.
pub(crate) fn translate(args: Vec<OsString>) -> Result<Vec<OsString>, Failure> {
    let name = args.first().map(|a| Path::new(a).file_name().unwrap_or(a).to_os_string()).unwrap_or_default();
    let rest = args.get(1..).unwrap_or_default();
    match name.to_str() {
        Some("make-bcache") => make(rest),
        Some("bcache-super-show") => super_show(rest),
        Some("bcache") => bcache(rest),
        _ => Ok(args),
    }
}

fn own(command: &str) -> Vec<OsString> {
    vec!["ubcache".into(), command.into()]
}

fn bcache(rest: &[OsString]) -> Result<Vec<OsString>, Failure> {
    let (command, args) = match rest.split_first() {
        Some((command, args)) => (command.to_str().unwrap_or_default(), args),
        None => ("", rest),
    };
    match command {
        "make" => make(args),
        "super-show" => super_show(args),
        "version" => Ok(vec!["ubcache".into(), "--version".into()]),
        _ => Ok([OsString::from("ubcache")].into_iter().chain(rest.iter().cloned()).collect()),
    }
}

fn super_show(rest: &[OsString]) -> Result<Vec<OsString>, Failure> {
    // The option -f continues after a wrong checksum. `ubcache super` always continues.
    let kept = rest.iter().filter(|a| *a != "-f").cloned();
    Ok(own("super").into_iter().chain(kept).collect())
}

/// Translates the arguments of `make-bcache`, where `-C` and `-B` switch the kind of all devices that follow.
fn make(rest: &[OsString]) -> Result<Vec<OsString>, Failure> {
    let mut out = own("make");
    let mut kind: Option<&str> = None;
    let mut has_backing = false;
    let mut late = Vec::new();
    let mut args = rest.iter();
    while let Some(arg) = args.next() {
        let text = arg.to_str().unwrap_or_default();
        let (option, inline) = match text.split_once('=') {
            Some((option, value)) if option.starts_with("--") => (option, Some(OsString::from(value))),
            _ => (text, None),
        };
        let mut value = |to: &str| -> Result<[OsString; 2], Failure> {
            let value = inline.clone().or_else(|| args.next().cloned());
            let value = value.ok_or_else(|| Failure::Usage(format!("{option}: expected a value")))?;
            Ok([to.into(), value])
        };
        match option {
            "-C" | "--cache" => kind = Some("-C"),
            "-B" | "--bdev" => kind = Some("-B"),
            "-b" | "--bucket" => out.extend(value("--bucket")?),
            "-w" | "--block" => out.extend(value("--block")?),
            "-o" | "--data-offset" | "--data_offset" => out.extend(value("--data-offset")?),
            "-l" | "--label" => late.extend(value("--label")?),
            "--cset-uuid" => out.extend(value("--cset-uuid")?),
            "--cache_replacement_policy" => out.extend(value("--cache-replacement-policy")?),
            "--writeback" => late.push("--writeback".into()),
            "--discard" | "--force" => out.push(option.into()),
            "--wipe-bcache" => out.push("--wipe".into()),
            // The parser judges the options of ubcache and unknown options.
            _ if option.starts_with('-') => out.push(arg.clone()),
            _ => {
                let kind = kind.ok_or_else(|| {
                    Failure::Usage(format!("{}: expected -C or -B before the first device", display(arg)))
                })?;
                has_backing |= kind == "-B";
                out.extend([kind.into(), arg.clone()]);
            }
        }
    }
    // These options apply to backing devices only. bcache-tools accepts and ignores them without one.
    if has_backing {
        out.append(&mut late);
    }
    Ok(out)
}

fn display(arg: &OsStr) -> String {
    arg.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<String, String> {
        let args = line.split_whitespace().map(OsString::from).collect();
        match translate(args) {
            Ok(out) => Ok(out.iter().map(|a| display(a)).collect::<Vec<_>>().join(" ")),
            Err(e) => Err(e.message().unwrap_or_default().to_owned()),
        }
    }

    #[test]
    fn make_bcache() {
        let cases = [
            ("make-bcache -C a -B b c --writeback", "ubcache make -C a -B b -B c --writeback"),
            ("/sbin/make-bcache -B b -C a -b 64k -w 4k", "ubcache make -B b -C a --bucket 64k --block 4k"),
            ("make-bcache --cache a --writeback -l x", "ubcache make -C a"),
            (
                "make-bcache -o 32 --bdev b --label=l --wipe-bcache",
                "ubcache make --data-offset 32 -B b --wipe --label l",
            ),
            ("bcache make -C a --discard", "ubcache make -C a --discard"),
            ("make-bcache --help", "ubcache make --help"),
            (
                "make-bcache --cache_replacement_policy=fifo --cset-uuid u -C a --force",
                "ubcache make --cache-replacement-policy fifo --cset-uuid u -C a --force",
            ),
        ];
        for (from, to) in cases {
            assert_eq!(words(from).as_deref(), Ok(to), "{from}");
        }
        assert!(words("make-bcache a").unwrap_err().contains("expected -C or -B"));
        assert!(words("make-bcache -C a -b").unwrap_err().contains("expected a value"));
    }

    #[test]
    fn other_names() {
        assert_eq!(words("bcache-super-show -f d").as_deref(), Ok("ubcache super d"));
        assert_eq!(words("bcache super-show d").as_deref(), Ok("ubcache super d"));
        assert_eq!(words("bcache version").as_deref(), Ok("ubcache --version"));
        assert_eq!(words("bcache check a b").as_deref(), Ok("ubcache check a b"));
        assert_eq!(words("./ubcache make -C x").as_deref(), Ok("./ubcache make -C x"));
    }
}
