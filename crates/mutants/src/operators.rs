//! The mutations of an expression, a literal or a return type.
//!
//! Owns the table of mutation operators. All functions are pure functions of syntax. Must not know numbers of mutants or files.

use syn::{BinOp, Expr, GenericArgument, Lit, PathArguments, ReturnType, Type, parse_quote};

/// The replacements of a binary operator. A comparison becomes its boundary and its negation; arithmetic becomes its inverse.
pub fn binary(op: &BinOp) -> Vec<BinOp> {
    match op {
        BinOp::Lt(_) => vec![parse_quote!(<=), parse_quote!(>=)],
        BinOp::Le(_) => vec![parse_quote!(<), parse_quote!(>)],
        BinOp::Gt(_) => vec![parse_quote!(>=), parse_quote!(<=)],
        BinOp::Ge(_) => vec![parse_quote!(>), parse_quote!(<)],
        BinOp::Eq(_) => vec![parse_quote!(!=)],
        BinOp::Ne(_) => vec![parse_quote!(==)],
        BinOp::And(_) => vec![parse_quote!(||)],
        BinOp::Or(_) => vec![parse_quote!(&&)],
        BinOp::Add(_) => vec![parse_quote!(-)],
        BinOp::Sub(_) => vec![parse_quote!(+)],
        BinOp::Mul(_) => vec![parse_quote!(/)],
        BinOp::Div(_) => vec![parse_quote!(*)],
        BinOp::Rem(_) => vec![parse_quote!(/)],
        BinOp::Shl(_) => vec![parse_quote!(>>)],
        BinOp::Shr(_) => vec![parse_quote!(<<)],
        BinOp::BitAnd(_) => vec![parse_quote!(|)],
        BinOp::BitOr(_) => vec![parse_quote!(&)],
        BinOp::BitXor(_) => vec![parse_quote!(|)],
        BinOp::AddAssign(_) => vec![parse_quote!(-=)],
        BinOp::SubAssign(_) => vec![parse_quote!(+=)],
        BinOp::MulAssign(_) => vec![parse_quote!(/=)],
        BinOp::DivAssign(_) => vec![parse_quote!(*=)],
        BinOp::BitAndAssign(_) => vec![parse_quote!(|=)],
        BinOp::BitOrAssign(_) => vec![parse_quote!(&=)],
        BinOp::ShlAssign(_) => vec![parse_quote!(>>=)],
        BinOp::ShrAssign(_) => vec![parse_quote!(<<=)],
        _ => Vec::new(),
    }
}

/// The next integer, with the suffix of the original.
pub fn literal(lit: &Lit) -> Option<Lit> {
    let Lit::Int(int) = lit else { return None };
    let next = int.base10_parse::<u128>().ok()?.checked_add(1)?;
    Some(Lit::Int(syn::LitInt::new(&format!("{next}{}", int.suffix()), int.span())))
}

/// The values that a function returns instead of doing its work. `None` in the list is `return` without a value.
pub fn early_returns(output: &ReturnType) -> Vec<Option<Expr>> {
    let ReturnType::Type(_, ty) = output else { return vec![None] };
    match &**ty {
        Type::Tuple(t) if t.elems.is_empty() => vec![None],
        Type::Path(p) => p.path.segments.last().map_or_else(Vec::new, of_path),
        _ => Vec::new(),
    }
}

fn of_path(segment: &syn::PathSegment) -> Vec<Option<Expr>> {
    let name = segment.ident.to_string();
    match name.as_str() {
        "bool" => vec![Some(parse_quote!(true)), Some(parse_quote!(false))],
        "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" | "isize" => vec![Some(parse_quote!(0))],
        "Sectors" | "Nanos" | "Sector" | "JournalSeq" | "Vec" => {
            vec![Some(parse_quote!(::core::default::Default::default()))]
        }
        "Option" => vec![Some(parse_quote!(None))],
        "Result" if is_unit(segment) => vec![Some(parse_quote!(Ok(())))],
        _ => Vec::new(),
    }
}

/// Whether the type is `Result<(), E>`.
fn is_unit(result: &syn::PathSegment) -> bool {
    let PathArguments::AngleBracketed(args) = &result.arguments else { return false };
    matches!(args.args.first(), Some(GenericArgument::Type(Type::Tuple(t))) if t.elems.is_empty())
}

#[cfg(test)]
mod tests {
    use quote::ToTokens;

    use super::*;

    fn becomes(op: &str) -> Vec<String> {
        let e: Expr = syn::parse_str(&format!("a {op} b")).unwrap();
        let Expr::Binary(b) = e else { panic!("{op}") };
        binary(&b.op).iter().map(|o| o.to_token_stream().to_string()).collect()
    }

    #[test]
    fn operators_have_their_opposites() {
        for (op, to) in [
            ("<", "<= >="),
            ("<=", "< >"),
            (">", ">= <="),
            (">=", "> <"),
            ("==", "!="),
            ("!=", "=="),
            ("&&", "||"),
            ("||", "&&"),
            ("+", "-"),
            ("-", "+"),
            ("*", "/"),
            ("/", "*"),
            ("%", "/"),
            ("<<", ">>"),
            (">>", "<<"),
            ("&", "|"),
            ("|", "&"),
            ("^", "|"),
            ("+=", "-="),
            ("-=", "+="),
            ("^=", ""),
        ] {
            assert_eq!(becomes(op).join(" "), to, "{op}");
        }
    }

    #[test]
    fn literals_keep_their_suffix() {
        for (from, to) in [("0", "1"), ("7u64", "8u64"), ("0xff", "256"), ("1_000", "1001")] {
            let next = literal(&syn::parse_str(from).unwrap()).unwrap();
            assert_eq!(next.to_token_stream().to_string(), to);
        }
        assert!(literal(&syn::parse_str("1.5").unwrap()).is_none());
        assert!(literal(&syn::parse_str("\"1\"").unwrap()).is_none());
    }

    #[test]
    fn functions_return_at_once() {
        for (ty, to) in [
            ("", "return"),
            ("-> ()", "return"),
            ("-> bool", "true|false"),
            ("-> u64", "0"),
            ("-> Option<Slot>", "None"),
            ("-> Result<(), EngineError>", "Ok (())"),
            ("-> Result<u64, EngineError>", ""),
            ("-> &Slot", ""),
            ("-> impl Iterator<Item = u8>", ""),
            ("-> format::Sectors", ":: core :: default :: Default :: default ()"),
        ] {
            let returns = early_returns(&syn::parse_str(ty).unwrap());
            let text: Vec<String> = returns
                .iter()
                .map(|e| e.as_ref().map_or("return".into(), |e| e.to_token_stream().to_string()))
                .collect();
            assert_eq!(text.join("|"), to, "{ty}");
        }
    }
}
