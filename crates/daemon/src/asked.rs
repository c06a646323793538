//! The command that a client asked for, and the presence of that client.
//!
//! Owns the signal that the client has disconnected. A command that has begun is carried out to its end; one that still waits
//! looks here. Must not know the command.

use serve::Failure;
use tokio::sync::watch;

/// How often a command lets other tasks run before it looks whether its client has left.
const LOOKS: usize = 4;

/// The refusal of a command whose client has disconnected.
pub(crate) fn left() -> Failure {
    Failure::Failed("the client disconnected before the command began; nothing was changed".into())
}

/// A value that the handler of a connection holds while the client is connected.
pub(crate) struct Here(#[expect(dead_code, reason = "its drop is the signal")] watch::Sender<()>);

/// Whether the client is still connected.
#[derive(Clone, Default)]
pub(crate) struct Presence(Option<watch::Receiver<()>>);

impl Presence {
    pub(crate) fn new() -> (Here, Presence) {
        let (sender, receiver) = watch::channel(());
        (Here(sender), Presence(Some(receiver)))
    }

    /// The presence of a command that has no client. It never ends.
    pub(crate) fn always() -> Presence {
        Presence(None)
    }

    /// Whether a client has asked, and not the daemon itself.
    pub(crate) fn is_a_client(&self) -> bool {
        self.0.is_some()
    }

    /// Refuses a command that has not begun if its client has disconnected.
    ///
    /// A client can have left before the daemon has read its request, for example while the daemon was busy. Its connection
    /// then sees the end right behind the request, if it gets some turns.
    ///
    /// # Errors
    /// If the client has disconnected.
    pub(crate) async fn is_there(&self) -> Result<(), Failure> {
        for _ in 0..LOOKS {
            tokio::task::yield_now().await;
        }
        match self.0.as_ref().is_some_and(|here| here.has_changed().is_err()) {
            true => Err(left()),
            false => Ok(()),
        }
    }

    /// Returns when the client has disconnected.
    pub(crate) async fn disconnected(&self) {
        match &self.0 {
            Some(here) => {
                let mut here = here.clone();
                while here.changed().await.is_ok() {}
            }
            None => std::future::pending().await,
        }
    }
}

/// A command or a task of the daemon, and the client that waits for it.
#[derive(Clone)]
pub(crate) struct Asked {
    /// The command with its parameters, for messages to clients whose commands wait for this one.
    pub(crate) what: String,
    /// The client.
    pub(crate) client: Presence,
}

impl Asked {
    /// A task of the daemon, for which no client waits.
    pub(crate) fn inside(what: impl Into<String>) -> Asked {
        Asked { what: what.into(), client: Presence::always() }
    }
}
