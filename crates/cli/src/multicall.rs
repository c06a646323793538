//! The names and arguments of bcache-tools.
//!
//! Owns the translation of `make-bcache`, `bcache-super-show`, `probe-bcache` and `bcache …` command lines into our own,
//! and the help texts under these names. What these programs did through the kernel's control files needs a daemon.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::failure::Failure;

/// What a command line asks for.
#[derive(Debug)]
pub(crate) enum Call {
    /// A command with our own arguments, the first of which is the name of the program.
    Own(Vec<OsString>),
    /// This help text.
    Help(&'static str),
}

const MAKE_HELP: &str = "\
Format cache and backing devices of bcache.

Usage: make-bcache [OPTIONS] {-C | -B} DEV...

  -C, --cache                the devices that follow are cache devices: the fast ones
  -B, --bdev                 the devices that follow are backing devices: the slow ones
  -b, --bucket SIZE          size of the buckets of the cache, for example 512k
  -w, --block SIZE           smallest unit of data, for example 4k
  -o, --data-offset SECTORS  where data begins on the backing devices
  -l, --label LABEL          label of the backing devices
      --cset-uuid UUID       UUID of the cache set
      --cache_replacement_policy lru|fifo|random
      --writeback            write to the cache first and to the backing device later
      --discard              discard buckets before they are reused
      --wipe-bcache          overwrite superblocks of bcache, unless dirty data would be lost
      --force                overwrite other contents
  -h, --help                 print this text

This is ubcache under the name of a program of bcache-tools; `ubcache make --help` has more.
";

const SUPER_SHOW_HELP: &str = "\
Show the superblock of a device of bcache.

Usage: bcache-super-show [-f] DEV

  -f          accept a wrong checksum
  -h, --help  print this text

Exit code: 0 valid superblock, 2 anything else.
This is ubcache under the name of a program of bcache-tools; `ubcache super --help` has more.
";

const PROBE_HELP: &str = "\
Name the devices that have a superblock of bcache.

Usage: probe-bcache [-o udev] DEV...

  -o udev     print lines that udev imports
  -h, --help  print this text

This is ubcache under the name of a program of bcache-tools.
";

const BCACHE_HELP: &str = "\
Manage cache and backing devices of bcache.

Usage: bcache COMMAND ...

  make        format devices; `bcache make --help` has the options
  super-show  show the superblock of a device
  show        show the devices and volumes
  version     print the version
  COMMAND     any other command of ubcache, under its own name

This is ubcache under the name of a program of bcache-tools; `ubcache --help` lists its commands.
";

/// Translates a command line, the first word of which is the name of the program.
pub(crate) fn translate(args: Vec<OsString>) -> Result<Call, Failure> {
    let name = args.first().map(|a| Path::new(a).file_name().unwrap_or(a).to_os_string()).unwrap_or_default();
    let rest = args.get(1..).unwrap_or_default();
    match name.to_str() {
        Some("make-bcache") => make(rest),
        Some("bcache-super-show") => super_show(rest),
        Some("probe-bcache") => probe(rest),
        Some("bcache") => bcache(rest),
        _ => Ok(Call::Own(args)),
    }
}

fn own(command: &str) -> Vec<OsString> {
    vec!["ubcache".into(), command.into()]
}

fn wants_help(rest: &[OsString]) -> bool {
    rest.iter().any(|a| a == "-h" || a == "--help")
}

fn bcache(rest: &[OsString]) -> Result<Call, Failure> {
    let (command, args) = match rest.split_first() {
        Some((command, args)) => (command.to_str().unwrap_or_default(), args),
        None => ("", rest),
    };
    match command {
        "make" => make(args),
        "super-show" => super_show(args),
        "show" => {
            let ours = own("show").into_iter().chain(args.iter().cloned());
            let tools = !args.iter().any(|a| a == "-d" || a == "--device");
            Ok(Call::Own(ours.chain(tools.then(|| "--as-bcache-tools".into())).collect()))
        }
        "-h" | "--help" | "help" if args.is_empty() => Ok(Call::Help(BCACHE_HELP)),
        "version" => Ok(Call::Own(vec!["ubcache".into(), "--version".into()])),
        _ => Ok(Call::Own([OsString::from("ubcache")].into_iter().chain(rest.iter().cloned()).collect())),
    }
}

fn super_show(rest: &[OsString]) -> Result<Call, Failure> {
    if wants_help(rest) {
        return Ok(Call::Help(SUPER_SHOW_HELP));
    }
    let mut out = own("super");
    out.push("--as-bcache-tools".into());
    out.extend(rest.iter().map(|a| if a == "-f" { "--any-checksum".into() } else { a.clone() }));
    Ok(Call::Own(out))
}

fn probe(rest: &[OsString]) -> Result<Call, Failure> {
    if wants_help(rest) {
        return Ok(Call::Help(PROBE_HELP));
    }
    Ok(Call::Own(own("probe-bcache").into_iter().chain(rest.iter().cloned()).collect()))
}

/// Separates short options that are written in one word, such as `-CB` and `-b64k`.
fn separated(args: &[OsString]) -> Vec<OsString> {
    let mut out: Vec<OsString> = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let letters = arg.to_str().and_then(|a| a.strip_prefix('-')).filter(|a| !a.starts_with('-'));
        let Some(letters) = letters.filter(|l| !l.is_empty()) else {
            out.push(arg.clone());
            continue;
        };
        for (at, letter) in letters.char_indices() {
            out.push(format!("-{letter}").into());
            if matches!(letter, 'b' | 'w' | 'o' | 'l') {
                // The rest of the word is the value, or the next word, whatever it begins with.
                let rest = letters.get(at + 1..).unwrap_or_default();
                out.extend(if rest.is_empty() { args.next().cloned() } else { Some(rest.into()) });
                break;
            }
        }
    }
    out
}

/// Translates the arguments of `make-bcache`, where `-C` and `-B` switch the kind of all devices that follow.
fn make(rest: &[OsString]) -> Result<Call, Failure> {
    if wants_help(rest) {
        return Ok(Call::Help(MAKE_HELP));
    }
    let mut out = own("make");
    // With --json the document is ours.
    if !rest.iter().any(|a| a == "--json") {
        out.push("--as-bcache-tools".into());
    }
    let mut kind: Option<&str> = None;
    let mut has_backing = false;
    let mut late = Vec::new();
    let separated = separated(rest);
    let mut args = separated.iter();
    while let Some(arg) = args.next() {
        let text = arg.to_str().unwrap_or_default();
        let (option, inline) = match text.split_once('=') {
            Some((option, value)) if option.starts_with("--") => (option, Some(OsString::from(value))),
            _ => (text, None),
        };
        // In one word, because a value may begin with `-`.
        let mut value = |to: &str| -> Result<OsString, Failure> {
            let value = inline.clone().or_else(|| args.next().cloned());
            let value = value.ok_or_else(|| Failure::Usage(format!("{option}: expected a value")))?;
            let mut word = OsString::from(format!("{to}="));
            word.push(value);
            Ok(word)
        };
        match option {
            "-C" | "--cache" => kind = Some("-C"),
            "-B" | "--bdev" => kind = Some("-B"),
            "-b" | "--bucket" => out.push(value("--bucket")?),
            "-w" | "--block" => out.push(value("--block")?),
            "-o" | "--data-offset" | "--data_offset" => out.push(value("--data-offset")?),
            "-l" | "--label" => late.push(value("--label")?),
            "--cset-uuid" => out.push(value("--cset-uuid")?),
            "--cache_replacement_policy" => out.push(value("--cache-replacement-policy")?),
            "--writeback" => late.push("--writeback".into()),
            "--discard" | "--force" => out.push(option.into()),
            "--wipe-bcache" => out.push("--wipe".into()),
            "--checksums" => {
                return Err(Failure::Usage("--checksums is an option of `ubcache make` only".into()));
            }
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
    Ok(Call::Own(out))
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
            Ok(Call::Own(out)) => Ok(out.iter().map(|a| display(a)).collect::<Vec<_>>().join(" ")),
            Ok(Call::Help(text)) => Ok(text.lines().next().unwrap_or_default().to_owned()),
            Err(e) => Err(e.message().unwrap_or_default().to_owned()),
        }
    }

    #[test]
    fn options_of_make_bcache_are_translated() {
        let cases = [
            (
                "make-bcache -C a -B b c --writeback",
                "ubcache make --as-bcache-tools -C a -B b -B c --writeback",
            ),
            (
                "/sbin/make-bcache -B b -C a -b 64k -w 4k",
                "ubcache make --as-bcache-tools -B b -C a --bucket=64k --block=4k",
            ),
            ("make-bcache --cache a --writeback -l x", "ubcache make --as-bcache-tools -C a"),
            (
                "make-bcache -o 32 --bdev b --label=l --wipe-bcache",
                "ubcache make --as-bcache-tools --data-offset=32 -B b --wipe --label=l",
            ),
            ("bcache make -C a --discard", "ubcache make --as-bcache-tools -C a --discard"),
            ("make-bcache --help", "Format cache and backing devices of bcache."),
            ("bcache --help", "Manage cache and backing devices of bcache."),
            ("bcache make -h", "Format cache and backing devices of bcache."),
            (
                "make-bcache -b64k -w4k -CB b -l -x",
                "ubcache make --as-bcache-tools --bucket=64k --block=4k -B b --label=-x",
            ),
            ("make-bcache -C a --json", "ubcache make -C a --json"),
            (
                "make-bcache --cache_replacement_policy=fifo --cset-uuid=u -C a --force",
                "ubcache make --as-bcache-tools --cache-replacement-policy=fifo --cset-uuid=u -C a --force",
            ),
        ];
        for (from, to) in cases {
            assert_eq!(words(from).as_deref(), Ok(to), "{from}");
        }
        assert!(words("make-bcache a").unwrap_err().contains("expected -C or -B"));
        assert!(words("make-bcache -C a -b").unwrap_err().contains("expected a value"));
        assert!(words("make-bcache -Bb").unwrap_err().contains("-b: expected a value"));
    }

    #[test]
    fn options_of_the_other_programs_are_translated() {
        assert_eq!(
            words("bcache-super-show -f d").as_deref(),
            Ok("ubcache super --as-bcache-tools --any-checksum d")
        );
        assert_eq!(words("bcache show -m").as_deref(), Ok("ubcache show -m --as-bcache-tools"));
        assert_eq!(words("bcache super-show d").as_deref(), Ok("ubcache super --as-bcache-tools d"));
        assert_eq!(words("probe-bcache -o udev d").as_deref(), Ok("ubcache probe-bcache -o udev d"));
        assert_eq!(words("bcache version").as_deref(), Ok("ubcache --version"));
        assert_eq!(words("bcache check a b").as_deref(), Ok("ubcache check a b"));
        assert_eq!(words("./ubcache make -C x").as_deref(), Ok("./ubcache make -C x"));
    }
}
