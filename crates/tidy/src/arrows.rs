//! Arrows: crates and components of the engine name only crates and components below them.
//!
//! Owns both checks. `crates` reads the dependencies in every Cargo.toml, because code cannot name a crate that is no
//! dependency. Dependencies of tests may go upwards. `components` reads the paths and imports in the engine's modules,
//! outside tests. Must not know the rows, which are in `layers`.

use std::collections::BTreeMap;

use syn::Item;

use crate::error::Error;
use crate::layers::{COMPONENTS, CRATES, row};
use crate::named::{modules_named, reexports};
use crate::rust::module_of;
use crate::source::Tree;
use crate::violation::Violation;

const ENGINE: &str = "crates/engine/src/";
const LAYERS: &str = "crates/tidy/src/layers.rs";
const PREFIX: &str = "ubcache-";

/// Dependencies between crates of the repository that do not go downwards.
pub fn crates(tree: &Tree) -> Result<Vec<Violation>, Error> {
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|f| f.path.ends_with("Cargo.toml")) {
        let manifest: toml::Table = toml::from_str(&file.text)
            .map_err(|e| Error::Manifest { path: file.path.clone(), source: e.into() })?;
        let Some(name) = manifest.get("package").and_then(|p| p.get("name")).and_then(|n| n.as_str()) else {
            continue;
        };
        let own = name.trim_start_matches(PREFIX);
        let Some(here) = row(CRATES, own) else {
            let message = format!("expected a row for crate {own} in {LAYERS}, found none");
            found.push(Violation::new("arrows.crates", &file.path, 1, message));
            continue;
        };
        for section in ["dependencies", "build-dependencies"] {
            let table = manifest.get(section).and_then(|d| d.as_table());
            for key in table.into_iter().flat_map(toml::Table::keys) {
                let dependency = key.trim_start_matches(PREFIX);
                if row(CRATES, dependency).is_some_and(|there| there >= here) {
                    let message =
                        format!("{own} depends on {dependency}: expected a crate of a row below ({LAYERS})");
                    let line = line_of(&file.text, section, key);
                    found.push(Violation::new("arrows.crates", &file.path, line, message).of(dependency));
                }
            }
        }
    }
    Ok(found)
}

fn line_of(text: &str, section: &str, key: &str) -> usize {
    let header = format!("[{section}]");
    let lines = text.lines().enumerate().skip_while(|(_, l)| l.trim() != header);
    let is_key = |l: &str| l.strip_prefix(key).is_some_and(|rest| rest.starts_with(['.', ' ', '=']));
    lines.into_iter().find(|(_, l)| is_key(l)).map_or(1, |(n, _)| n + 1)
}

/// Paths in the engine's modules that name a component above the module's own.
pub fn components(tree: &Tree) -> Vec<Violation> {
    let files: Vec<_> = tree.product().filter(|(f, _)| f.path.starts_with(ENGINE)).collect();
    let Some((lib, root)) = files.iter().find(|(f, _)| f.path == format!("{ENGINE}lib.rs")) else {
        return Vec::new();
    };
    let reexports = reexports(root);
    let mut found: Vec<Violation> = modules(root)
        .into_iter()
        .filter(|(name, _)| row(COMPONENTS, name).is_none())
        .map(|(name, line)| {
            let message = format!("expected a row for component {name} in {LAYERS}, found none");
            Violation::new("arrows.components", &lib.path, line, message)
        })
        .collect();
    for (source, product) in files {
        let module = module_of(&source.path);
        let Some(here) = module.first().and_then(|name| row(COMPONENTS, name)) else { continue };
        let own = module[0].clone();
        for (line, component) in modules_named(product, module, &reexports) {
            if row(COMPONENTS, &component).is_some_and(|there| there > here) {
                let message = format!("{own} names {component}: expected a component below {own} ({LAYERS})");
                found.push(Violation::new("arrows.components", &source.path, line, message).of(&component));
            }
        }
    }
    found
}

/// The modules that the root of a crate declares, with their lines.
pub fn modules(root: &syn::File) -> BTreeMap<String, usize> {
    let declared = root.items.iter().filter_map(|i| match i {
        Item::Mod(m) => Some((m.ident.to_string(), m.ident.span().start().line)),
        _ => None,
    });
    declared.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIB: &str = "mod policy; mod index; mod set; mod volume; pub use volume::{Volume};";

    fn found(path: &str, text: &str) -> Vec<(usize, String)> {
        let tree = Tree::of(&[("crates/engine/src/lib.rs", LIB), (path, text)]);
        components(&tree).into_iter().map(|v| (v.line, v.item)).collect()
    }

    #[test]
    fn a_component_may_name_those_below_it() {
        let text = "use crate::policy::A; use super::other; fn f() { crate::policy::b(); self::c() }";
        assert_eq!(found("crates/engine/src/index/load.rs", text), []);
        assert_eq!(found("crates/engine/src/set/mod.rs", "use crate::{index, Volume};"), []);
    }

    #[test]
    fn a_component_must_not_name_those_above_it() {
        let path = "crates/engine/src/index/load.rs";
        assert_eq!(found(path, "use crate::policy::A;\nuse crate::set::{B, C};"), [(2, "set".into())]);
        assert_eq!(found(path, "fn f(a: &crate::Volume) {}"), [(1, "volume".into())]);
        assert_eq!(found(path, "fn f() { super::super::set::f() }"), [(1, "set".into())]);
        assert_eq!(found(path, "fn f() {\n assert!(x(crate::set::f::<u8>()));\n}"), [(2, "set".into())]);
    }

    #[test]
    fn tests_and_visibilities_may_name_anything() {
        let text = "pub(in crate::set) fn a() {}\n#[cfg(test)] mod tests { use crate::set::B; }";
        assert_eq!(found("crates/engine/src/index/load.rs", text), []);
    }

    #[test]
    fn a_module_of_the_engine_has_a_row() {
        let tree = Tree::of(&[("crates/engine/src/lib.rs", "mod set;\nmod unheard;")]);
        let found = components(&tree);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].line, found[0].message.contains("component unheard")), (2, true));
    }

    #[test]
    fn crates_depend_on_those_of_rows_below() {
        let manifest = |section: &str| {
            let text = format!(
                "[package]\nname = \"ubcache-io\"\n\n[{section}]\nlibc = \"1\"\nengine.workspace = true\n"
            );
            let tree = Tree::of(&[("crates/io/Cargo.toml", &text)]);
            crates(&tree).unwrap().into_iter().map(|v| (v.line, v.item)).collect::<Vec<_>>()
        };
        assert_eq!(manifest("dependencies"), [(6, "engine".into())]);
        assert_eq!(manifest("dev-dependencies"), []);
        let tree = Tree::of(&[("a/Cargo.toml", "[package]\nname = \"ubcache-unheard\"")]);
        assert!(crates(&tree).unwrap()[0].message.contains("crate unheard"));
    }
}
