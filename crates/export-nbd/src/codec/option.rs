//! Data of options that have a structure: checked views of a client's bytes.
//!
//! Owns the parsing of this data. Must not know the state of the handshake.

use super::wire::{ALLOCATION_CONTEXT, MAX_STRING_BYTES, take_slice, take_u16, take_u32};

/// Data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GoRequest<'a> {
    /// Name of the requested export.
    pub(crate) name: &'a [u8],
    /// Pairs of bytes: the kinds of information that the client asks for.
    kinds: &'a [u8],
}

impl<'a> GoRequest<'a> {
    /// Parses the data; `None` if its lengths contradict each other or the name is too long.
    pub(crate) fn parse(mut data: &'a [u8]) -> Option<GoRequest<'a>> {
        let name = take_name(&mut data)?;
        let count = usize::from(take_u16(&mut data)?);
        (data.len() == count.checked_mul(2)?).then_some(GoRequest { name, kinds: data })
    }

    pub(crate) fn wants(&self, kind: u16) -> bool {
        self.kinds.chunks_exact(2).any(|k| k == kind.to_be_bytes())
    }
}

/// Data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MetaRequest<'a> {
    /// Name of the export that the request is about.
    pub(crate) name: &'a [u8],
    /// Whether there is a query.
    asks: bool,
    exact: bool,
    whole_namespace: bool,
}

impl<'a> MetaRequest<'a> {
    /// Parses the data; `None` if its lengths contradict each other or a string is too long.
    pub(crate) fn parse(mut data: &'a [u8]) -> Option<MetaRequest<'a>> {
        let name = take_name(&mut data)?;
        let queries = take_u32(&mut data)?;
        let mut request = MetaRequest { name, asks: queries > 0, exact: false, whole_namespace: false };
        // A query has at least four bytes, so the loop ends with the data, for any count.
        for _ in 0..queries {
            let query = take_name(&mut data)?;
            request.exact |= query == ALLOCATION_CONTEXT.as_bytes();
            request.whole_namespace |= query == b"base:";
        }
        data.is_empty().then_some(request)
    }

    /// Whether the list for this request contains the allocation context.
    pub(crate) fn lists_allocation(&self) -> bool {
        !self.asks || self.exact || self.whole_namespace
    }

    /// Whether this request selects the allocation context. The name of a namespace selects nothing.
    pub(crate) fn selects_allocation(&self) -> bool {
        self.exact
    }
}

fn take_name<'a>(data: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = usize::try_from(take_u32(data)?).ok()?;
    if len > MAX_STRING_BYTES {
        return None;
    }
    take_slice(data, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn go(name: &str, kinds: &[u16]) -> Vec<u8> {
        let mut d = (name.len() as u32).to_be_bytes().to_vec();
        d.extend(name.as_bytes());
        d.extend((kinds.len() as u16).to_be_bytes());
        d.extend(kinds.iter().flat_map(|k| k.to_be_bytes()));
        d
    }

    fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut d = (name.len() as u32).to_be_bytes().to_vec();
        d.extend(name.as_bytes());
        d.extend((queries.len() as u32).to_be_bytes());
        for q in queries {
            d.extend((q.len() as u32).to_be_bytes());
            d.extend(q.as_bytes());
        }
        d
    }

    #[test]
    fn go_data_is_taken_apart() {
        let data = go("disk", &[3, 256]);
        let request = GoRequest::parse(&data).expect("well-formed");
        assert_eq!(request.name, b"disk");
        assert!(request.wants(3) && request.wants(256) && !request.wants(1));
    }

    #[test]
    fn go_data_of_any_other_length_is_refused() {
        let data = go("disk", &[3, 1]);
        for len in 0..data.len() {
            assert_eq!(GoRequest::parse(&data[..len]), None, "{len} bytes");
        }
        let longer: Vec<u8> = data.iter().copied().chain([0]).collect();
        assert_eq!(GoRequest::parse(&longer), None);
        assert_eq!(GoRequest::parse(&go(&"n".repeat(4097), &[])), None);
    }

    #[test]
    fn queries_list_and_select() {
        // (queries, listed, selected)
        let cases: [(&[&str], bool, bool); 6] = [
            (&[], true, false),
            (&["base:"], true, false),
            (&["base:allocation"], true, true),
            (&["qemu:dirty-bitmap:x", "base:allocation"], true, true),
            (&["base:alloc"], false, false),
            (&[""], false, false),
        ];
        for (queries, listed, selected) in cases {
            let data = meta("e", queries);
            let request = MetaRequest::parse(&data).expect("well-formed");
            assert_eq!(request.lists_allocation(), listed, "{queries:?}");
            assert_eq!(request.selects_allocation(), selected, "{queries:?}");
            for len in 0..data.len() {
                assert_eq!(MetaRequest::parse(&data[..len]), None, "{queries:?} cut to {len}");
            }
        }
    }

    #[test]
    fn a_count_beyond_the_data_is_refused() {
        let mut data = meta("e", &[]);
        let at = data.len() - 4;
        data[at..].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(MetaRequest::parse(&data), None);
    }
}
