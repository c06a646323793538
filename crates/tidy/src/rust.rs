//! Questions about Rust code that several checks ask.
//!
//! Owns the definition of a test, and the mapping from files to modules. Must not know the rules.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit_mut::{self, VisitMut};
use syn::{Attribute, Item, Meta};

/// A module that is compiled only for tests, as the path of its file without `.rs` or `/mod.rs`.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TestModule(String);

impl TestModule {
    /// Whether the file at `path` is this module or a module in it.
    pub fn holds(&self, path: &str) -> bool {
        path.strip_prefix(&self.0).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    }
}

/// Whether the whole file is a test, by its directory or its name.
pub fn is_test_path(path: &str) -> bool {
    let mut parts = path.split('/').collect::<Vec<_>>();
    let name = parts.pop().unwrap_or_default();
    // The first component of the path is a part of the repository: `tests/vm` is a crate.
    name == "tests.rs" || parts.iter().skip(1).any(|p| ["tests", "benches"].contains(p))
}

/// The modules that files declare as `#[cfg(test)] mod name;`.
pub fn test_modules<'a>(files: impl Iterator<Item = (&'a str, &'a syn::File)>) -> BTreeSet<TestModule> {
    let mut found = BTreeSet::new();
    for (path, file) in files {
        for item in &file.items {
            if let Item::Mod(m) = item
                && m.content.is_none()
                && is_test(&m.attrs)
            {
                found.insert(TestModule(format!("{}/{}", module_directory(path), m.ident)));
            }
        }
    }
    found
}

/// The directory of the modules that the file at `path` declares.
fn module_directory(path: &str) -> &str {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    match name {
        "lib.rs" | "main.rs" | "mod.rs" => dir,
        _ => path.trim_end_matches(".rs"),
    }
}

/// The path of a file's module from the root of its crate: `["index", "load"]` for `src/index/load.rs`.
pub fn module_of(path: &str) -> Vec<String> {
    let inside = path.rsplit_once("src/").map_or(path, |(_, inside)| inside).trim_end_matches(".rs");
    let mut parts: Vec<String> = inside.split('/').map(Into::into).collect();
    if matches!(parts.last().map(String::as_str), Some("lib" | "main" | "mod")) {
        parts.pop();
    }
    parts
}

/// Whether attributes mark an item as a test, or as compiled for tests only.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|a| match &a.meta {
        Meta::Path(path) => path.segments.last().is_some_and(|s| s.ident == "test"),
        Meta::List(list) => list.path.is_ident("cfg") && demands_test(list.tokens.clone()),
        _ => false,
    })
}

/// Whether the predicate of a `cfg` is true in tests and proofs only: `test`, `kani`, `all(…)` with one of them, or `any(…)` of them.
fn demands_test(predicate: TokenStream) -> bool {
    fn part_demands(part: &[TokenTree]) -> bool {
        match part {
            [TokenTree::Ident(name)] => name == "test" || name == "kani",
            [TokenTree::Ident(name), TokenTree::Group(inside)]
                if inside.delimiter() == Delimiter::Parenthesis =>
            {
                let trees: Vec<TokenTree> = inside.stream().into_iter().collect();
                let mut parts = trees.split(|t| matches!(t, TokenTree::Punct(p) if p.as_char() == ','));
                match name.to_string().as_str() {
                    "all" => parts.any(part_demands),
                    "any" => parts.all(part_demands),
                    _ => false,
                }
            }
            _ => false,
        }
    }
    part_demands(&predicate.into_iter().collect::<Vec<_>>())
}

/// The file without the items that are compiled for tests only.
pub fn without_tests(file: &syn::File) -> syn::File {
    let mut file = file.clone();
    Stripper.visit_file_mut(&mut file);
    file
}

struct Stripper;

impl VisitMut for Stripper {
    fn visit_file_mut(&mut self, file: &mut syn::File) {
        file.items.retain(|i| !is_test(attributes(i)));
        visit_mut::visit_file_mut(self, file);
    }

    fn visit_item_mod_mut(&mut self, module: &mut syn::ItemMod) {
        if let Some((_, items)) = &mut module.content {
            items.retain(|i| !is_test(attributes(i)));
        }
        visit_mut::visit_item_mod_mut(self, module);
    }

    fn visit_item_impl_mut(&mut self, block: &mut syn::ItemImpl) {
        block.items.retain(|i| !matches!(i, syn::ImplItem::Fn(f) if is_test(&f.attrs)));
        visit_mut::visit_item_impl_mut(self, block);
    }
}

/// The attributes of an item.
fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(i) => &i.attrs,
        Item::Enum(i) => &i.attrs,
        Item::ExternCrate(i) => &i.attrs,
        Item::Fn(i) => &i.attrs,
        Item::ForeignMod(i) => &i.attrs,
        Item::Impl(i) => &i.attrs,
        Item::Macro(i) => &i.attrs,
        Item::Mod(i) => &i.attrs,
        Item::Static(i) => &i.attrs,
        Item::Struct(i) => &i.attrs,
        Item::Trait(i) => &i.attrs,
        Item::Type(i) => &i.attrs,
        Item::Union(i) => &i.attrs,
        Item::Use(i) => &i.attrs,
        _ => &[],
    }
}

/// Every import of a `use` item: its names, and the line of the last name. The last name of a glob is `*`.
pub fn imports(tree: &syn::UseTree) -> Vec<(Vec<String>, usize)> {
    fn down(tree: &syn::UseTree, before: &[String], found: &mut Vec<(Vec<String>, usize)>) {
        let with = |name: String| before.iter().cloned().chain([name]).collect::<Vec<_>>();
        match tree {
            syn::UseTree::Path(p) => down(&p.tree, &with(p.ident.to_string()), found),
            syn::UseTree::Name(n) => found.push((with(n.ident.to_string()), n.ident.span().start().line)),
            syn::UseTree::Rename(r) => found.push((with(r.ident.to_string()), r.ident.span().start().line)),
            syn::UseTree::Glob(g) => found.push((with("*".into()), g.star_token.span.start().line)),
            syn::UseTree::Group(g) => g.items.iter().for_each(|t| down(t, before, found)),
        }
    }
    let mut found = Vec::new();
    down(tree, &[], &mut found);
    found
}

/// The path from the root of the crate of `names` in module `here`, if it begins with `crate`, `self` or `super`.
pub fn from_root(names: &[String], here: &[String]) -> Option<Vec<String>> {
    let mut module = match names.first()?.as_str() {
        "crate" => Vec::new(),
        "self" => here.to_vec(),
        "super" => here[..here.len().checked_sub(1)?].to_vec(),
        _ => return None,
    };
    for name in &names[1..] {
        match name.as_str() {
            "super" => drop(module.pop()?),
            _ => module.push(name.clone()),
        }
    }
    Some(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &str) -> Vec<String> {
        path.split("::").map(Into::into).collect()
    }

    #[test]
    fn tests_are_left_out_and_other_configurations_are_not() {
        let text = "#[cfg(test)] mod tests { fn a() {} }\n#[cfg(not(test))] fn b() {}\n#[test] fn c() {}\n\
                    #[cfg(all(unix, test))] fn d() {}\n#[cfg(any(test, feature = \"x\"))] fn e() {}\n\
                    #[cfg(any(test, kani))] fn h() {}\n\
                    struct S; impl S { #[cfg(test)] fn f() {} fn g() {} }";
        let file = without_tests(&syn::parse_file(text).unwrap());
        let kept: Vec<String> = file
            .items
            .iter()
            .flat_map(|i| match i {
                Item::Fn(f) => vec![f.sig.ident.to_string()],
                Item::Impl(b) => vec![format!("impl {}", b.items.len())],
                Item::Mod(m) => vec![m.ident.to_string()],
                _ => vec![],
            })
            .collect();
        assert_eq!(kept, ["b", "e", "impl 1"]);
    }

    #[test]
    fn modules_of_tests_in_files_are_found() {
        let file = syn::parse_file("#[cfg(test)] mod testing; mod other;").unwrap();
        let found = test_modules([("crates/a/src/lib.rs", &file), ("crates/a/src/b.rs", &file)].into_iter());
        let is = |path: &str| found.iter().any(|t| t.holds(path));
        assert!(
            is("crates/a/src/testing.rs")
                && is("crates/a/src/testing/deep.rs")
                && is("crates/a/src/b/testing.rs")
        );
        assert!(!is("crates/a/src/other.rs") && !is("crates/a/src/testing_more.rs"));
        assert!(is_test_path("crates/a/tests/it/main.rs") && is_test_path("crates/a/src/b/tests.rs"));
        assert!(!is_test_path("tests/vm/src/vm.rs"));
    }

    #[test]
    fn paths_are_resolved_to_the_root_of_the_crate() {
        let here = module_of("crates/engine/src/index/load.rs");
        assert_eq!(here, ["index", "load"]);
        assert_eq!(module_of("crates/engine/src/index/mod.rs"), ["index"]);
        assert_eq!(from_root(&names("super::super::set::Core"), &here).unwrap(), ["set", "Core"]);
        assert_eq!(from_root(&names("self::x"), &here).unwrap(), ["index", "load", "x"]);
        assert_eq!(from_root(&names("crate::set::Core"), &here).unwrap(), ["set", "Core"]);
        assert_eq!(from_root(&names("std::rc::Rc"), &here), None);
    }

    #[test]
    fn imports_of_a_group_are_listed_one_by_one() {
        let item: syn::ItemUse = syn::parse_str("use crate::{set::{Core, Turn as T}, gc::*};").unwrap();
        let found: Vec<String> = imports(&item.tree).iter().map(|(n, _)| n.join("::")).collect();
        assert_eq!(found, ["crate::set::Core", "crate::set::Turn", "crate::gc::*"]);
    }
}
