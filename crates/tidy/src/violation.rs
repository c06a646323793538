//! What a check reports.

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
    /// How much the violation counts: the excess over a limit, or 1.
    pub weight: usize,
    /// What was expected and found.
    pub message: String,
}

impl Violation {
    /// A violation that counts 1 and has no item.
    pub fn new(rule: &'static str, path: &str, line: usize, message: String) -> Violation {
        Violation { path: path.into(), line, rule, item: String::new(), weight: 1, message }
    }

    /// The same violation, of an item.
    pub fn of(self, item: &str) -> Violation {
        Violation { item: item.into(), ..self }
    }

    /// The same violation with another weight.
    pub fn weighing(self, weight: usize) -> Violation {
        Violation { weight, ..self }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line.max(1), self.rule, self.message)
    }
}
