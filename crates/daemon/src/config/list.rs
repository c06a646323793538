//! Settings that take a list.
//!
//! Owns the answer to a single value in the place of a list. Must not know what the values mean.

use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use toml::Spanned;

/// A list, or the message that one is expected, with this example.
struct List<T> {
    example: &'static str,
    of: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.example)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Vec<T>, E> {
        Err(E::custom(self.example))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut all = Vec::new();
        while let Some(one) = list.next_element()? {
            all.push(one);
        }
        Ok(all)
    }
}

fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
    example: &'static str,
) -> Result<Vec<T>, D::Error> {
    from.deserialize_any(List { example, of: PhantomData })
}

pub(super) fn exports<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<Spanned<String>>>, D::Error> {
    list(from, "exports takes a list: [\"auto\"]").map(Some)
}

pub(super) fn devices<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PathBuf>, D::Error> {
    list(from, "devices takes a list: [\"/dev/sda\"]")
}

pub(super) fn listen<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Spanned<String>>, D::Error> {
    list(from, "listen takes a list: [\"127.0.0.1:9420\"]")
}
