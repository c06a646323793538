//! Finds the mutant that causes a compiler error.
//!
//! Owns the mapping from places in a rewritten file to mutants. Must not know cargo: callers pass places as byte ranges.

use std::ops::Range;

use syn::visit::{self, Visit};
use syn::{Expr, ExprIf, UnOp};

/// One mutant in a rewritten file.
#[derive(Debug)]
struct Place {
    number: u32,
    whole: Range<usize>,
    condition: Range<usize>,
    /// The changed code; `None` if the mutant removes a statement.
    changed: Option<Range<usize>>,
}

/// A place that a compiler error names.
#[derive(Clone, Debug)]
pub struct Span {
    /// Bytes of the file.
    pub bytes: Range<usize>,
    /// The role of the place in the error.
    pub role: Role,
}

/// The role of a place in an error.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Role {
    /// The compiler states that an assignment at this place may be skipped.
    Skipped,
    /// The error is at this place.
    Primary,
    /// The error is related to this place.
    Other,
}

/// The mutants of one rewritten file.
pub struct Places(Vec<Place>);

impl Places {
    /// Finds the mutants in the text of a rewritten file.
    pub fn of(text: &str) -> Result<Places, syn::Error> {
        let tree = syn::parse_file(text)?;
        let mut finder = Finder(Vec::new());
        finder.visit_file(&tree);
        Ok(Places(finder.0))
    }

    /// The mutant that probably causes the error.
    ///
    /// In this order: the mutant that removes an assignment that the error misses; the mutant whose changed code contains the
    /// error; the mutant whose condition the error names (a variable that a removed statement would set); the innermost mutant
    /// around the error; the last mutant before it.
    pub fn blame(&self, spans: &[Span]) -> Option<u32> {
        let mut ordered: Vec<&Span> = spans.iter().collect();
        ordered.sort_by_key(|s| s.role);
        let innermost =
            |found: &mut dyn Iterator<Item = &Place>| found.min_by_key(|p| p.whole.len()).map(|p| p.number);
        let changed = |s: &&Span| {
            let inside = |p: &&Place| p.changed.as_ref().is_some_and(|c| within(&s.bytes, c));
            innermost(&mut self.0.iter().filter(inside))
        };
        let condition = |s: &&Span| self.0.iter().find(|p| overlap(&s.bytes, &p.condition)).map(|p| p.number);
        let around = |s: &&Span| innermost(&mut self.0.iter().filter(|p| within(&s.bytes, &p.whole)));
        let before = |s: &&Span| {
            let earlier = self.0.iter().filter(|p| p.whole.start <= s.bytes.start);
            earlier.max_by_key(|p| p.whole.start).map(|p| p.number)
        };
        let primary: Vec<&Span> = ordered.iter().copied().filter(|s| s.role == Role::Primary).collect();
        let skipped = |s: &&Span| {
            let left_out = |p: &&Place| p.changed.is_none() && within(&s.bytes, &p.whole);
            innermost(&mut self.0.iter().filter(left_out))
        };
        let skips = ordered.iter().filter(|s| s.role == Role::Skipped);
        skips
            .clone()
            .find_map(skipped)
            .or_else(|| primary.iter().find_map(changed))
            .or_else(|| ordered.iter().find_map(condition))
            .or_else(|| ordered.iter().find_map(changed))
            .or_else(|| primary.iter().find_map(around))
            .or_else(|| primary.iter().find_map(before))
    }
}

fn within(inner: &Range<usize>, outer: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Whether the span is about the condition itself, and not about a function that contains the condition.
fn overlap(span: &Range<usize>, condition: &Range<usize>) -> bool {
    within(span, &(condition.start.saturating_sub(1)..condition.end))
}

struct Finder(Vec<Place>);

impl<'a> Visit<'a> for Finder {
    fn visit_expr_if(&mut self, e: &'a ExprIf) {
        let (call, leaves_out) = match &*e.cond {
            Expr::Unary(u) if matches!(u.op, UnOp::Not(_)) => (&*u.expr, true),
            other => (other, false),
        };
        if let Some((number, condition)) = number_of(call) {
            let then = &e.then_branch.brace_token.span;
            let then = then.open().byte_range().start..then.close().byte_range().end;
            let end = e.else_branch.as_ref().map_or(then.end, |(_, other)| end_of(other));
            let whole = e.if_token.span.byte_range().start..end;
            self.0.push(Place { number, whole, condition, changed: (!leaves_out).then_some(then) });
        }
        visit::visit_expr_if(self, e);
    }
}

/// The end of the expression after `else`.
fn end_of(other: &Expr) -> usize {
    match other {
        Expr::Block(b) => b.block.brace_token.span.close().byte_range().end,
        Expr::If(e) => match &e.else_branch {
            Some((_, next)) => end_of(next),
            None => e.then_branch.brace_token.span.close().byte_range().end,
        },
        _ => 0,
    }
}

/// The number `N` in `crate::mutants::on(N)`, and its position.
fn number_of(e: &Expr) -> Option<(u32, Range<usize>)> {
    let Expr::Call(call) = e else { return None };
    let Expr::Path(path) = &*call.func else { return None };
    let names: Vec<String> = path.path.segments.iter().map(|s| s.ident.to_string()).collect();
    if names != ["crate", "mutants", "on"] {
        return None;
    }
    let Some(Expr::Lit(lit)) = call.args.first() else { return None };
    let syn::Lit::Int(int) = &lit.lit else { return None };
    let start = path.path.segments.first()?.ident.span().byte_range().start;
    Some((int.base10_parse().ok()?, start..call.paren_token.span.close().byte_range().end))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "fn f() {
    if (if crate::mutants::on(1) { wrong(a) } else if crate::mutants::on(2) { bad(a) } else {
        (if crate::mutants::on(3) { inner(a) } else { a.b }) == right
    }) {}
    let x;
    if !crate::mutants::on(4) { x = 1; }
    use_of(x);
}
";

    fn blamed(places: &[(&str, Role)]) -> Option<u32> {
        let spans: Vec<Span> = places
            .iter()
            .map(|(word, role)| {
                let start = TEXT.find(word).unwrap();
                Span { bytes: start..start + word.len(), role: *role }
            })
            .collect();
        Places::of(TEXT).unwrap().blame(&spans)
    }

    #[test]
    fn an_error_in_changed_code_is_of_its_mutant() {
        assert_eq!(blamed(&[("wrong(a)", Role::Primary)]), Some(1));
        assert_eq!(blamed(&[("bad", Role::Primary)]), Some(2));
        assert_eq!(blamed(&[("inner", Role::Primary)]), Some(3));
    }

    #[test]
    fn an_error_elsewhere_is_of_the_innermost_around_it() {
        assert_eq!(blamed(&[("a.b", Role::Primary)]), Some(3));
        assert_eq!(
            blamed(&[("right", Role::Primary)]),
            Some(2),
            "its whole begins later than that of 1 and holds the last branch"
        );
    }

    #[test]
    fn a_variable_that_is_not_set_is_of_the_statement_left_out() {
        assert_eq!(blamed(&[("use_of(x)", Role::Primary), ("!crate::mutants::on(4)", Role::Other)]), Some(4));
    }

    #[test]
    fn a_variable_that_is_not_set_again_is_of_the_statement_left_out() {
        assert_eq!(blamed(&[("wrong(a)", Role::Primary), ("x = 1", Role::Skipped)]), Some(4));
    }

    #[test]
    fn without_a_mutant_around_the_one_before_is_blamed() {
        assert_eq!(blamed(&[("use_of(x)", Role::Primary)]), Some(4));
        assert_eq!(blamed(&[("fn f()", Role::Primary)]), None);
    }
}
