//! Words that the repository does not use: in names of modules, in texts, in identifiers.
//!
//! Owns the lists. Must not know which violations are allowed.

use syn::visit::{self, Visit};
use syn::{FnArg, Ident, Pat, Signature};

use crate::rust::is_test;
use crate::source::{SourceFile, Tree};
use crate::violation::Violation;

/// Names of modules that do not tell their contents.
const MODULES: &[&str] = &["util", "utils", "helper", "helpers", "misc"];

/// Hosts of package registries. The environment decides where packages come from, not the repository.
const HOSTS: &[&str] = &[
    "index.crates.io",
    "static.crates.io",
    "registry.npmjs.org",
    "registry.yarnpkg.com",
    "deb.debian.org",
    "security.debian.org",
    "archive.ubuntu.com",
    "pypi.org",
    "files.pythonhosted.org",
    "proxy.golang.org",
    "docker.io",
    "ghcr.io",
    "quay.io",
];

/// Directories of one machine.
const PATHS: &[&str] = &["/root/", "/work/", "/Users/", "/home/"];

/// Words about how a change was made, which is no property of the program.
const AUTHORS: &[&str] = &[
    "this session",
    "previous session",
    "last session",
    "next session",
    "earlier session",
    "coding session",
    "ai agent",
    "coding agent",
    "subagent",
    "subagents",
    "assistant",
    "assistants",
    "language model",
    "chatbot",
    "chatgpt",
    "claude",
    "copilot",
    "llm",
];

/// Coinages with another meaning in the field of this program, and the usual word for each: names do not contain them. A name
/// contains a coinage if its words contain the coinage's words in order.
const COINAGES: &[(&str, &str)] = &[
    ("kept", "promoted"),
    ("keep", "promote"),
    ("void", "invalid"),
    ("pulse", "rate estimator"),
    ("pace", "throttle"),
    ("reuse", "cost-benefit"),
    ("how", "durability"),
    ("go_on", "advance"),
    ("forget_clean", "invalidate clean"),
    ("look", "poll window"),
    ("standing", "state"),
    ("bond", "attachment"),
    ("seen", "probe"),
    ("appear", "hotplug"),
    ("gone", "unplug"),
    ("news", "uevent"),
    ("story", "scenario"),
    ("told", "outcome"),
    ("act", "operator action"),
    ("acts", "operator actions"),
];

/// Coinages without another meaning, and the usual word for each: neither names nor texts contain them.
const ALWAYS: &[(&str, &str)] = &[
    ("survivor", "crash log"),
    ("survivors", "crash log"),
    ("mistrust", "failed flushes"),
    ("hurry", "urgent"),
    ("hurried", "shortened, or urgent"),
    ("victim", "eviction candidate"),
    ("victims", "eviction candidates"),
    ("patience", "poll predictor, or deadline"),
    ("looker", "read-only opener"),
    ("tale", "scenario"),
    ("habit", "operator action"),
];

/// The usual words for a search, which are no coinage.
const LOOK_UP: [&str; 2] = ["look", "up"];

/// First words that hide the subject of a function's name: `what_is_kept`, `who_may_come_in`.
const HIDDEN_SUBJECTS: &[&str] = &["what", "who", "whose", "those", "nobody", "somebody", "anybody"];

/// Finds forbidden words in all files except those of this crate, and coinages in all declared names. Comments, literals, local
/// names and Markdown are text.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let mut found = Vec::new();
    for file in &tree.files {
        if let Some(rust) = &file.rust {
            found.extend(module_file(file));
            let mut finder = NameFinder { path: &file.path, found: Vec::new() };
            finder.visit_file(&rust.whole);
            found.extend(finder.found);
        }
    }
    for file in tree.prose() {
        for (n, line) in file.text.lines().enumerate() {
            text(line, |rule, message| found.push(Violation::new(rule, &file.path, n + 1, message)));
        }
    }
    found
}

fn text(line: &str, mut report: impl FnMut(&'static str, String)) {
    for host in HOSTS.iter().filter(|h| contains(line, h)) {
        report("words.host", format!("expected no host of a package registry, found {host}"));
    }
    for path in PATHS.iter().filter(|p| begins(line, p)) {
        report("words.path", format!("expected no directory of one machine, found {path}"));
    }
    let lower = line.to_lowercase();
    for word in AUTHORS.iter().filter(|w| contains(&lower, w)) {
        report("words.author", format!("expected nothing about how a change was made, found \"{word}\""));
    }
    for word in line.split(|c: char| !c.is_alphanumeric() && c != '_').flat_map(parts) {
        if let Some((_, better)) = ALWAYS.iter().find(|(coinage, _)| *coinage == word) {
            report("words.coinage", format!("expected the word of the field ({better}), found \"{word}\""));
        }
    }
}

/// Whether `line` contains `word` without a letter or digit beside it.
fn contains(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let after = &line[at + word.len()..];
        !line[..at].ends_with(char::is_alphanumeric) && !after.starts_with(char::is_alphanumeric)
    })
}

/// Whether `line` contains a path that begins with `path`.
fn begins(line: &str, path: &str) -> bool {
    let inside = |c: char| c.is_alphanumeric() || "/._-$}".contains(c);
    line.match_indices(path).any(|(at, _)| !line[..at].ends_with(inside))
}

fn module_file(file: &SourceFile) -> Option<Violation> {
    let mut parts: Vec<&str> = file.path.trim_end_matches(".rs").split('/').collect();
    if parts.last() == Some(&"mod") {
        parts.pop();
    }
    let name = parts.last()?;
    MODULES.contains(name).then(|| module(&file.path, 1, name))
}

fn module(path: &str, line: usize, name: &str) -> Violation {
    let message = format!("module {name}: expected a name that says what the module has");
    Violation::new("words.module", path, line, message).of(name)
}

/// The words of an identifier: `keep`, `alive` of `keep_alive` and of `KeepAlive`.
fn parts(identifier: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut lower_before = false;
    for c in identifier.chars() {
        if c == '_' {
            words.push(String::new());
        } else {
            if words.is_empty() || c.is_uppercase() && lower_before {
                words.push(String::new());
            }
            if let Some(word) = words.last_mut() {
                word.extend(c.to_lowercase());
            }
        }
        lower_before = c.is_lowercase();
    }
    words.retain(|w| !w.is_empty());
    words
}

struct NameFinder<'a> {
    path: &'a str,
    found: Vec<Violation>,
}

impl NameFinder<'_> {
    fn declared(&mut self, identifier: &Ident) {
        let name = identifier.to_string();
        let words = parts(&name);
        if words.windows(2).any(|w| w == LOOK_UP) {
            return;
        }
        // The check of texts finds the coinages of `ALWAYS` in names, too.
        for (coinage, better) in COINAGES {
            let coined: Vec<&str> = coinage.split('_').collect();
            if words.windows(coined.len()).any(|w| w == coined) {
                let message =
                    format!("{name}: expected the word of the field ({better}), found \"{coinage}\"");
                let line = identifier.span().start().line;
                self.found.push(Violation::new("words.coinage", self.path, line, message).of(&name));
            }
        }
    }

    fn beginning(&mut self, identifier: &Ident) {
        let name = identifier.to_string();
        let words = parts(&name);
        let [first, _, ..] = &words[..] else { return };
        if HIDDEN_SUBJECTS.contains(&first.as_str()) {
            let message = format!("{name}: expected a name that begins with its subject, found \"{first}\"");
            let line = identifier.span().start().line;
            self.found.push(Violation::new("words.subject", self.path, line, message).of(&name));
        }
    }

    fn function(&mut self, signature: &Signature) {
        self.declared(&signature.ident);
        self.beginning(&signature.ident);
        for argument in &signature.inputs {
            if let FnArg::Typed(typed) = argument
                && let Pat::Ident(name) = &*typed.pat
            {
                self.declared(&name.ident);
            }
        }
    }
}

/// Visits the children of an item after it has checked the item's name.
macro_rules! declarations {
    ($($method:ident: $node:ident,)*) => {
        $(fn $method(&mut self, node: &'ast syn::$node) {
            self.declared(&node.ident);
            visit::$method(self, node);
        })*
    };
}

impl<'ast> Visit<'ast> for NameFinder<'_> {
    declarations! {
        visit_item_struct: ItemStruct,
        visit_item_enum: ItemEnum,
        visit_item_union: ItemUnion,
        visit_item_trait: ItemTrait,
        visit_item_type: ItemType,
        visit_item_const: ItemConst,
        visit_item_static: ItemStatic,
        visit_impl_item_const: ImplItemConst,
        visit_trait_item_const: TraitItemConst,
        visit_trait_item_type: TraitItemType,
        visit_variant: Variant,
    }

    fn visit_item_mod(&mut self, node: &'ast syn::ItemMod) {
        self.declared(&node.ident);
        let name = node.ident.to_string();
        if node.content.is_some() && MODULES.contains(&name.as_str()) {
            self.found.push(module(self.path, node.ident.span().start().line, &name));
        }
        visit::visit_item_mod(self, node);
    }

    fn visit_field(&mut self, node: &'ast syn::Field) {
        node.ident.iter().for_each(|i| self.declared(i));
        visit::visit_field(self, node);
    }

    /// The name of a test is a sentence, so it may contain any word behind its first.
    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        if is_test(&node.attrs) {
            self.beginning(&node.sig.ident);
        } else {
            self.function(&node.sig);
        }
        visit::visit_item_fn(self, node);
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.function(&node.sig);
        visit::visit_impl_item_fn(self, node);
    }

    fn visit_trait_item_fn(&mut self, node: &'ast syn::TraitItemFn) {
        self.function(&node.sig);
        visit::visit_trait_item_fn(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<(&'static str, usize, String)> {
        check(&Tree::of(&[(path, text)])).into_iter().map(|v| (v.rule, v.line, v.item)).collect()
    }

    fn rules(line: &str) -> Vec<&'static str> {
        found("docs/a.md", line).into_iter().map(|(rule, ..)| rule).collect()
    }

    #[test]
    fn a_module_says_what_it_has() {
        assert_eq!(found("crates/a/src/ranges.rs", "mod sorted {}"), []);
        assert_eq!(found("crates/a/src/utils.rs", ""), [("words.module", 1, "utils".into())]);
        assert_eq!(found("crates/a/src/misc/mod.rs", ""), [("words.module", 1, "misc".into())]);
        assert_eq!(found("crates/a/src/a.rs", "\nmod helpers {}"), [("words.module", 2, "helpers".into())]);
    }

    #[test]
    fn hosts_of_registries_are_reported() {
        assert_eq!(rules("crates.io, https://docs.rs/a, mydocker.io"), [""; 0]);
        assert_eq!(rules("http://deb.debian.org/debian"), ["words.host"]);
    }

    #[test]
    fn directories_of_a_machine_are_reported() {
        assert_eq!(rules("target/work/a $dir/home/b /homeless /var/lib"), [""; 0]);
        assert_eq!(rules("see `/home/a/b`"), ["words.path"]);
    }

    #[test]
    fn words_about_how_a_change_was_made_are_reported() {
        assert_eq!(rules("A session of FUSE; the agent of the guest; llmap; User-Agent"), [""; 0]);
        assert_eq!(rules("As This Session found, the assistant did"), ["words.author", "words.author"]);
    }

    #[test]
    fn texts_have_no_words_that_are_always_coinages() {
        assert_eq!(rules("surviving, the visit of inhabitants, pace, kept"), [""; 0]);
        assert_eq!(rules("Two Survivors, their habit"), ["words.coinage", "words.coinage"]);
        let text =
            "// No victim\nfn a() {\n let the_looker = \"x\";\n let x = \"hurry\";\n let evictVictim = 1; }";
        let lines: Vec<usize> = found("crates/a/src/a.rs", text).iter().map(|f| f.1).collect();
        assert_eq!(lines, [1, 3, 4, 5]);
    }

    #[test]
    fn declared_names_have_no_coinages() {
        let text = "fn lookup(promoted: u8) { let how = 1; } #[test] fn data_is_kept() {} struct Showcase { look_up: u8 }";
        assert_eq!(found("crates/a/src/a.rs", text), []);
        let text =
            "fn a(how: u8) {}\nstruct S {\n kept_keys: u8 }\nenum E {\n GoOnNow, On }\nfn forget_clean() {}";
        let names = [(1, "how"), (3, "kept_keys"), (5, "GoOnNow"), (6, "forget_clean")];
        let expected = names.map(|(line, name)| ("words.coinage", line, name.to_string()));
        assert_eq!(found("crates/a/src/a.rs", text), expected);
    }

    #[test]
    fn a_function_is_named_after_its_subject() {
        let text = "#[test] fn what_is_kept() {}\nfn who_may() {}\nfn what() {} fn whatever_is() {} fn a_who_is() {}";
        let names = [(1, "what_is_kept"), (2, "who_may")];
        let expected = names.map(|(line, name)| ("words.subject", line, name.to_string()));
        assert_eq!(found("crates/a/src/a.rs", text), expected);
    }
}
