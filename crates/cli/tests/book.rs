//! The operator's guide is true: its commands are commands, those that can be tried are tried, its links lead somewhere, it has
//! every tunable, and the messages that it explains are those that the program says.
//!
//! The page `reference.md`, and the table of invariants in `docs/format.md`, are made of tables in the program;
//! `UBCACHE_BOOK_DRAW=1` writes them anew.
//!
//! Blocks marked `sh run` are run in their order, those of a page in one directory; the commands of all other `sh` blocks are
//! parsed. Before a page of `day2` the blocks of `day2/index.md` are run, which make its devices.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::BTreeSet;
use std::io::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use engine::tunables::{DeviceTunables, SetTunables, Stored, TunableInfo, Unit};

fn book() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("docs/book/src")
}

fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for dir in [book(), book().join("recipes"), book().join("day2")] {
        let entries = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path());
        pages.extend(entries.filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    pages.sort();
    assert!(pages.len() > 10, "{pages:?}");
    pages
}

/// Fenced blocks of a page: what they are, and their text.
fn blocks(text: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, String)> = None;
    for line in text.lines() {
        match (line.strip_prefix("```"), open.take()) {
            (Some(what), None) => open = Some((what.to_owned(), String::new())),
            (Some(_), Some(block)) => blocks.push(block),
            (None, Some((what, text))) => open = Some((what, text + line + "\n")),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block does not end");
    blocks
}

#[test]
fn every_command_is_one() {
    let mut seen = 0;
    for page in pages() {
        for (what, text) in blocks(&std::fs::read_to_string(&page).unwrap()) {
            if !what.starts_with("sh") {
                continue;
            }
            for line in text.lines().filter(|l| l.starts_with("ubcache ")) {
                let end = line.find([';', '|', '>', '&', '#']).unwrap_or(line.len());
                let words = line[..end].split_whitespace().map(|w| w.trim_matches(['"', '\'']));
                let parsed = ubcache_cli::command().try_get_matches_from(words);
                assert!(parsed.is_ok(), "{}: {line}\n{}", page.display(), parsed.unwrap_err());
                seen += 1;
            }
        }
    }
    assert!(seen > 40, "{seen} commands");
}

#[test]
fn commands_marked_run_in_the_guide_succeed() {
    let program = Path::new(env!("CARGO_BIN_EXE_ubcache"));
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let (mut tried, mut compared, mut wrong) = (0, 0, Vec::new());
    let prepared: String = blocks(&std::fs::read_to_string(book().join("day2/index.md")).unwrap())
        .into_iter()
        .filter(|(what, _)| what == "sh run")
        .map(|(_, text)| text)
        .collect();
    for page in pages() {
        let all = blocks(&std::fs::read_to_string(&page).unwrap());
        let mut script: String =
            all.iter().filter(|(what, _)| what == "sh run").map(|(_, text)| &**text).collect();
        if script.is_empty() {
            continue;
        }
        if page.parent() == Some(&book().join("day2")) && !page.ends_with("index.md") {
            script = format!("{}{script}", prepared);
        }
        let dir = tempfile::tempdir().unwrap();
        // What runs in the background ends with the page.
        let script =
            format!("set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT\n{script}");
        let out = Command::new("bash")
            .args(["-c", &script])
            .current_dir(dir.path())
            .env("PATH", &path)
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "{}: {}\n{}{}",
            page.display(),
            out.status,
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
        let said = String::from_utf8([out.stdout, out.stderr].join(&b'\n')).unwrap();
        for quoted in quotes(&all) {
            if !prints(&said, &quoted) {
                wrong.push(format!("{}: expected {quoted:?} in {said}", page.display()));
            }
            compared += 1;
        }
        tried += 1;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(tried >= 17 && compared >= 12, "{tried} pages, {compared} quotes");
}

/// The output that a page quotes: the blocks of text behind blocks that are run.
fn quotes(blocks: &[(String, String)]) -> Vec<String> {
    let pairs = blocks.iter().zip(blocks.iter().skip(1));
    pairs
        .filter(|(run, text)| run.0 == "sh run" && text.0 == "text")
        .map(|(_, text)| text.1.clone())
        .collect()
}

/// Whether an output has a quoted text. `…` stands for anything up to [`GAP`]; blanks and line ends are the same, because a
/// page breaks long lines.
fn prints(said: &str, quoted: &str) -> bool {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (said, quoted) = (words(said), words(quoted));
    let parts: Vec<&str> = quoted.split('…').map(str::trim).filter(|part| !part.is_empty()).collect();
    let Some((first, rest)) = parts.split_first() else { return false };
    said.match_indices(first).any(|(at, _)| follow(&said[at + first.len()..], rest))
}

/// Longest text that `…` stands for, in bytes.
const GAP: usize = 400;

fn follow(said: &str, parts: &[&str]) -> bool {
    let Some((part, rest)) = parts.split_first() else { return true };
    let near = said.match_indices(part).take_while(|(at, _)| *at <= GAP);
    near.into_iter().any(|(at, _)| follow(&said[at + part.len()..], rest))
}

#[test]
fn quoted_output_is_compared() {
    let said = "set 12 (/tmp/a/fast.img, UUID 3): wipe done: 1.0 MiB\nsame   line";
    for good in ["set … (…/fast.img, UUID …): wipe done: …", "wipe done: … same\nline", "…"] {
        assert_eq!(prints(said, good), good != "…", "{good}");
    }
    assert!(!prints(said, "set … (…/slow.img") && !prints(said, "same … set"));
}

#[test]
fn links_lead_somewhere_and_every_page_is_in_the_summary() {
    let mut listed = BTreeSet::new();
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap_or("")) {
            let file = link.split('#').next().unwrap_or("");
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let target = page.parent().unwrap().join(file);
            assert!(target.exists(), "{}: {link}", page.display());
            if page.ends_with("SUMMARY.md") {
                listed.insert(target.canonicalize().unwrap());
            }
        }
    }
    for page in pages().iter().filter(|p| !p.ends_with("SUMMARY.md")) {
        assert!(listed.contains(&page.canonicalize().unwrap()), "{} is not in the summary", page.display());
    }
}

#[test]
fn every_tunable_is_explained_and_none_that_is_not_there() {
    let text = std::fs::read_to_string(book().join("tunables.md")).unwrap();
    let (set, device) = (SetTunables::default(), DeviceTunables::default());
    let there: BTreeSet<&str> = set.iter().chain(device.iter()).map(|tunable| tunable.name).collect();
    let first_cells = text.lines().filter_map(|l| l.strip_prefix("| ")?.split(" | ").next());
    let explained: BTreeSet<&str> = first_cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert_eq!(explained, there);
}

/// Every tunable with its owner.
fn tunables() -> Vec<(&'static str, TunableInfo)> {
    let (set, device) = (SetTunables::default(), DeviceTunables::default());
    let of_set = set.iter().map(|tunable| ("set", tunable));
    of_set.chain(device.iter().map(|tunable| ("volume", tunable))).collect()
}

/// The text of `reference.md`, made of the program's tables.
fn reference() -> String {
    let mut page = String::from(
        "# Reference\n\nThe tables of this page are made of the program's own. \
         [Tunables](tunables.md) explains what each tunable does and why one would change it.\n\n\
         ## Exit codes\n\n| code | meaning |\n|---:|---|\n",
    );
    for (code, meaning) in serve::failure::EXIT_CODES {
        page += &format!("| {code} | {meaning} |\n");
    }
    page += "\n## Kinds of events\n\n\
             `ubcache events` shows the events of the daemon; `/v1/events` streams them. `type` is one of these:\n\n\
             | type | meaning |\n|---|---|\n";
    for (name, meaning) in daemon::EVENT_KINDS {
        page += &format!("| `{name}` | {meaning} |\n");
    }
    page += "\n## Keys of the configuration\n\n\
             `man ubcache.toml` has the same. [The daemon](daemon.md#configuration) has examples.\n\n\
             | section | key | value | default | meaning |\n|---|---|---|---|---|\n";
    for key in daemon::CONFIG_KEYS {
        let code = |text: &str| if text.is_empty() { String::new() } else { format!("`{text}`") };
        let section = if key.section.is_empty() { String::new() } else { format!("`[{}]`", key.section) };
        let (name, default) = (key.name, code(key.default));
        page += &format!("| {section} | `{name}` | {} | {default} | {} |\n", key.values, key.meaning);
    }
    page += "\n## Tunables\n\n\
             A number outside of the range is refused, and nothing changes. The sysfs view sets the nearest one inside, as the kernel \
             does. The upper limit of `writeback_percent` is the set's `cutoff_writeback`.\n\n\
             | tunable | of | default | unit | range | remembered in |\n|---|---|---|---|---|---|\n";
    for (owner, tunable) in tunables() {
        let stored = match tunable.stored {
            Stored::Superblock => "superblock",
            Stored::Settings => "state directory",
        };
        let default =
            if tunable.default.is_empty() { String::new() } else { format!("`{}`", tunable.default) };
        let (name, unit) = (tunable.name, tunable.unit.name());
        page += &format!("| `{name}` | {owner} | {default} | {unit} | {} | {stored} |\n", tunable.range);
    }
    page + &exports_table() + &metrics_table()
}

/// The table of the exports, made of their kinds.
fn exports_table() -> String {
    let mut table = String::from(
        "\n## Exports\n\n\
         `--export` of `ubcache up` and `exports` in the configuration take these values. `{volume}` in a value of the configuration \
         stands for the name of the volume.\n\n\
         | value | meaning |\n|---|---|\n",
    );
    for (form, meaning) in serve::exports::KINDS.iter().flat_map(|kind| kind.forms) {
        table += &format!("| `{form}` | {meaning} |\n");
    }
    table
}

/// The table of the metrics, made of their families.
fn metrics_table() -> String {
    let mut table = String::from(
        "\n## Metrics\n\n\
         `/metrics` has these families. [The daemon](daemon.md#metrics) says who may read them. A histogram has the series `_bucket`, \
         `_sum` and `_count`, and buckets have the label `le`. A label with an empty value is left out. `set` is the UUID of a set, \
         `volume` the name of a volume, `device` a path; a backing device that is served without its cache has no `set`.\n\n\
         | metric | type | labels | meaning |\n|---|---|---|---|\n",
    );
    for family in metrics::families() {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, kind, labels) = (family.name, family.kind, labels.join(", "));
        table += &format!("| `{name}` | {kind} | {labels} | {} |\n", family.help);
    }
    table
}

/// Compares a file with the text that the program's tables make; `UBCACHE_BOOK_DRAW=1` writes it first.
#[track_caller]
fn is_generated(path: &Path, expected: &str) {
    if std::env::var_os("UBCACHE_BOOK_DRAW").is_some() {
        std::fs::write(path, expected).unwrap();
    }
    let page = std::fs::read_to_string(path).unwrap();
    assert_eq!(page, expected, "UBCACHE_BOOK_DRAW=1 cargo test -p ubcache-cli --test book writes it anew");
}

/// The table of section 11 of the format is that of `check`.
#[test]
fn the_invariants_are_those_of_check() {
    let path = book().ancestors().nth(2).unwrap().join("format.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let begin = page.find("\n## 11. Invariants\n").unwrap();
    let (head, divider) = ("| number | name | what holds |\n", "|---|---|---|\n");
    let table = begin + page[begin..].find(head).unwrap();
    let end = table + page[table..].find("\n\n").unwrap() + 1;
    let mut expected = format!("{}{head}{divider}", &page[..table]);
    for invariant in inspect::Invariant::ALL {
        let (number, name, text) = (invariant.number(), invariant.name(), invariant.text());
        expected += &format!("| {number} | `{name}` | {text} |\n");
    }
    is_generated(&path, &(expected + &page[end..]));
}

#[test]
fn the_reference_is_that_of_the_program() {
    is_generated(&book().join("reference.md"), &reference());
}

/// A default of `tunables.md` in the form that the program stores; nothing for one that is of the moment.
fn plain_default(cell: &str, unit: Unit) -> Option<String> {
    let cell = cell.trim_matches('`');
    let (first, rest) = cell.split_once(' ').unwrap_or((cell, ""));
    let factor = match rest {
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => 1,
    };
    match (first, first.parse::<u64>()) {
        ("–", _) => None,
        ("on", _) => Some("1".into()),
        ("off", _) => Some("0".into()),
        ("empty", _) => Some(String::new()),
        (_, Ok(n)) if unit == Unit::Sectors && factor > 1 => Some((n * factor / 512).to_string()),
        (_, Ok(n)) => Some((n * factor).to_string()),
        (word, Err(_)) => Some(word.to_owned()),
    }
}

/// `writeback_batch_sectors` was explained with a default that had changed in the program.
#[test]
fn defaults_are_those_of_the_program() {
    let text = std::fs::read_to_string(book().join("tunables.md")).unwrap();
    let mut compared = 0;
    for line in text.lines().filter(|l| l.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches(['|', ' ']).split(" | ").collect();
        let names: Vec<&str> = cells[0].split('`').skip(1).step_by(2).collect();
        let defaults: Vec<&str> = cells[1].split(", ").collect();
        assert_eq!(names.len(), defaults.len(), "{line}");
        for (name, default) in names.iter().zip(defaults) {
            let owner = cells[0].rsplit_once(" of a ").map(|(_, owner)| owner.replace("device", "volume"));
            let tunables = tunables();
            let is_it = |(of, tunable): &&(&str, TunableInfo)| {
                tunable.name == *name && owner.as_ref().is_none_or(|o| o == of)
            };
            let (_, tunable) = tunables.iter().find(is_it).unwrap();
            if let Some(default) = plain_default(default, tunable.unit) {
                assert_eq!(
                    default, tunable.default,
                    "{name}: the guide has another default than the program"
                );
                compared += 1;
            }
        }
    }
    assert!(compared > 40, "{compared} defaults");
}

/// Source files of the program, without its tests.
fn sources() -> Vec<PathBuf> {
    let mut dirs = vec![book().ancestors().nth(3).unwrap().join("crates")];
    let mut sources = Vec::new();
    while let Some(dir) = dirs.pop() {
        for path in std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()) {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() && !matches!(name.as_str(), "tests" | "sim" | "benches") {
                dirs.push(path);
            } else if name.ends_with(".rs") && !matches!(name.as_str(), "tests.rs" | "testing.rs") {
                sources.push(path);
            }
        }
    }
    assert!(sources.len() > 100, "{}", sources.len());
    sources
}

/// The texts in a source file, each with `…` for whatever is put in; what follows the unit tests' beginning is left out.
fn texts(source: &str) -> Vec<String> {
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or(source);
    let mut texts = Vec::new();
    let mut chars = source.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '/' if chars.peek() == Some(&'/') => while chars.next().is_some_and(|c| c != '\n') {},
            '#' if chars.peek() == Some(&'"') => {
                chars.next();
                let mut text = String::new();
                while let Some(c) = chars.next().filter(|c| *c != '"' || chars.peek() != Some(&'#')) {
                    text.push(c);
                }
                texts.push(text);
            }
            // A character, not the begin of a text; lifetimes have no second quote.
            '\'' if chars.peek() == Some(&'"') => {
                chars.next();
            }
            '"' => {
                let mut text = String::new();
                while let Some(c) = chars.next().filter(|c| *c != '"') {
                    match c {
                        '\\' => match chars.next() {
                            Some('\n') => while chars.next_if(|c| c.is_whitespace()).is_some() {},
                            Some('n') => text.push('\n'),
                            other => text.extend(other),
                        },
                        '{' if chars.next_if_eq(&'{').is_some() => text.push('{'),
                        '{' => {
                            while chars.next().is_some_and(|c| c != '}') {}
                            text.push('…');
                        }
                        c => text.push(c),
                    }
                }
                texts.push(text);
            }
            _ => {}
        }
    }
    texts
}

/// Whether a text is a message, the fixed parts of which come one after the other in it.
fn says(text: &str, message: &str) -> bool {
    let mut rest = text;
    for part in message.split('…').map(str::trim).filter(|part| !part.is_empty()) {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

#[test]
fn messages_are_those_of_the_program() {
    let all: Vec<String> =
        sources().iter().flat_map(|path| texts(&std::fs::read_to_string(path).unwrap())).collect();
    assert!(all.len() > 2000, "{}", all.len());
    let of_the_system: Vec<String> = (1..134).map(|n| Error::from_raw_os_error(n).to_string()).collect();
    let page = std::fs::read_to_string(book().join("troubleshooting.md")).unwrap();
    let first_cells = page.lines().filter_map(|l| l.strip_prefix("| `")?.split(" | ").next());
    let mut seen = 0;
    for message in first_cells.filter_map(|cell| cell.split('`').next()) {
        assert!(message.split('…').map(str::len).sum::<usize>() >= 15, "{message}: could be anything");
        let known = all.iter().any(|text| says(text, message))
            || of_the_system.iter().any(|e| e.starts_with(message));
        assert!(known, "{message}: nobody says so");
        seen += 1;
    }
    assert!(seen >= 12, "{seen} messages");
}

/// Messages name pages of `day2` by their short names.
#[test]
fn pages_that_messages_name_are_there() {
    let mut seen = BTreeSet::new();
    for text in sources().iter().flat_map(|path| texts(&std::fs::read_to_string(path).unwrap())) {
        for part in text.split("the page ").skip(1) {
            if let Some((page, _)) = part.split_once(" of the guide").filter(|(page, _)| !page.contains(' '))
            {
                assert!(book().join(format!("day2/{page}.md")).exists(), "{page}: {text}");
                seen.insert(page.to_owned());
            }
        }
    }
    assert!(seen.len() >= 3, "{seen:?}");
}

#[test]
fn texts_are_found_in_sources() {
    let source = "f(\"{}: is\\\n     not {x:?}\"); // \"no\"\n let c = '\"'; g(\"a\\\"b {{\")\n#[cfg(test)]\nmod tests { h(\"x\")";
    assert_eq!(texts(source), ["…: isnot …", "a\"b {"]);
    assert!(says("…: holds …: overwrite it with --force", "… holds …: overwrite it with --force"));
    assert!(!says("…: holds nothing", "… holds …: overwrite"));
}

/// The numbers of a constant in a test, as documents write them: without `_`, and without `.0`.
fn numbers_of(source: &str, constant: &str) -> Vec<String> {
    let from =
        source.find(&format!("const {constant}: ")).unwrap_or_else(|| panic!("no constant {constant}"));
    let value = source[from..].split_once(" =").unwrap().1;
    let value = value.split_once("];").unwrap().0;
    let words = value.split(|c: char| !c.is_ascii_digit() && c != '.' && c != '_');
    let numbers = words.filter(|w| w.starts_with(|c: char| c.is_ascii_digit()));
    numbers.map(|w| w.replace('_', "").trim_end_matches(".0").to_owned()).collect()
}

/// The limits in `docs/performance.md` are those that a test checks.
#[test]
fn limits_on_counts_are_those_of_the_test() {
    let root = book().ancestors().nth(3).unwrap().to_owned();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let (test, page) = (read("bench/engine/tests/instructions.rs"), read("docs/performance.md"));
    let limits = numbers_of(&test, "LIMITS");
    let [read_in_tests, read, overwrite_in_tests, overwrite, insert_in_tests, insert] = &limits[..] else {
        panic!("expected two limits for each of three requests, found {limits:?}");
    };
    let counts = numbers_of(&test, "COUNTS");
    let [inserted, overwritten, index] = &counts[..] else {
        panic!("expected three limits, found {counts:?}")
    };
    assert_eq!(inserted, overwritten, "the page gives one limit for both");
    for expected in [
        format!(
            "test build: {read_in_tests} for a read hit, {overwrite_in_tests} for an overwrite, {insert_in_tests} for an insert"
        ),
        format!("release build for these three kinds of requests are {read}, {overwrite} and {insert}."),
        format!("`bench/engine/tests/instructions.rs` | {inserted}; {index} |"),
    ] {
        assert!(page.contains(&expected), "docs/performance.md: expected {expected:?}");
    }
}
