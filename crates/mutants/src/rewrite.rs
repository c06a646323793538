//! Rewrites a source file so that it holds every mutant of it.
//!
//! Owns the choice of the code that is changed. A mutant is `if crate::mutants::on(N) { changed } else { original }`, or
//! `if !crate::mutants::on(N) { statement }`. Invariant: with no mutant switched on, the file behaves like the original. Operands
//! have no mutants inside the changed expression, so the text grows only linearly with the depth of expressions.
//!
//! Not changed: code that the compiler evaluates (constants, statics, array lengths, patterns), arguments of macros, tests,
//! `Debug` and `Display`, and the marks and deliberate bugs of module `canary`.

use std::collections::HashMap;

use proc_macro2::{Literal, Span};
use quote::ToTokens;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit_mut::{self, VisitMut};
use syn::{Attribute, Block, Expr, Meta, ReturnType, Signature, Stmt, Token, UnOp, parse_quote};

use crate::operators;
use crate::table::Mutant;

/// A rewritten file.
pub struct Rewritten {
    /// Text of the file.
    pub text: String,
    /// Mutants in the file, in order.
    pub mutants: Vec<Mutant>,
}

/// Rewrites `text` of the file at path `file`. Mutants have numbers from `first` on. Only mutants whose keys are `wanted` exist.
pub fn rewrite(
    file: &str,
    text: &str,
    first: u32,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<Rewritten, syn::Error> {
    let mut tree = syn::parse_file(text)?;
    let lines: Vec<&str> = text.lines().collect();
    let mut rewriter = Rewriter {
        file,
        lines: &lines,
        scope: Vec::new(),
        occurrences: HashMap::new(),
        wanted,
        next: first,
        mutants: Vec::new(),
    };
    rewriter.visit_file_mut(&mut tree);
    let mutants = rewriter.mutants;
    Ok(Rewritten { text: prettyplease::unparse(&tree), mutants })
}

/// Names of modules in other files that are compiled only for tests and proofs: `#[cfg(test)] mod tests;`.
pub fn test_modules(text: &str) -> Result<Vec<String>, syn::Error> {
    let tree = syn::parse_file(text)?;
    let of_tests = |item: &syn::Item| match item {
        syn::Item::Mod(m) if m.content.is_none() && is_test(&m.attrs) => Some(m.ident.to_string()),
        _ => None,
    };
    Ok(tree.items.iter().filter_map(of_tests).collect())
}

struct Rewriter<'a> {
    file: &'a str,
    lines: &'a [&'a str],
    /// Type and function that contain the current place.
    scope: Vec<String>,
    /// Number of occurrences of each key.
    occurrences: HashMap<String, u32>,
    wanted: &'a dyn Fn(&str) -> bool,
    next: u32,
    mutants: Vec<Mutant>,
}

impl Rewriter<'_> {
    /// Makes a new mutant and its condition, which holds if the mutant is switched on; `None` if the mutant is not wanted.
    fn on(&mut self, span: Span, change: &str) -> Option<Expr> {
        let mut key = format!("{} {}: {change}", self.file, self.scope.join("::"));
        let count = self.occurrences.entry(key.clone()).or_default();
        *count += 1;
        if *count > 1 {
            key = format!("{key} ({count})");
        }
        if !(self.wanted)(&key) {
            return None;
        }
        let number = self.next;
        self.next += 1;
        let literal = Literal::u32_unsuffixed(number);
        self.mutants.push(Mutant { number, file: self.file.to_owned(), line: span.start().line, key });
        Some(parse_quote!(crate::mutants::on(#literal)))
    }

    /// An expression that is `original`, or one of `others` if its mutant is switched on.
    fn choice(&mut self, span: Span, others: Vec<(String, Expr)>, original: Expr) -> Expr {
        // Numbers follow the order of the table, and the first number is tested first.
        let mut tests = Vec::new();
        for (change, other) in others {
            if let Some(on) = self.on(span, &change) {
                tests.push((on, other));
            }
        }
        if tests.is_empty() {
            return original;
        }
        let mut chain: Option<Expr> = None;
        for (on, other) in tests.into_iter().rev() {
            let rest = chain.take();
            chain = Some(match rest {
                None => parse_quote!(if #on { #other } else { #original }),
                Some(rest) => parse_quote!(if #on { #other } else #rest),
            });
        }
        chain.map_or(original, |chain| parse_quote!((#chain)))
    }

    fn binary(&mut self, e: &mut Expr) {
        let Expr::Binary(whole) = &*e else { return };
        let before = whole.clone();
        let has_let = contains_let(e);
        let leave = has_let || (is_logical(&before.op) && names_canary(e));
        visit_mut::visit_expr_mut(self, e);
        if leave {
            return;
        }
        let text = source(&before, before.span());
        let others = operators::binary(&before.op)
            .into_iter()
            .map(|op| {
                let change = format!("`{text}`: `{}` becomes `{}`", tokens(&before.op), tokens(&op));
                let mut other = before.clone();
                other.op = op;
                *other.left = grouped(&other.left);
                *other.right = grouped(&other.right);
                (change, Expr::Binary(other))
            })
            .collect();
        *e = self.choice(before.span(), others, e.clone());
    }

    fn not(&mut self, e: &mut Expr) {
        let Expr::Unary(before) = e.clone() else { return };
        let is_not = matches!(before.op, UnOp::Not(_)) && !names_canary(e);
        visit_mut::visit_expr_mut(self, e);
        if is_not {
            let change = format!("`{}`: `!` removed", source(&before, before.span()));
            *e = self.choice(before.span(), vec![(change, grouped(&before.expr))], e.clone());
        }
    }

    fn condition(&mut self, e: &mut Expr) {
        let Expr::If(whole) = e else { return };
        let before = (*whole.cond).clone();
        self.visit_expr_mut(&mut whole.cond);
        let simple = matches!(
            before,
            Expr::MethodCall(_) | Expr::Call(_) | Expr::Path(_) | Expr::Field(_) | Expr::Macro(_)
        );
        if simple && !names_canary(&before) {
            let change = format!("`if {}`: condition negated", source(&before, before.span()));
            let negated = parse_quote!(!#before);
            let original = (*whole.cond).clone();
            *whole.cond = self.choice(before.span(), vec![(change, negated)], original);
        }
        // The effect of a deliberate bug is not code of the engine.
        if !is_bug(&before) {
            self.visit_block_mut(&mut whole.then_branch);
        }
        if let Some((_, other)) = &mut whole.else_branch {
            self.visit_expr_mut(other);
        }
    }

    fn literal(&mut self, e: &mut Expr) {
        let Expr::Lit(lit) = &*e else { return };
        let Some(next) = operators::literal(&lit.lit) else { return };
        let span = lit.span();
        let line = self.lines.get(span.start().line.saturating_sub(1)).map_or("", |l| l.trim());
        let change = format!("`{}` becomes `{}` in `{}`", tokens(lit), tokens(&next), shortened(line));
        *e = self.choice(span, vec![(change, parse_quote!(#next))], e.clone());
    }

    /// Adds early returns at the start of a function's body, and mutants inside it.
    fn body(&mut self, sig: &Signature, attrs: &[Attribute], block: &mut Block) {
        if sig.constness.is_some() || is_test(attrs) {
            return;
        }
        self.scope.push(sig.ident.to_string());
        let never = matches!(&sig.output, ReturnType::Type(_, ty) if matches!(**ty, syn::Type::Never(_)));
        let returns =
            if block.stmts.is_empty() || never { Vec::new() } else { operators::early_returns(&sig.output) };
        let mut heads: Vec<Stmt> = Vec::new();
        for value in returns {
            let text = value.as_ref().map_or_else(|| "`return`".to_owned(), |v| format!("`{}`", tokens(v)));
            if let Some(on) = self.on(sig.ident.span(), &format!("body becomes {text}")) {
                heads.push(parse_quote!(if #on { return #value; }));
            }
        }
        self.visit_block_mut(block);
        block.stmts.splice(0..0, heads);
        self.scope.pop();
    }

    fn statement(&mut self, stmt: &mut Stmt) {
        let deletion = match &*stmt {
            Stmt::Expr(e, Some(_)) if is_deletable(e) => Some(format!("delete `{}`", source(e, e.span()))),
            _ => None,
        };
        let span = stmt.span();
        let on = deletion.and_then(|change| self.on(span, &change));
        visit_mut::visit_stmt_mut(self, stmt);
        if let Some(on) = on {
            let kept = stmt.clone();
            *stmt = parse_quote!(if !#on { #kept });
        }
    }
}

impl VisitMut for Rewriter<'_> {
    fn visit_expr_mut(&mut self, e: &mut Expr) {
        match e {
            Expr::Binary(_) => self.binary(e),
            Expr::Unary(_) => self.not(e),
            Expr::If(_) => self.condition(e),
            Expr::Lit(_) => self.literal(e),
            Expr::Repeat(r) => self.visit_expr_mut(&mut r.expr),
            Expr::Macro(_) | Expr::Const(_) => {}
            Expr::Call(_) if is_bug(e) => {}
            _ => visit_mut::visit_expr_mut(self, e),
        }
    }

    fn visit_block_mut(&mut self, block: &mut Block) {
        for stmt in &mut block.stmts {
            self.statement(stmt);
        }
    }

    fn visit_arm_mut(&mut self, arm: &mut syn::Arm) {
        if let syn::Pat::Guard(p) = &mut arm.pat {
            let guard = &mut p.guard;
            let before = (**guard).clone();
            self.visit_expr_mut(guard);
            if !contains_let(&before) && !names_canary(&before) {
                let text = source(&before, before.span());
                let others = vec![
                    (format!("guard `{text}` becomes `true`"), parse_quote!(true)),
                    (format!("guard `{text}` becomes `false`"), parse_quote!(false)),
                ];
                **guard = self.choice(before.span(), others, (**guard).clone());
            }
        }
        self.visit_expr_mut(&mut arm.body);
    }

    fn visit_item_fn_mut(&mut self, f: &mut syn::ItemFn) {
        self.body(&f.sig, &f.attrs, &mut f.block);
    }

    fn visit_impl_item_fn_mut(&mut self, f: &mut syn::ImplItemFn) {
        self.body(&f.sig, &f.attrs, &mut f.block);
    }

    fn visit_trait_item_fn_mut(&mut self, f: &mut syn::TraitItemFn) {
        if let Some(block) = &mut f.default {
            self.body(&f.sig, &f.attrs, block);
        }
    }

    fn visit_item_impl_mut(&mut self, i: &mut syn::ItemImpl) {
        let of_trait = i.trait_.as_ref().and_then(|t| t.0.segments.last()).map(|s| s.ident.to_string());
        if is_test(&i.attrs) || matches!(of_trait.as_deref(), Some("Debug" | "Display")) {
            return;
        }
        let name = match &*i.self_ty {
            syn::Type::Path(p) => p.path.segments.last().map_or_else(String::new, |s| s.ident.to_string()),
            other => tokens(other),
        };
        self.scope.push(name);
        visit_mut::visit_item_impl_mut(self, i);
        self.scope.pop();
    }

    fn visit_item_mod_mut(&mut self, m: &mut syn::ItemMod) {
        if !is_test(&m.attrs) {
            visit_mut::visit_item_mod_mut(self, m);
        }
    }

    fn visit_item_const_mut(&mut self, _: &mut syn::ItemConst) {}
    fn visit_impl_item_const_mut(&mut self, _: &mut syn::ImplItemConst) {}
    fn visit_trait_item_const_mut(&mut self, _: &mut syn::TraitItemConst) {}
    fn visit_item_static_mut(&mut self, _: &mut syn::ItemStatic) {}
    fn visit_item_enum_mut(&mut self, _: &mut syn::ItemEnum) {}
    fn visit_pat_mut(&mut self, _: &mut syn::Pat) {}
    fn visit_type_mut(&mut self, _: &mut syn::Type) {}
    fn visit_attribute_mut(&mut self, _: &mut Attribute) {}
    fn visit_macro_mut(&mut self, _: &mut syn::Macro) {}
    fn visit_generic_argument_mut(&mut self, _: &mut syn::GenericArgument) {}
    fn visit_generics_mut(&mut self, _: &mut syn::Generics) {}
}

/// Whether the item is compiled only for tests, or for proofs (`kani`).
fn is_test(attrs: &[Attribute]) -> bool {
    let of_tests = |a: &Attribute| a.parse_args().is_ok_and(|predicate| demands_test(&predicate));
    attrs.iter().any(|a| a.path().is_ident("test") || (a.path().is_ident("cfg") && of_tests(a)))
}

/// Whether the predicate of a `cfg` is true in tests and proofs only: `test`, `kani`, `all(…)` with one of them, or `any(…)` of them.
fn demands_test(predicate: &Meta) -> bool {
    let Meta::List(list) = predicate else {
        return predicate.path().is_ident("test") || predicate.path().is_ident("kani");
    };
    let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap_or_default();
    if list.path.is_ident("all") {
        parts.iter().any(demands_test)
    } else {
        list.path.is_ident("any") && parts.iter().all(demands_test)
    }
}

fn is_logical(op: &syn::BinOp) -> bool {
    matches!(op, syn::BinOp::And(_) | syn::BinOp::Or(_))
}

/// Whether the expression is a chain of `&&` with `let` in it, which is allowed only as a condition.
fn contains_let(e: &Expr) -> bool {
    match e {
        Expr::Let(_) => true,
        Expr::Binary(b) => contains_let(&b.left) || contains_let(&b.right),
        _ => false,
    }
}

fn has_word(e: &impl ToTokens, words: &[&str]) -> bool {
    let text = tokens(e);
    text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| words.contains(&w))
}

fn names_canary(e: &impl ToTokens) -> bool {
    has_word(e, &["bug", "mark"])
}

/// Whether the expression is a call that is true if a deliberate bug is switched on.
fn is_bug(e: &Expr) -> bool {
    match e {
        Expr::Call(c) => has_word(&c.func, &["bug", "mark"]),
        Expr::Binary(b) => is_bug(&b.left) || is_bug(&b.right),
        Expr::Paren(p) => is_bug(&p.expr),
        _ => false,
    }
}

/// Whether a statement can be removed: a call or a change of a place.
fn is_deletable(e: &Expr) -> bool {
    match e {
        Expr::MethodCall(_) | Expr::Assign(_) => true,
        Expr::Call(_) => !is_bug(e),
        Expr::Await(a) => is_deletable(&a.base),
        Expr::Try(t) => is_deletable(&t.expr),
        Expr::Binary(b) => tokens(&b.op).ends_with('=') && !operators::binary(&b.op).is_empty(),
        _ => false,
    }
}

/// Puts the expression in parentheses, unless it needs none in any context.
fn grouped(e: &Expr) -> Expr {
    match e {
        Expr::Path(_)
        | Expr::Lit(_)
        | Expr::MethodCall(_)
        | Expr::Call(_)
        | Expr::Field(_)
        | Expr::Index(_)
        | Expr::Paren(_) => e.clone(),
        _ => parse_quote!((#e)),
    }
}

fn tokens(t: &impl ToTokens) -> String {
    t.to_token_stream().to_string()
}

/// The source text on one line.
fn source(t: &impl ToTokens, span: Span) -> String {
    shortened(&span.source_text().unwrap_or_else(|| tokens(t)))
}

fn shortened(text: &str) -> String {
    const MOST: usize = 100;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests;
