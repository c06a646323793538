//! The connection slots, of a limited number, and their fair assignment.
//!
//! Owns the list of connections and the rule by which a new client is accepted, refused, or replaces an idle client. An idle
//! client keeps its connection as long as no other client needs the slot: a mounted file system may be idle for days. When all
//! slots are taken, the client with the longest idle time is disconnected, clients without any request first. That happens only
//! for a client of the same peer or of a peer with fewer slots, so a peer that connects repeatedly takes slots only from
//! itself. Must not know sockets or volumes.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;

use blockio::PeerId;
use io::Nanos;

use crate::server::events::TurnedAway;
use crate::server::link::{Idle, Peer};
use crate::server::options::ServerOptions;

/// A connection that has a slot: its number, and the interface to stop it.
pub(super) type TakenSlot = (u64, Rc<dyn Peer>);

/// The connection slots, and the connections that have them.
#[derive(Default)]
pub(super) struct ConnectionSlots {
    taken: RefCell<BTreeMap<u64, Rc<dyn Peer>>>,
    next_id: Cell<u64>,
}

impl ConnectionSlots {
    /// Adds a connection and returns its number.
    pub(super) fn add(&self, peer: Rc<dyn Peer>) -> u64 {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        self.taken.borrow_mut().insert(id, peer);
        id
    }

    pub(super) fn remove(&self, id: u64) {
        let removed = self.taken.borrow_mut().remove(&id);
        drop(removed);
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.taken.borrow().contains_key(&id)
    }

    /// Number of connections, those that were cut and have not ended included.
    pub(super) fn len(&self) -> usize {
        self.taken.borrow().len()
    }

    /// The connections that `which` selects.
    pub(super) fn choose(&self, which: impl Fn(&dyn Peer) -> bool) -> Vec<TakenSlot> {
        self.taken.borrow().iter().filter(|(_, p)| which(&***p)).map(|(id, p)| (*id, p.clone())).collect()
    }

    /// Decides whether `who` is accepted. The result may name a client that is to be disconnected first.
    pub(super) fn admit(
        &self,
        who: PeerId,
        now: Nanos,
        options: &ServerOptions,
    ) -> Result<Option<Rc<dyn Peer>>, TurnedAway> {
        let taken = self.taken.borrow();
        // A connection that was cut has no slot any more, even if the volume still works for it.
        let living = || taken.values().filter(|p| !p.is_dead());
        let of = |who: PeerId| living().filter(|p| p.who() == who).count();
        let own = of(who);
        let limit = options.max_connections_per_peer.max(1);
        if own >= limit && limit < options.max_connections {
            let idle = longest_idle(living().filter(|p| p.who() == who), now, options);
            return idle.map(Some).ok_or(TurnedAway::PeerSlots { limit });
        }
        if living().count() < options.max_connections {
            return Ok(None);
        }
        let weaker = living().filter(|p| p.who() == who || of(p.who()) > own + 1);
        let idle = longest_idle(weaker, now, options);
        idle.map(Some).ok_or(TurnedAway::Slots { limit: options.max_connections })
    }
}

/// The candidate with the longest idle time, if it has been idle for long enough.
fn longest_idle<'a>(
    candidates: impl Iterator<Item = &'a Rc<dyn Peer>>,
    now: Nanos,
    options: &ServerOptions,
) -> Option<Rc<dyn Peer>> {
    let span = |idle: &Idle| now.0.saturating_sub(idle.since.0);
    let gives_way = |idle: &Idle| {
        let wait = if idle.unused { options.unused_gives_way } else { options.idle_gives_way };
        span(idle) >= wait.0
    };
    candidates
        .filter_map(|p| p.idle().filter(gives_way).map(|idle| (p, idle)))
        .min_by_key(|(_, idle)| (!idle.unused, Reverse(span(idle))))
        .map(|(p, _)| p.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::link::Cut;

    struct Client {
        who: PeerId,
        idle: Cell<Option<Idle>>,
        dead: Cell<bool>,
    }

    impl Peer for Client {
        fn stop(&self) {}

        fn cut(&self, _why: Cut) {
            self.dead.set(true);
        }

        fn serves(&self, _export: &str) -> bool {
            false
        }

        fn is_dead(&self) -> bool {
            self.dead.get()
        }

        fn who(&self) -> PeerId {
            self.who
        }

        fn idle(&self) -> Option<Idle> {
            self.idle.get()
        }
    }

    const A: PeerId = PeerId::User(1000);
    const B: PeerId = PeerId::User(1001);

    fn options() -> ServerOptions {
        ServerOptions { max_connections: 4, max_connections_per_peer: 3, ..ServerOptions::default() }
    }

    /// Clients as (peer, second since when idle, whether unused).
    fn slots_of(clients: &[(PeerId, Option<u64>, bool)]) -> (ConnectionSlots, Vec<Rc<Client>>) {
        let slots = ConnectionSlots::default();
        let all = clients.iter().map(|&(who, since, unused)| {
            let idle = since.map(|s| Idle { since: Nanos::from_secs(s), unused });
            let client = Rc::new(Client { who, idle: Cell::new(idle), dead: Cell::new(false) });
            slots.add(client.clone());
            client
        });
        let all = all.collect();
        (slots, all)
    }

    /// The number of the client that is disconnected to accept `who` after `now` seconds.
    fn admit(
        (slots, clients): &(ConnectionSlots, Vec<Rc<Client>>),
        who: PeerId,
        now: u64,
    ) -> Result<Option<usize>, TurnedAway> {
        let removed = slots.admit(who, Nanos::from_secs(now), &options())?;
        Ok(removed.map(|v| clients.iter().position(|c| std::ptr::addr_eq(&**c, &*v)).expect("a client")))
    }

    #[test]
    fn an_idle_client_keeps_its_place_while_there_are_others() {
        let world = slots_of(&[(A, Some(0), true), (A, Some(0), false), (B, Some(0), false)]);
        assert_eq!(admit(&world, A, 1_000_000), Ok(None));
    }

    #[test]
    fn the_longest_idle_gives_way_and_unused_ones_first() {
        let world =
            slots_of(&[(A, Some(5), false), (A, None, false), (A, Some(100), true), (B, Some(200), false)]);
        assert_eq!(admit(&world, B, 109), Err(TurnedAway::Slots { limit: 4 }), "no client is idle for long");
        assert_eq!(admit(&world, B, 110), Ok(Some(2)));
        world.1[2].idle.set(None);
        assert_eq!(admit(&world, B, 304), Err(TurnedAway::Slots { limit: 4 }));
        assert_eq!(admit(&world, B, 305), Ok(Some(0)));
    }

    #[test]
    fn a_peer_with_many_slots_displaces_only_its_own_clients() {
        let world =
            slots_of(&[(B, Some(0), true), (A, Some(50), false), (A, None, false), (A, Some(60), false)]);
        assert_eq!(admit(&world, A, 349), Err(TurnedAway::PeerSlots { limit: 3 }));
        assert_eq!(
            admit(&world, A, 350),
            Ok(Some(1)),
            "not the client of the other, however long that is idle"
        );
        world.1[1].dead.set(true);
        assert_eq!(admit(&world, A, 350), Ok(None), "one that was cut has no slot");
    }
}
