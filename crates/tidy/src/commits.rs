//! The check of commits: a subject has at most 72 characters.

use std::path::Path;

use crate::source::git;
use crate::violation::Violation;

const SUBJECT: usize = 72;

/// The commits that are checked: those that the upstream branch does not have; without an upstream, those that the default branch
/// of `origin` does not have; without that, the last 100. The rule is older than 100 commits.
const RANGES: [&[&str]; 3] = [&["@{upstream}..HEAD"], &["origin/HEAD..HEAD"], &["--max-count=100", "HEAD"]];

/// Violations in the commits of the first range that the repository has; none without a repository.
pub fn check(root: &Path) -> Vec<Violation> {
    let log = |range: &&[&str]| git(root, &[&["log", "--no-merges", "--format=%h %s"], *range].concat());
    RANGES.iter().find_map(log).unwrap_or_default().lines().filter_map(subject).collect()
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

    fn run(dir: &Path, arguments: &[&str]) {
        git(dir, arguments).expect("git runs");
    }

    fn commit(dir: &Path, subject: &str) {
        let author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"];
        run(dir, &[&author[..], &["commit", "-q", "--allow-empty", "-m", subject]].concat());
    }

    /// A branch `base` with one commit that violates the rule, and a branch from it without an upstream.
    fn repository() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path(), &["init", "-q", "-b", "base"]);
        commit(dir.path(), &"a".repeat(80));
        run(dir.path(), &["checkout", "-q", "-b", "branch"]);
        dir
    }

    #[test]
    fn only_commits_that_the_upstream_does_not_have_are_checked() {
        let repository = repository();
        let dir = repository.path();
        run(dir, &["branch", "-q", "--set-upstream-to", "base"]);
        commit(dir, "short");
        assert_eq!(check(dir), []);
        commit(dir, &"b".repeat(73));
        assert_eq!(check(dir).len(), 1);
    }

    #[test]
    fn without_an_upstream_the_default_branch_of_origin_is_the_base() {
        let repository = repository();
        let dir = repository.path();
        run(dir, &["update-ref", "refs/remotes/origin/base", "base"]);
        run(dir, &["symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/base"]);
        assert_eq!(check(dir), []);
        commit(dir, &"b".repeat(73));
        assert_eq!(check(dir).len(), 1);
    }

    #[test]
    fn without_any_base_the_last_hundred_commits_are_checked() {
        let repository = repository();
        let dir = repository.path();
        assert_eq!(check(dir).len(), 1);
        (0..100).for_each(|n| commit(dir, &format!("short {n}")));
        assert_eq!(check(dir), []);
        assert_eq!(check(tempfile::tempdir().unwrap().path()), [], "no repository");
    }
}
