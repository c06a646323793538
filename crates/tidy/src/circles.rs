//! Circles: modules in the root of a crate that name each other, directly or through others.
//!
//! Owns the check. It prescribes no order of the modules: any order without circles is right. Tests may name any module.

use std::collections::{BTreeMap, BTreeSet};

use crate::named::{modules_named, reexports};
use crate::rust::module_of;
use crate::source::Tree;
use crate::violation::Violation;

/// A path or an import: file and line, the module that contains it and the module that it names.
struct Arrow<'a> {
    path: &'a str,
    line: usize,
    from: String,
    to: String,
}

/// Arrows between modules of a crate that are part of a circle.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let src = |path: &'_ str| path.strip_suffix("lib.rs").or(path.strip_suffix("main.rs")).map(str::len);
    let roots = tree.product().filter_map(|(f, root)| Some((&f.path[..src(&f.path)?], root)));
    let mut found = Vec::new();
    for (src, root) in roots.filter(|(src, _)| src.ends_with("src/")) {
        let arrows = arrows(tree, src, root);
        let mut names: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for arrow in &arrows {
            names.entry(&arrow.from).or_default().insert(&arrow.to);
        }
        for arrow in arrows.iter().filter(|a| reaches(&names, &a.to, &a.from)) {
            let (from, to) = (&arrow.from, &arrow.to);
            let message = format!("{from} names {to}, which names {from}: expected no circle of modules");
            found.push(Violation::new("arrows.circles", arrow.path, arrow.line, message).of(to));
        }
    }
    found
}

/// The arrows between different modules in the root of the crate with its sources in `src`.
fn arrows<'a>(tree: &'a Tree, src: &str, root: &syn::File) -> Vec<Arrow<'a>> {
    let reexports = reexports(root);
    let declared: BTreeSet<String> = crate::arrows::modules(root).into_keys().collect();
    let mut found = Vec::new();
    for (file, product) in tree.product().filter(|(f, _)| f.path.starts_with(src)) {
        let module = module_of(&file.path);
        let Some(from) = module.first().cloned() else { continue };
        for (line, to) in modules_named(product, module, &reexports) {
            if to != from && declared.contains(&to) {
                found.push(Arrow { path: &file.path, line, from: from.clone(), to });
            }
        }
    }
    found
}

/// Whether `from` names `to`, directly or through other modules.
fn reaches(names: &BTreeMap<&str, BTreeSet<&str>>, from: &str, to: &str) -> bool {
    let (mut seen, mut left) = (BTreeSet::from([from]), vec![from]);
    while let Some(module) = left.pop() {
        if module == to {
            return true;
        }
        left.extend(names.get(module).into_iter().flatten().filter(|next| seen.insert(next)));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<(String, String)> {
        check(&Tree::of(files)).into_iter().map(|v| (v.path, v.item)).collect()
    }

    #[test]
    fn modules_in_a_line_are_no_circle() {
        let lib = ("crates/a/src/lib.rs", "mod one; mod two; mod three; pub use two::Two;");
        let one = ("crates/a/src/one.rs", "use crate::Two; use crate::three::Three;");
        let two = ("crates/a/src/two.rs", "use crate::three::Three; use self::x;");
        let three = ("crates/a/src/three.rs", "use std::fmt; #[cfg(test)] mod tests { use crate::one; }");
        assert_eq!(found(&[lib, one, two, three]), []);
    }

    #[test]
    fn a_circle_is_found_through_other_modules_and_reexports() {
        let lib = ("crates/a/src/lib.rs", "mod one; mod two; mod three; mod four; pub use two::Two;");
        let one = ("crates/a/src/one.rs", "use crate::Two; use crate::four::Four;");
        let two = ("crates/a/src/two/deep.rs", "use super::super::three::Three;");
        let three = ("crates/a/src/three.rs", "fn f() { crate::one::g() }");
        let expected = [("one.rs", "two"), ("two/deep.rs", "three"), ("three.rs", "one")];
        let expected = expected.map(|(path, item)| (format!("crates/a/src/{path}"), item.to_owned()));
        assert_eq!(found(&[lib, one, two, three]), expected);
    }

    #[test]
    fn a_circle_is_found_through_the_arguments_of_attributes() {
        let lib = ("crates/a/src/lib.rs", "mod one; mod two;");
        let one =
            ("crates/a/src/one.rs", "struct S {\n #[serde(default, with = \"crate::two::nanos\")] a: u8 }");
        let two = ("crates/a/src/two.rs", "struct S { #[arg(value_parser = super::one::parse)] a: u8 }");
        let expected = [("one.rs", "two"), ("two.rs", "one")];
        let expected = expected.map(|(path, item)| (format!("crates/a/src/{path}"), item.to_owned()));
        assert_eq!(found(&[lib, one, two]), expected);
        let text =
            ("crates/a/src/one.rs", "#[expect(unused, reason = \"crate::two::f calls it\")] fn g() {}");
        assert_eq!(found(&[lib, text, two]), []);
    }
}
