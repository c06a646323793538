//! The violations that checks report.
//!
//! Owns the type. Must not know the rules.

use std::fmt;

/// One place where a rule is broken.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Violation {
    /// The file, relative to the root of the repository.
    pub path: String,
    /// The line, from 1; 0 if the violation concerns the file as a whole.
    pub line: usize,
    /// The rule, for example `sizes.function`.
    pub rule: &'static str,
    /// The name of the function or type, or an empty string.
    pub item: String,
    /// The excess over a limit, or 1.
    pub weight: usize,
    /// The expected and the found value.
    pub message: String,
}

impl Violation {
    /// A violation that counts 1 and has no item.
    pub fn new(rule: &'static str, path: &str, line: usize, message: String) -> Violation {
        Violation { path: path.into(), line, rule, item: String::new(), weight: 1, message }
    }

    /// Sets the item of the violation.
    pub fn of(self, item: &str) -> Violation {
        Violation { item: item.into(), ..self }
    }

    /// Sets the weight of the violation.
    pub fn weighing(self, weight: usize) -> Violation {
        Violation { weight, ..self }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line.max(1), self.rule, self.message)
    }
}
