//! The command that a client asked for, and the presence of that client.
//!
//! Owns the signal that the client has disconnected. A command that has begun is carried out to its end; one that still waits
//! looks here. Must not know the command.

use tokio::sync::watch;

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

    /// Whether the client has disconnected, as far as its connection has been read.
    pub(crate) fn has_left(&self) -> bool {
        self.0.as_ref().is_some_and(|here| here.has_changed().is_err())
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
