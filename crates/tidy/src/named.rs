//! The modules of its crate that a file names: in imports, paths, and the arguments of macros and attributes.
//!
//! Owns the search. Must not know which module may name which.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Item, Lit, Meta, UseTree};

use crate::rust::{from_root, imports};

/// The names that the root of a crate re-exports, and the modules that they come from.
pub fn reexports(root: &syn::File) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for item in &root.items {
        if let Item::Use(u) = item {
            for (names, _) in imports(&u.tree) {
                let names = names.strip_prefix(&["crate".to_string()][..]).unwrap_or(&names);
                if let [module, .., name] = names {
                    found.insert(name.clone(), module.clone());
                }
            }
        }
    }
    found
}

/// The modules in the root of the crate that a file names, with the lines. `module` is the file's own module.
pub fn modules_named(
    file: &syn::File,
    module: Vec<String>,
    reexports: &BTreeMap<String, String>,
) -> BTreeSet<(usize, String)> {
    let mut finder = ModuleFinder { module, reexports, named: BTreeSet::new() };
    finder.visit_file(file);
    finder.named
}

struct ModuleFinder<'a> {
    module: Vec<String>,
    reexports: &'a BTreeMap<String, String>,
    /// The named components, with the lines.
    named: BTreeSet<(usize, String)>,
}

impl ModuleFinder<'_> {
    fn name(&mut self, names: &[String], line: usize) {
        let Some(component) = from_root(names, &self.module).and_then(|p| p.into_iter().next()) else {
            return;
        };
        let component = self.reexports.get(&component).unwrap_or(&component);
        self.named.insert((line, component.clone()));
    }

    /// Finds paths in the strings of a `serde` attribute, such as `with = "crate::a::b"`.
    fn strings(&mut self, stream: TokenStream) {
        for tree in stream {
            match tree {
                TokenTree::Group(group) => self.strings(group.stream()),
                TokenTree::Literal(literal) => {
                    if let Lit::Str(text) = Lit::new(literal)
                        && let Ok(path) = text.parse::<TokenStream>()
                    {
                        self.tokens(path);
                    }
                }
                _ => {}
            }
        }
    }

    /// Finds paths such as `crate::a::b` in the tokens of the arguments of a macro or an attribute.
    fn tokens(&mut self, stream: TokenStream) {
        let mut names: Vec<String> = Vec::new();
        let mut line = 0;
        for tree in stream {
            match tree {
                TokenTree::Ident(ident) => {
                    let name = ident.to_string();
                    if ["crate", "self", "super"].contains(&name.as_str()) && names.is_empty() {
                        line = ident.span().start().line;
                        names.push(name);
                    } else if !names.is_empty() && names.last().is_some_and(String::is_empty) {
                        names.pop();
                        names.push(name);
                    } else {
                        self.end(&mut names, line);
                    }
                }
                TokenTree::Punct(p) if p.as_char() == ':' => {
                    if names.last().is_some_and(|n| !n.is_empty()) {
                        names.push(String::new());
                    }
                }
                TokenTree::Group(group) => {
                    self.end(&mut names, line);
                    self.tokens(group.stream());
                }
                _ => self.end(&mut names, line),
            }
        }
        self.end(&mut names, line);
    }

    fn end(&mut self, names: &mut Vec<String>, line: usize) {
        if names.len() > 1 {
            self.name(names, line);
        }
        names.clear();
    }
}

impl<'ast> Visit<'ast> for ModuleFinder<'_> {
    fn visit_use_tree(&mut self, tree: &'ast UseTree) {
        for (names, line) in imports(tree) {
            self.name(&names, line);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if let Some(first) = path.segments.first().filter(|_| names.len() > 1) {
            self.name(&names, first.ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.tokens(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
            if list.path.is_ident("serde") {
                self.strings(list.tokens.clone());
            }
        }
        visit::visit_attribute(self, attribute);
    }

    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        self.module.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.module.pop();
    }

    /// `pub(in crate::x)` tells which module may name an item, and names nothing itself.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}
