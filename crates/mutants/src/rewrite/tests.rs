//! Tests of the rewriting of small pieces of code.

use super::*;

fn all(text: &str) -> Rewritten {
    rewrite("a.rs", text, 1, &|_| true).unwrap()
}

fn changes(text: &str) -> Vec<String> {
    all(text).mutants.into_iter().map(|m| m.key).collect()
}

#[test]
fn a_comparison_holds_its_mutants() {
    let r = all("fn f(a: u8, b: u8) -> char {\n    if a < b { 'x' } else { 'y' }\n}\n");
    let expected = "\
fn f(a: u8, b: u8) -> char {
    if (if crate::mutants::on(1) {
        a <= b
    } else if crate::mutants::on(2) {
        a >= b
    } else {
        a < b
    }) {
        'x'
    } else {
        'y'
    }
}
";
    assert_eq!(r.text, expected);
    let keys: Vec<&str> = r.mutants.iter().map(|m| m.key.as_str()).collect();
    assert_eq!(keys, ["a.rs f: `a < b`: `<` becomes `<=`", "a.rs f: `a < b`: `<` becomes `>=`"]);
    assert_eq!(r.mutants.iter().map(|m| (m.number, m.line)).collect::<Vec<_>>(), [(1, 2), (2, 2)]);
}

#[test]
fn operands_are_changed_in_the_original_alone() {
    let r = all("fn f() -> char { g(a && b || c) }");
    let text: String = r.text.split_whitespace().collect::<Vec<_>>().join(" ");
    // The inner operator has a number only in the branch with the original.
    assert!(
        text.contains(
            "if crate::mutants::on(2) { (a && b) && c } else { \
             (if crate::mutants::on(1) { a || b } else { a && b }) || c }"
        ),
        "{text}"
    );
}

#[test]
fn statements_can_be_left_out() {
    let found = changes(
        "impl X { async fn f(&self) -> Vec<u8, A> { self.a(); self.b()?; self.c().await?; self.d = e; self.g += h; let i = j(); k!() } }",
    );
    let expected = [
        "body becomes `:: core :: default :: Default :: default ()`",
        "delete `self.a()`",
        "delete `self.b()?`",
        "delete `self.c().await?`",
        "delete `self.d = e`",
        "delete `self.g += h`",
        "`self.g += h`: `+=` becomes `-=`",
    ];
    assert_eq!(found, expected.map(|c| format!("a.rs X::f: {c}")));
}

#[test]
fn functions_return_early() {
    let r =
        all("fn f() -> bool { work() }\nfn g() -> ! { stop() }\nfn h() {}\nconst fn i() -> bool { 1 < 2 }");
    assert_eq!(r.mutants.len(), 2);
    assert!(
        r.text.starts_with("fn f() -> bool {\n    if crate::mutants::on(1) {\n        return true;\n    }"),
        "{}",
        r.text
    );
}

#[test]
fn conditions_and_guards() {
    let found = changes(
        "fn f() -> char { if x.is() { a } else if !y { b } else { match z { Some(n) if n.ok() => c, _ => d } } }",
    );
    let expected = [
        "`if x.is()`: condition negated",
        "`!y`: `!` removed",
        "guard `n.ok()` becomes `true`",
        "guard `n.ok()` becomes `false`",
    ];
    assert_eq!(found, expected.map(|c| format!("a.rs f: {c}")));
}

#[test]
fn a_chain_with_let_stays_a_condition() {
    let r = all("fn f() -> char { if let Some(a) = b && a > c { 'x' } else { 'y' } }");
    assert_eq!(r.mutants.len(), 2, "only `>` is changed");
    assert!(r.text.contains("if let Some(a) = b\n        &&"), "{}", r.text);
}

#[test]
fn literals_grow_where_code_runs() {
    let found =
        changes("const A: u8 = 1 + 2;\nfn f() -> char { let a = [0; 8]; match a { 1 => b(5), _ => c } }");
    assert_eq!(
        found,
        [
            "a.rs f: `0` becomes `1` in `fn f() -> char { let a = [0; 8]; match a { 1 => b(5), _ => c } }`",
            "a.rs f: `5` becomes `6` in `fn f() -> char { let a = [0; 8]; match a { 1 => b(5), _ => c } }`",
        ]
    );
}

#[test]
fn tests_macros_and_deliberate_bugs_are_left_alone() {
    let found = changes(
        "#[cfg(test)] mod tests { fn f() -> bool { a < b } }
         impl fmt::Debug for X { fn fmt(&self) -> bool { a < b } }
         static A: u8 = 1 + 2;
         fn g() -> char { assert!(a < b); mark(Mark::A); if bug(Bug::A) { c.d(); } if e() && !bug(Bug::B) { h } else { i } }",
    );
    assert_eq!(found, Vec::<String>::new());
    assert_eq!(test_modules("mod a;\n#[cfg(test)]\nmod b;\n#[cfg(test)]\nmod c {}").unwrap(), ["b"]);
}

#[test]
fn code_that_a_product_also_has_is_no_test() {
    let of_tests = |cfg: &str| test_modules(&format!("#[cfg({cfg})]\nmod a;")).unwrap() == ["a"];
    for cfg in ["test", "kani", "any(test, kani)", "all(test, unix)", "all(unix, any(kani, test))"] {
        assert!(of_tests(cfg), "{cfg}");
    }
    for cfg in ["not(test)", "not(kani)", "any(test, unix)", "feature = \"test\"", "tests", "unix"] {
        assert!(!of_tests(cfg), "{cfg}");
    }
}

#[test]
fn equal_changes_are_counted_and_keys_have_no_lines() {
    let text = "fn f() -> char { a.b(); c(); a.b(); d }";
    let found = changes(text);
    assert_eq!(found, ["a.rs f: delete `a.b()`", "a.rs f: delete `c()`", "a.rs f: delete `a.b()` (2)"]);
    assert_eq!(found, changes(&format!("\n\n{text}")));
}

#[test]
fn unwanted_mutants_do_not_exist() {
    let r = rewrite("a.rs", "fn f() -> char { a.b(); c(); d }", 7, &|key| !key.contains("a.b()")).unwrap();
    assert_eq!(r.mutants.len(), 1);
    assert_eq!(r.mutants[0].number, 7);
    assert!(!r.text.contains("on(8)") && r.text.contains("    a.b();\n"), "{}", r.text);
}
