//! The locks of the bridge between threads. The test that explores interleavings replaces them with its own locks.

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
