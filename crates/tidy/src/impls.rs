//! The inherent `impl` blocks of a type lie in at most two files.
//!
//! Owns the check. Types of one crate with the same name are distinguished by the file that defines them and by the
//! imports.

use std::collections::{BTreeMap, BTreeSet};

use syn::Item;

use crate::rust::{from_root, imports, module_of};
use crate::sizes::type_name;
use crate::source::Tree;
use crate::violation::Violation;

const FILES: usize = 2;

/// A place in a file.
type Place<'a> = (&'a str, usize);

/// The types of a crate: definitions and `impl` blocks, by the name of the type.
#[derive(Default)]
struct Crate<'a> {
    definitions: BTreeMap<String, Vec<Place<'a>>>,
    blocks: Vec<(String, Place<'a>)>,
    /// The modules from which a file imports names.
    imported: BTreeMap<(&'a str, String), Vec<String>>,
}

/// Types with `impl` blocks in too many files, outside tests. The weight of a violation is the number of excess files.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let mut crates: BTreeMap<&str, Crate> = BTreeMap::new();
    for (source, product) in tree.product() {
        let path = source.path.as_str();
        let root = path.split_once("/src/").map_or(path, |(root, _)| root);
        crates.entry(root).or_default().read(path, &product.items);
    }
    crates.values().flat_map(Crate::check).collect()
}

impl<'a> Crate<'a> {
    fn read(&mut self, path: &'a str, items: &[Item]) {
        for item in items {
            match item {
                Item::Struct(i) => self.define(path, &i.ident),
                Item::Enum(i) => self.define(path, &i.ident),
                Item::Union(i) => self.define(path, &i.ident),
                Item::Impl(i) if i.trait_.is_none() => {
                    if let Some(name) = type_name(&i.self_ty) {
                        self.blocks.push((name, (path, i.impl_token.span.start().line)));
                    }
                }
                Item::Use(i) => self.import(path, &i.tree),
                Item::Mod(m) => self.read(path, m.content.as_ref().map_or(&[], |(_, items)| items)),
                _ => {}
            }
        }
    }

    fn define(&mut self, path: &'a str, name: &syn::Ident) {
        let place = (path, name.span().start().line);
        self.definitions.entry(name.to_string()).or_default().push(place);
    }

    fn import(&mut self, path: &'a str, tree: &syn::UseTree) {
        for (names, _) in imports(tree) {
            if let Some(mut module) = from_root(&names, &module_of(path))
                && let Some(name) = module.pop()
            {
                self.imported.insert((path, name), module);
            }
        }
    }

    /// The place of the definition of the type for which the file at `path` has an `impl` block.
    fn definition(&self, name: &str, path: &'a str) -> Place<'a> {
        let places = self.definitions.get(name).map_or(&[][..], Vec::as_slice);
        if let Some(here) = places.iter().find(|(p, _)| *p == path) {
            return *here;
        }
        let module = self.imported.get(&(path, name.to_string())).cloned().unwrap_or_else(|| module_of(path));
        let common = |p: &str| module_of(p).iter().zip(&module).take_while(|(a, b)| a == b).count();
        places.iter().max_by_key(|(p, _)| common(p)).copied().unwrap_or((path, 1))
    }

    fn check(&self) -> Vec<Violation> {
        let mut files: BTreeMap<(&str, Place), BTreeSet<&str>> = BTreeMap::new();
        for (name, (path, _)) in &self.blocks {
            files.entry((name, self.definition(name, path))).or_default().insert(path);
        }
        files.retain(|_, files| files.len() > FILES);
        let violation = |((name, (path, line)), files): ((&str, Place), BTreeSet<&str>)| {
            let names: Vec<&str> = files.iter().map(|f| f.rsplit('/').next().unwrap_or(f)).collect();
            let (count, names) = (files.len(), names.join(", "));
            let message =
                format!("{name}: expected impl blocks in at most {FILES} files, found {count}: {names}");
            Violation::new("impls", path, line, message).of(name).weighing(count - FILES)
        };
        files.into_iter().map(violation).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<(String, String, usize)> {
        check(&Tree::of(files)).into_iter().map(|v| (v.path, v.item, v.weight)).collect()
    }

    #[test]
    fn two_files_may_have_blocks_of_a_type() {
        let a = ("crates/a/src/a.rs", "pub struct S; impl S {} impl S {} impl Clone for S {}");
        let trait_only = ("crates/a/src/c.rs", "use crate::a::S; impl Drop for S {}");
        assert_eq!(found(&[a, ("crates/a/src/b.rs", "use crate::a::S; impl S {}"), trait_only]), []);
    }

    #[test]
    fn three_files_must_not() {
        let files = [
            ("crates/a/src/a.rs", "pub struct S; impl S {}"),
            ("crates/a/src/b.rs", "use crate::a::S; impl S {}"),
            ("crates/a/src/c.rs", "impl super::a::S {}"),
        ];
        assert_eq!(found(&files), [("crates/a/src/a.rs".into(), "S".into(), 1)]);
    }

    #[test]
    fn types_of_the_same_name_are_told_apart() {
        let one = |path| (path, "struct State; impl State {}");
        assert_eq!(
            found(&[one("crates/a/src/a.rs"), one("crates/a/src/b.rs"), one("crates/a/src/c.rs")]),
            []
        );
        assert_eq!(
            found(&[one("crates/a/src/a.rs"), one("crates/b/src/a.rs"), one("crates/c/src/a.rs")]),
            []
        );
    }
}
