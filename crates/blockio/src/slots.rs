//! The slots of operations in flight.
//!
//! Owns the names of operations, which are the `user_data` of their commands. The low half of a name is the slot, and the high
//! half is the slot's generation, so that a late cancellation cannot affect the slot's next operation. Invariant: an operation
//! stays in its slot until it is released by its name. Must not know what operations do.

use crate::operation::Op;
use crate::uring::PRIVATE;

enum Body {
    Free { next: Option<u32> },
    Busy(Op),
}

struct Slot {
    generation: u32,
    body: Body,
}

/// Number of slots that exist, with touched memory, from the start. They take 140 KiB.
///
/// A thread that serves swap must not need a new page for a burst of requests (decision 028).
const FIRST_SLOTS: u32 = 1024;

/// The operations in flight, each in a numbered slot.
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Option<u32>,
}

impl Default for Slots {
    fn default() -> Slots {
        let free = |at: u32| Body::Free { next: Some(at + 1).filter(|next| *next < FIRST_SLOTS) };
        let slots = (0..FIRST_SLOTS).map(|at| Slot { generation: 0, body: free(at) }).collect();
        Slots { slots, free: Some(0) }
    }
}

/// The name of an operation in its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OpId(pub(crate) u64);

impl OpId {
    fn new(slot: u32, generation: u32) -> OpId {
        OpId(u64::from(generation) << 32 | u64::from(slot))
    }

    fn slot(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl Slots {
    /// The operations in flight.
    pub(crate) fn busy(&self) -> impl Iterator<Item = (OpId, &Op)> {
        self.slots.iter().enumerate().filter_map(|(at, slot)| match &slot.body {
            Body::Busy(op) => Some((OpId::new(at as u32, slot.generation), op)),
            Body::Free { .. } => None,
        })
    }

    /// The operations in flight, mutable.
    pub(crate) fn busy_mut(&mut self) -> impl Iterator<Item = (OpId, &mut Op)> {
        self.slots.iter_mut().enumerate().filter_map(|(at, slot)| match &mut slot.body {
            Body::Busy(op) => Some((OpId::new(at as u32, slot.generation), op)),
            Body::Free { .. } => None,
        })
    }

    /// Puts an operation into a slot.
    pub(crate) fn place(&mut self, op: Op) -> OpId {
        let at = match self.free {
            Some(at) => {
                if let Body::Free { next } = self.slots[at as usize].body {
                    self.free = next;
                }
                at
            }
            None => {
                let at = u32::try_from(self.slots.len()).expect("fewer than 2^32 operations");
                self.slots.push(Slot { generation: 0, body: Body::Free { next: None } });
                at
            }
        };
        let slot = &mut self.slots[at as usize];
        slot.body = Body::Busy(op);
        OpId::new(at, slot.generation)
    }

    /// The operation in a slot that is in use.
    pub(crate) fn get(&mut self, id: OpId) -> &mut Op {
        let slot = &mut self.slots[id.slot()];
        assert_eq!(slot.generation, id.generation(), "a name belongs to the operation in its slot");
        match &mut slot.body {
            Body::Busy(op) => op,
            Body::Free { .. } => unreachable!("a name belongs to a busy slot"),
        }
    }

    /// Takes an operation out of its slot.
    pub(crate) fn release(&mut self, id: OpId) -> Op {
        let slot = &mut self.slots[id.slot()];
        assert_eq!(slot.generation, id.generation(), "a slot is released by its own operation");
        // Generations with a `user_data` in the range that is private to the ring are skipped.
        slot.generation = (slot.generation + 1) % (PRIVATE >> 32) as u32;
        let body = std::mem::replace(&mut slot.body, Body::Free { next: self.free });
        self.free = Some(id.slot() as u32);
        match body {
            Body::Busy(op) => op,
            Body::Free { .. } => unreachable!("a slot is released once"),
        }
    }
}
