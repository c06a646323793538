//! Changes: which command changes which devices and sets at present.
//!
//! Owns the claims. A command claims the devices and sets that it changes until it ends, so commands on other devices do not
//! wait for it. A command that does not get its claim within 10 s is refused, with the name of the command that has it. A
//! command whose client disconnects while it waits is not carried out. Must not know what a command does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serve::{Failure, message, plain};
use tokio::sync::Notify;

use super::problems::CommandUnderWay;
use crate::asked::{Asked, left};

/// Time for which a command waits for another one.
const WAITS_FOR: Duration = Duration::from_secs(10);

/// What a command changes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Scope {
    /// Everything.
    pub(crate) everything: bool,
    /// Devices and sets, by UUID, that nothing else may use meanwhile.
    pub(crate) alone: BTreeSet<String>,
    /// Sets that have to stay as they are.
    pub(crate) shared: BTreeSet<String>,
}

impl Scope {
    pub(crate) fn everything() -> Scope {
        Scope { everything: true, ..Scope::default() }
    }

    fn conflicts(&self, other: &Scope) -> bool {
        let hits = |one: &Scope, two: &Scope| {
            one.alone.iter().any(|key| two.alone.contains(key) || two.shared.contains(key))
        };
        self.everything || other.everything || hits(self, other) || hits(other, self)
    }
}

struct RunningCommand {
    what: String,
    scope: Scope,
    since: Instant,
    /// Whether a client has asked for it.
    is_asked: bool,
}

/// Another command has a part of the claim.
#[derive(Debug, thiserror::Error)]
#[error("{what} (for {seconds} seconds)")]
struct UnderWay {
    what: String,
    seconds: u64,
}

#[derive(Default)]
struct ClaimState {
    running: BTreeMap<u64, RunningCommand>,
    last: u64,
}

/// The claims of the commands under way.
pub(crate) struct Changes {
    state: Mutex<ClaimState>,
    ended: Notify,
    waits_for: Duration,
}

impl Default for Changes {
    fn default() -> Changes {
        Changes { state: Mutex::default(), ended: Notify::new(), waits_for: WAITS_FOR }
    }
}

/// A claim; it ends when this is dropped.
pub(crate) struct Claim<'a> {
    changes: &'a Changes,
    number: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.changes.lock().running.remove(&self.number);
        self.changes.ended.notify_waiters();
    }
}

impl Changes {
    fn lock(&self) -> MutexGuard<'_, ClaimState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The claim of a task of the daemon.
    #[cfg(test)]
    fn try_claim(&self, what: &str, scope: &Scope) -> Result<Claim<'_>, UnderWay> {
        self.try_claim_for(what, scope, false)
    }

    /// The claim, or the command that has some of it.
    fn try_claim_for(&self, what: &str, scope: &Scope, is_asked: bool) -> Result<Claim<'_>, UnderWay> {
        let mut state = self.lock();
        if let Some(other) = state.running.values().find(|r| r.scope.conflicts(scope)) {
            return Err(UnderWay { what: other.what.clone(), seconds: other.since.elapsed().as_secs() });
        }
        state.last += 1;
        let number = state.last;
        let running =
            RunningCommand { what: what.to_owned(), scope: scope.clone(), since: Instant::now(), is_asked };
        state.running.insert(number, running);
        Ok(Claim { changes: self, number })
    }

    /// Claims what a command changes.
    ///
    /// # Errors
    /// If another command has some of it for too long, or the client disconnects first.
    pub(crate) async fn claim(&self, asked: &Asked, scope: Scope) -> Result<Claim<'_>, Failure> {
        asked.client.is_there().await?;
        let is_asked = asked.client.is_a_client();
        match self.try_claim_for(&asked.what, &scope, is_asked) {
            Ok(claim) => return Ok(claim),
            Err(other) => message::note(plain::escaped(&format!("{} waits; under way: {other}", asked.what))),
        }
        let waited = tokio::time::timeout(self.waits_for, self.wait_for(&asked.what, &scope, is_asked));
        tokio::select! {
            // The claim may be free after the client has left and before this task sees either.
            biased;
            () = asked.client.disconnected() => Err(left()),
            claim = waited => claim.or_else(|_| self.try_claim_for(&asked.what, &scope, is_asked)).map_err(|other| {
                let text = format!(
                    "nothing was changed: another command is under way for the same device or set: {other}; \
                     try again later"
                );
                Failure::caused(text, other)
            }),
        }
    }

    /// Claims what `find` says that a command changes, and returns what `find` found under the claim. Other commands may
    /// change the devices during the wait, so it looks again under each claim, until the claim covers what it finds.
    ///
    /// # Errors
    /// Those of `find` and of [`Changes::claim`].
    pub(crate) async fn claim_found<T, F>(
        &self,
        asked: &Asked,
        find: impl Fn() -> F,
    ) -> Result<(Claim<'_>, T), Failure>
    where
        F: Future<Output = Result<(T, Scope), Failure>>,
    {
        let (_, mut scope) = find().await?;
        loop {
            let claim = self.claim(asked, scope.clone()).await?;
            let (found, now) = find().await?;
            if now == scope {
                return Ok((claim, found));
            }
            scope = now;
        }
    }

    /// Claims something for the daemon itself, whenever it can be had.
    pub(crate) async fn wait(&self, what: &str, scope: &Scope) -> Claim<'_> {
        self.wait_for(what, scope, false).await
    }

    /// The commands of clients that are under way.
    pub(crate) fn under_way(&self) -> Vec<CommandUnderWay> {
        let state = self.lock();
        let asked = state.running.values().filter(|running| running.is_asked);
        let waiting = asked.map(|running| CommandUnderWay {
            command: running.what.clone(),
            seconds: running.since.elapsed().as_secs(),
            changes: running.scope.alone.iter().cloned().collect(),
        });
        waiting.collect()
    }

    async fn wait_for(&self, what: &str, scope: &Scope, is_asked: bool) -> Claim<'_> {
        loop {
            // Enabled before the look, so that no end is missed.
            let ended = self.ended.notified();
            let mut ended = std::pin::pin!(ended);
            ended.as_mut().enable();
            if let Ok(claim) = self.try_claim_for(what, scope, is_asked) {
                return claim;
            }
            ended.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked::Presence;

    fn scope(alone: &[&str], shared: &[&str]) -> Scope {
        let keys = |keys: &[&str]| keys.iter().map(|k| (*k).to_owned()).collect();
        Scope { everything: false, alone: keys(alone), shared: keys(shared) }
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
    }

    #[test]
    fn commands_on_other_devices_do_not_wait() {
        runtime().block_on(async {
            let changes = Changes { waits_for: Duration::ZERO, ..Changes::default() };
            let asked = |what: &str| Asked::inside(what);
            let _set = changes.claim(&asked("unregister /dev/ssd"), scope(&["set"], &[])).await.unwrap();
            changes.claim(&asked("register /dev/other"), scope(&["b"], &["other"])).await.unwrap();
            let refused = changes.claim(&asked("register /dev/hdd"), scope(&["a"], &["set"])).await;
            let said = refused.err().unwrap();
            assert!(said.message().unwrap().contains("unregister /dev/ssd (for "), "{said}");
            assert!(changes.claim(&asked("reload"), Scope::everything()).await.is_err());
        });
    }

    #[test]
    fn members_of_a_set_change_side_by_side_and_the_set_waits_for_them() {
        runtime().block_on(async {
            let changes = Changes::default();
            let asked = Asked::inside("attach");
            let one = changes.claim(&asked, scope(&["a"], &["set"])).await.unwrap();
            let two = changes.claim(&asked, scope(&["b"], &["set"])).await.unwrap();
            let set = scope(&["set"], &[]);
            let waits = changes.wait("unregister", &set);
            let ends = async {
                drop(one);
                tokio::task::yield_now().await;
                drop(two);
            };
            tokio::join!(waits, ends);
        });
    }

    /// `register` decided by what it had found before it waited for `attach`, and served a disk without its cache.
    #[test]
    fn a_command_looks_again_after_its_wait() {
        runtime().block_on(async {
            let changes = Changes::default();
            let set = std::cell::Cell::new("old");
            let find = || async { Ok((set.get(), scope(&["a"], &[set.get()]))) };
            let asked = Asked::inside("register");
            let attach = changes.claim(&asked, scope(&["a"], &["new"])).await.unwrap();
            let register = changes.claim_found(&asked, find);
            let attaches = async {
                tokio::task::yield_now().await;
                set.set("new");
                drop(attach);
            };
            let (_claim, found) = tokio::join!(register, attaches).0.unwrap();
            assert_eq!(found, "new");
            assert!(
                changes.try_claim("unregister", &scope(&["new"], &[])).is_err(),
                "the new set is claimed"
            );
            assert!(changes.try_claim("unregister", &scope(&["old"], &[])).is_ok());
        });
    }

    /// The tasks of the daemon wait without an operator.
    #[test]
    fn commands_of_clients_are_listed_while_they_are_under_way() {
        runtime().block_on(async {
            let changes = Changes::default();
            let (_here, client) = Presence::new();
            let asked = Asked { what: "stop a".into(), client };
            let claim = changes.claim(&asked, scope(&["a"], &["set"])).await.unwrap();
            let _inside = changes.claim(&Asked::inside("replug"), scope(&["b"], &[])).await.unwrap();
            let listed = changes.under_way();
            assert_eq!(listed.iter().map(|w| &*w.command).collect::<Vec<_>>(), ["stop a"]);
            assert_eq!(listed[0].changes, ["a"]);
            drop(claim);
            assert!(changes.under_way().is_empty());
        });
    }

    #[test]
    fn a_command_whose_client_is_gone_does_not_begin() {
        runtime().block_on(async {
            let changes = Changes::default();
            let first = changes.claim(&Asked::inside("attach"), Scope::everything()).await.unwrap();
            let (here, client) = Presence::new();
            let asked = Asked { what: "register".into(), client };
            let waits = changes.claim(&asked, Scope::everything());
            let leaves = async {
                tokio::task::yield_now().await;
                // Both before the command runs again.
                drop(here);
                drop(first);
            };
            let said = tokio::join!(waits, leaves).0.err().unwrap();
            assert!(said.message().unwrap().contains("disconnected before"), "{said}");
            assert!(changes.try_claim("next", &Scope::everything()).is_ok());
        });
    }
}
