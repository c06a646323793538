//! Completion of names that only a running daemon knows: volumes, sets, jobs, and tunables.
//!
//! Owns what each operand of a command names, and adds it to the completions that clap makes. The hidden command `list-names` of the
//! program lists the names; it leaves out those that a shell would interpret.

use std::fmt::Write;

use clap::{Arg, Command};

/// The kinds of names for `list-names`, by the identifier of an operand.
const KINDS: &[(&str, &str)] = &[
    ("volume", "volumes sets"),
    ("volumes", "volumes"),
    ("backing", "volumes"),
    ("set", "sets"),
    ("cache", "sets"),
    ("key", "tunables"),
    ("keys", "tunables"),
    ("settings", "tunables"),
    ("job", "jobs"),
];

fn kinds_of(id: &str) -> Option<&'static str> {
    KINDS.iter().find(|(known, _)| *known == id).map(|(_, kinds)| *kinds)
}

/// An operand that is a name.
struct Operand {
    /// The words of its command.
    command: String,
    /// Its place, counted from 1.
    at: usize,
    /// Whether the operands behind it are names of the same kinds.
    repeats: bool,
    kinds: &'static str,
}

/// Every operand that is a name, of the commands that talk to the daemon.
fn operands(command: &Command, words: &str) -> Vec<Operand> {
    let mut all = Vec::new();
    for sub in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        let name = format!("{words} {}", sub.get_name()).trim_start().to_owned();
        all.extend(operands(sub, &name));
        if !sub.get_arguments().any(|a| a.get_id() == "socket") {
            continue;
        }
        for (at, operand) in (1..).zip(sub.get_positionals()) {
            if let Some(kinds) = kinds_of(operand.get_id().as_str()) {
                let repeats = operand.get_num_args().is_some_and(|n| n.max_values() > 1);
                all.push(Operand { command: name.clone(), at, repeats, kinds });
            }
        }
    }
    all
}

/// The options of all commands that take a value.
fn valued(command: &Command, all: &mut Vec<String>) {
    let takes_value = |a: &&Arg| !a.is_positional() && a.get_action().takes_values();
    for option in command.get_arguments().filter(takes_value) {
        all.extend(option.get_long().map(|long| format!("--{long}")));
        all.extend(option.get_short().map(|short| format!("-{short}")));
    }
    command.get_subcommands().for_each(|sub| valued(sub, all));
    all.sort();
    all.dedup();
}

/// What follows the completions of bash.
pub fn bash(command: &Command) -> String {
    let mut options = Vec::new();
    valued(command, &mut options);
    let nested = command.get_subcommands().filter(|c| c.has_subcommands()).map(Command::get_name);
    let mut cases = String::new();
    for Operand { command, at, repeats, kinds } in operands(command, "") {
        let place = if repeats { "*".to_owned() } else { at.to_string() };
        let _ = writeln!(cases, "        \"{command} \"{place}) kinds=\"{kinds}\" ;;");
    }
    format!(
        r#"
# Names that the daemon knows, in the place of operands. Nothing here is expanded by the shell.
_ubcache_named() {{
    _ubcache "$@"
    local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" at=2 operand=1 last="" word kinds name
    case "$command" in
        {nested}) command="$command ${{COMP_WORDS[2]}}" at=3 ;;
    esac
    if [[ $COMP_CWORD -lt $at || $current == -* ]]; then
        return 0
    fi
    local valued=" {options} "
    for word in "${{COMP_WORDS[@]:at:COMP_CWORD-at}}"; do
        if [[ $word != -* && $valued != *" ${{last:-none}} "* ]]; then
            operand=$((operand + 1))
        fi
        last=$word
    done
    if [[ $valued == *" ${{last:-none}} "* ]]; then
        return 0
    fi
    case "$command $operand" in
{cases}        *) return 0 ;;
    esac
    COMPREPLY=()
    # shellcheck disable=SC2086 # several words
    while IFS= read -r name; do
        if [[ $name == "$current"* ]]; then
            COMPREPLY+=("$name")
        fi
    done < <(ubcache list-names $kinds 2>/dev/null)
}}
complete -F _ubcache_named -o bashdefault -o default ubcache
"#,
        nested = nested.collect::<Vec<_>>().join("|"),
        options = options.join(" "),
    )
}

/// The completions of zsh with names in the place of operands.
pub fn zsh(completions: &str) -> String {
    let mut text = String::new();
    for line in completions.lines() {
        let id = line.trim_start().strip_prefix('\'').and_then(|rest| {
            let operand = rest.trim_start_matches('*').strip_prefix(':')?;
            operand.trim_start_matches(':').split_once(" -- ").map(|(id, _)| id)
        });
        match id.and_then(kinds_of) {
            Some(kinds) => {
                let _ = writeln!(
                    text,
                    "{}",
                    line.replace(":_default'", &format!(":{{_ubcache_named {kinds}}}'"))
                );
            }
            None => {
                let _ = writeln!(text, "{line}");
            }
        }
        if line.starts_with("#compdef") {
            text.push_str(
                r#"
# Names that the daemon knows, or files.
_ubcache_named() {
    local -a names
    names=("${(@f)$(ubcache list-names "$@" 2>/dev/null)}")
    compadd -a names
    _files
}
"#,
            );
        }
    }
    text
}

/// What follows the completions of fish.
pub fn fish(command: &Command) -> String {
    let mut text = String::from("# Names that the daemon knows, in the place of operands.\n");
    for Operand { command, kinds, .. } in operands(command, "") {
        let seen: Vec<String> =
            command.split(' ').map(|word| format!("__fish_seen_subcommand_from {word}")).collect();
        let _ = writeln!(
            text,
            "complete -c ubcache -n \"{}\" -a \"(ubcache list-names {kinds} 2>/dev/null)\"",
            seen.join("; and ")
        );
    }
    text
}
