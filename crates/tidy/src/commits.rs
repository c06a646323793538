//! The check of commits: a subject has at most 72 characters.

use std::path::Path;

use crate::source::git;
use crate::violation::Violation;

const SUBJECT: usize = 72;

/// Violations in commits that the upstream branch does not have; none without a repository or an upstream.
pub fn check(root: &Path) -> Vec<Violation> {
    let log = git(root, &["log", "--no-merges", "--format=%h %s", "@{upstream}..HEAD"]);
    log.as_deref().unwrap_or_default().lines().filter_map(subject).collect()
}

fn subject(line: &str) -> Option<Violation> {
    let (commit, subject) = line.split_once(' ')?;
    let length = subject.chars().count();
    let message = format!("expected a subject of at most {SUBJECT} characters, found {length}: {subject}");
    (length > SUBJECT).then(|| Violation::new("commits", &format!("commit {commit}"), 1, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_has_72_characters_at_most() {
        assert_eq!(subject(&format!("abc {}", "ä".repeat(72))), None);
        let found = subject(&format!("abc {}", "a".repeat(73))).unwrap();
        assert_eq!((found.path.as_str(), found.message.contains("found 73")), ("commit abc", true));
    }

    /// A branch with one commit, whose upstream is the branch `base` without it.
    #[test]
    fn only_commits_that_the_upstream_does_not_have_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let run = |arguments: &[&str]| git(dir.path(), arguments).expect("git runs");
        let commit = |subject: &str| {
            let who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"];
            run(&[&who[..], &["commit", "-q", "--allow-empty", "-m", subject]].concat())
        };
        run(&["init", "-q", "-b", "base"]);
        commit(&"a".repeat(80));
        run(&["checkout", "-q", "-b", "branch"]);
        assert_eq!(check(dir.path()), []);
        run(&["branch", "-q", "--set-upstream-to", "base"]);
        commit("short");
        assert_eq!(check(dir.path()), []);
        commit(&"b".repeat(73));
        assert_eq!(check(dir.path()).len(), 1);
    }
}
