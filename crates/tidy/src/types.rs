//! No two types of a crate have the same name.
//!
//! Owns the check. Must not know what the types are for. Types that a macro defines are not found.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};

use crate::source::Tree;
use crate::violation::Violation;

/// The definition of a type: file and line.
type Definition<'a> = (&'a str, usize);

/// Types, traits and type aliases outside tests with a name that another one in their crate has. The first one in the
/// order of the files is no violation, each other one is.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let mut definitions: BTreeMap<(&str, String), Vec<Definition>> = BTreeMap::new();
    for (source, product) in tree.product() {
        let path = source.path.as_str();
        let mut names = Names(Vec::new());
        names.visit_file(product);
        for (name, line) in names.0 {
            definitions.entry((crate_of(path), name)).or_default().push((path, line));
        }
    }
    let mut found = Vec::new();
    for ((_, name), places) in definitions {
        let [(first_path, first_line), others @ ..] = &places[..] else { continue };
        for (path, line) in others {
            let message = format!(
                "{name}: expected a name that no other type of the crate has, found {name} in {first_path}:{first_line}"
            );
            found.push(Violation::new("types", path, *line, message).of(&name));
        }
    }
    found
}

/// The crate of a file: the directory above `src`. A file in `src/bin`, or outside of `src`, is a crate of its own.
fn crate_of(path: &str) -> &str {
    match path.split_once("/src/") {
        Some((root, inside)) if !inside.starts_with("bin/") => root,
        _ => path,
    }
}

/// The names of types that a file defines, with the lines.
struct Names(Vec<(String, usize)>);

/// Visits the children of a definition after it has noted its name.
macro_rules! definitions {
    ($($method:ident: $node:ident,)*) => {
        $(fn $method(&mut self, node: &'ast syn::$node) {
            self.0.push((node.ident.to_string(), node.ident.span().start().line));
            visit::$method(self, node);
        })*
    };
}

impl<'ast> Visit<'ast> for Names {
    definitions! {
        visit_item_struct: ItemStruct,
        visit_item_enum: ItemEnum,
        visit_item_union: ItemUnion,
        visit_item_trait: ItemTrait,
        visit_item_type: ItemType,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<(String, usize, String)> {
        check(&Tree::of(files)).into_iter().map(|v| (v.path, v.line, v.item)).collect()
    }

    #[test]
    fn types_of_different_crates_may_have_one_name() {
        let one = |path| (path, "struct State; trait Device {}");
        let files =
            ["crates/a/src/a.rs", "crates/b/src/a.rs", "bench/c/src/bin/x.rs", "bench/c/src/bin/y.rs"];
        assert_eq!(found(&files.map(one)), []);
        assert_eq!(found(&["fuzz/targets/a.rs", "fuzz/targets/b.rs"].map(one)), []);
    }

    #[test]
    fn each_type_after_the_first_of_its_name_is_a_violation() {
        let files = [
            ("crates/a/src/a.rs", "struct State; struct Own;"),
            ("crates/a/src/b.rs", "\nenum State {}"),
            ("crates/a/src/c/d.rs", "mod inside {\n\n type State = u8; }"),
        ];
        let expected = [("b.rs", 2), ("c/d.rs", 3)];
        let expected =
            expected.map(|(path, line)| (format!("crates/a/src/{path}"), line, "State".to_owned()));
        assert_eq!(found(&files), expected);
    }

    #[test]
    fn every_kind_of_type_counts_wherever_it_is_defined() {
        for text in ["union A { a: u8 }", "trait A {}", "type A = u8;", "fn f() { struct A; }"] {
            let files = [("crates/a/src/a.rs", "struct A;"), ("crates/a/src/b.rs", text)];
            assert_eq!(found(&files), [("crates/a/src/b.rs".into(), 1, "A".into())], "{text}");
        }
    }

    #[test]
    fn tests_and_associated_types_do_not_count() {
        let product = "struct A; #[cfg(test)] mod tests { struct A; } impl T for A { type A = u8; }";
        let test = ("crates/a/src/tests.rs", "struct A;");
        assert_eq!(found(&[("crates/a/src/a.rs", product), test, ("crates/a/tests/it.rs", "struct A;")]), []);
    }
}
