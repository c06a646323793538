//! The locks of the bridge between threads. The test that explores interleavings puts others in their place.

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
