//! Limits of size: lines of a file, lines and arguments of a function, accessible fields of a type.
//!
//! Owns the limits. Must not know which violations are allowed.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Fields, FnArg, Signature, Type, Visibility};

use crate::source::Tree;
use crate::violation::Violation;

const FILE_LINES: usize = 600;
const FUNCTION_LINES: usize = 60;
const ARGUMENTS: usize = 5;
const FIELDS: usize = 15;

/// Checks files of every kind, functions and types of Rust files outside tests, and functions of the dashboard. The weight is the
/// excess over the limit.
pub fn check(tree: &Tree) -> Vec<Violation> {
    let mut found: Vec<Violation> = tree.files.iter().filter_map(|f| file(&f.path, &f.text)).collect();
    for script in tree.files.iter().filter(|f| f.path.ends_with(".js")) {
        found.extend(script_functions(&script.path, &script.text));
    }
    for (source, product) in tree.product() {
        let mut finder = SizeFinder { path: &source.path, owner: None, of_trait: false, found: Vec::new() };
        finder.visit_file(product);
        found.extend(finder.found);
    }
    found
}

fn file(path: &str, text: &str) -> Option<Violation> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_code = !name.contains('.') || [".rs", ".js", ".mjs", ".sh"].iter().any(|e| name.ends_with(e));
    let excess = text.lines().count().checked_sub(FILE_LINES + 1)? + 1;
    let message = format!("expected at most {FILE_LINES} lines, found {}", FILE_LINES + excess);
    is_code.then(|| Violation::new("sizes.file", path, 1, message).weighing(excess))
}

/// Functions of JavaScript that are too long. A function ends at the first closing brace that is indented like its begin.
fn script_functions(path: &str, text: &str) -> Vec<Violation> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let (indent, code) = line.split_at(line.len() - line.trim_start().len());
        let is_statement = ["if ", "for ", "while ", "switch ", "}"].iter().any(|s| code.starts_with(s));
        if is_statement || !(code.ends_with(") {") || code.ends_with("=> {")) {
            continue;
        }
        let is_end = |l: &&&str| l.strip_prefix(indent).is_some_and(|rest| rest.starts_with('}'));
        let length = 2 + lines[n + 1..].iter().take_while(|l| !is_end(l)).count();
        if length > FUNCTION_LINES {
            let item = code.trim_end_matches(" {").split('(').next().unwrap_or_default();
            let message = format!("{item}: expected at most {FUNCTION_LINES} lines, found {length}");
            let violation = Violation::new("sizes.function", path, n + 1, message);
            found.push(violation.of(item).weighing(length - FUNCTION_LINES));
        }
    }
    found
}

struct SizeFinder<'a> {
    path: &'a str,
    /// The type or trait whose block is visited.
    owner: Option<String>,
    /// Whether the block is an `impl` of a trait, whose functions may have more arguments.
    of_trait: bool,
    found: Vec<Violation>,
}

/// A number of things and its limit.
struct Size {
    limit: usize,
    number: usize,
    things: &'static str,
}

impl SizeFinder<'_> {
    fn report(&mut self, rule: &'static str, line: usize, item: &str, size: &Size) {
        let Size { limit, number, things } = *size;
        if number > limit {
            let message = format!("{item}: expected at most {limit} {things}, found {number}");
            let violation = Violation::new(rule, self.path, line, message);
            self.found.push(violation.of(item).weighing(number - limit));
        }
    }

    fn function(&mut self, signature: &Signature, end: usize) {
        let name = &signature.ident;
        let item = self.owner.as_ref().map_or_else(|| name.to_string(), |o| format!("{o}::{name}"));
        let line = signature.span().start().line;
        let arguments = signature.inputs.iter().filter(|a| matches!(a, FnArg::Typed(_))).count();
        let lines = Size { limit: FUNCTION_LINES, number: end - line + 1, things: "lines" };
        self.report("sizes.function", line, &item, &lines);
        if !self.of_trait {
            let arguments = Size { limit: ARGUMENTS, number: arguments, things: "arguments besides self" };
            self.report("sizes.arguments", line, &item, &arguments);
        }
    }

    fn inside(&mut self, owner: Option<String>, of_trait: bool, visit: impl FnOnce(&mut Self)) {
        let before = (self.owner.take(), self.of_trait);
        (self.owner, self.of_trait) = (owner, of_trait);
        visit(self);
        (self.owner, self.of_trait) = before;
    }
}

impl<'ast> Visit<'ast> for SizeFinder<'_> {
    fn visit_item_fn(&mut self, f: &'ast syn::ItemFn) {
        self.inside(None, false, |s| {
            s.function(&f.sig, f.block.span().end().line);
            visit::visit_item_fn(s, f);
        });
    }

    fn visit_impl_item_fn(&mut self, f: &'ast syn::ImplItemFn) {
        self.function(&f.sig, f.block.span().end().line);
        visit::visit_impl_item_fn(self, f);
    }

    fn visit_trait_item_fn(&mut self, f: &'ast syn::TraitItemFn) {
        let end = f.default.as_ref().map_or_else(|| f.sig.span().end().line, |b| b.span().end().line);
        self.function(&f.sig, end);
        visit::visit_trait_item_fn(self, f);
    }

    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        let of_trait = block.trait_.is_some();
        self.inside(type_name(&block.self_ty), of_trait, |s| visit::visit_item_impl(s, block));
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.inside(Some(item.ident.to_string()), false, |s| visit::visit_item_trait(s, item));
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        let reachable = match &item.fields {
            Fields::Unit => 0,
            fields => fields.iter().filter(|f| others_reach(&f.vis)).count(),
        };
        let line = item.ident.span().start().line;
        let fields = Size { limit: FIELDS, number: reachable, things: "fields that others reach" };
        self.report("sizes.fields", line, &item.ident.to_string(), &fields);
        visit::visit_item_struct(self, item);
    }
}

fn others_reach(visibility: &Visibility) -> bool {
    match visibility {
        Visibility::Public(_) => true,
        Visibility::Restricted(r) => !r.path.is_ident("self"),
        _ => false,
    }
}

/// The name of the type of an `impl` block, without arguments and references.
pub fn type_name(of: &Type) -> Option<String> {
    match of {
        Type::Path(p) => p.path.segments.last().map(|s| s.ident.to_string()),
        Type::Reference(r) => type_name(&r.elem),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(&'static str, String, usize)> {
        let tree = Tree::of(&[("crates/a/src/a.rs", text)]);
        check(&tree).into_iter().map(|v| (v.rule, v.item, v.weight)).collect()
    }

    #[test]
    fn a_file_has_600_lines_at_most() {
        assert_eq!(found(&"\n".repeat(600)), []);
        assert_eq!(found(&"\n".repeat(602)), [("sizes.file", String::new(), 2)]);
        assert_eq!(check(&Tree::of(&[("docs/a.md", &"\n".repeat(900))])), []);
    }

    #[test]
    fn a_function_has_60_lines_at_most() {
        let of = |lines: usize| {
            format!("struct S; impl S {{\n/// Doc.\nfn f() {{{}}}\n}}", "\n".repeat(lines - 1))
        };
        assert_eq!(found(&of(60)), []);
        assert_eq!(found(&of(61)), [("sizes.function", "S::f".into(), 1)]);
        assert_eq!(found(&format!("#[cfg(test)] mod tests {{ {} }}", of(61))), []);
    }

    #[test]
    fn a_function_of_a_script_has_60_lines_at_most() {
        let of = |begin: &str, lines: usize| {
            let body = "    if (x) {\n    }\n".repeat(lines / 2 - 1);
            let tree =
                Tree::of(&[("crates/a/web/a.js", &format!("class A {{\n  {begin}\n{body}  }}\n}}\n"))]);
            check(&tree).into_iter().map(|v| (v.rule, v.line, v.item, v.weight)).collect::<Vec<_>>()
        };
        assert_eq!(of("paint(a) {", 60), []);
        assert_eq!(of("async paint(a) {", 62), [("sizes.function", 2, "async paint".into(), 2)]);
        assert_eq!(of("for (const a of b) {", 62), []);
    }

    #[test]
    fn a_function_has_five_arguments_at_most() {
        assert_eq!(found("trait T { fn f(&self, a: u8, b: u8, c: u8, d: u8, e: u8); }"), []);
        let in_block = "fn f(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) { fn g(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) {} }";
        assert_eq!(found(&format!("impl T for S {{ {in_block} }}")), [("sizes.arguments", "g".into(), 1)]);
        let six = "fn f(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) {}";
        assert_eq!(found(six), [("sizes.arguments", "f".into(), 1)]);
        assert_eq!(check(&Tree::of(&[("crates/a/tests/a.rs", six)])), []);
    }

    #[test]
    fn a_type_has_15_fields_at_most_that_others_reach() {
        let of = |visibility: &str| {
            let fields: String = (0..17).map(|n| format!("{visibility} f{n}: u8, ")).collect();
            format!("struct S {{ {fields} }}")
        };
        assert_eq!(found(&of("")), []);
        assert_eq!(found(&of("pub(self)")), []);
        for visibility in ["pub", "pub(crate)", "pub(super)"] {
            assert_eq!(found(&of(visibility)), [("sizes.fields", "S".into(), 2)]);
        }
    }
}
