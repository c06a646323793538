//! Metrics and explanations of a real set, judged by Prometheus' own tools and by golden sentences.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod packaged;
mod rig;
mod scraped;
mod sentences;
mod tools;
