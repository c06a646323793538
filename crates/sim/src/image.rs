//! The contents of a simulated medium: sparse, and cheap to copy.
//!
//! Owns the pages. A copy shares them until one side writes, so the state of a disk can be saved at every moment of a run.
//! Unwritten pages read as zeros. Must not know which data is durable.

use std::rc::Rc;

use format::{SECTOR_BYTES, Sector, Sectors};
use inspect::source::{ReadAt, ReadError, ReadFailure};

/// Number of sectors of a page.
const PAGE_SECTORS: u64 = 8;
const PAGE_BYTES: usize = 4096;

type Page = [u8; PAGE_BYTES];

/// The contents of a disk. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    name: Rc<str>,
    sectors: Sectors,
    pages: Vec<Option<Rc<Page>>>,
}

impl Image {
    /// A medium of `sectors` zeros.
    pub fn zeros(name: &str, sectors: Sectors) -> Image {
        let pages = vec![None; sectors.0.div_ceil(PAGE_SECTORS) as usize];
        Image { name: Rc::from(name), sectors, pages }
    }

    /// Size in sectors.
    pub fn size(&self) -> Sectors {
        self.sectors
    }

    /// Fills `into` with the contents from `at` on.
    pub fn read(&self, at: Sector, into: &mut [u8]) {
        let mut byte = at.bytes() as usize;
        let mut done = 0;
        while done < into.len() {
            let inside = byte % PAGE_BYTES;
            let n = (PAGE_BYTES - inside).min(into.len() - done);
            let target = &mut into[done..done + n];
            match &self.pages[byte / PAGE_BYTES] {
                Some(page) => target.copy_from_slice(&page[inside..inside + n]),
                None => target.fill(0),
            }
            (byte, done) = (byte + n, done + n);
        }
    }

    /// Stores `data` from `at` on.
    pub fn write(&mut self, at: Sector, data: &[u8]) {
        let mut byte = at.bytes() as usize;
        let mut done = 0;
        while done < data.len() {
            let inside = byte % PAGE_BYTES;
            let n = (PAGE_BYTES - inside).min(data.len() - done);
            let page = self.pages[byte / PAGE_BYTES].get_or_insert_with(|| Rc::new([0; PAGE_BYTES]));
            Rc::make_mut(page)[inside..inside + n].copy_from_slice(&data[done..done + n]);
            (byte, done) = (byte + n, done + n);
        }
    }

    /// The sectors whose contents another image of the same size does not have.
    pub fn differing_sectors<'a>(&'a self, other: &'a Image) -> impl Iterator<Item = u64> + 'a {
        let zeros: &Page = &[0; PAGE_BYTES];
        let pages = self.pages.iter().zip(&other.pages).zip(0..);
        pages.flat_map(move |((mine, theirs), page): (_, u64)| {
            let (mine, theirs) = (mine.as_deref().unwrap_or(zeros), theirs.as_deref().unwrap_or(zeros));
            let is_same = std::ptr::eq(mine, theirs) || mine == theirs;
            let sectors = if is_same { 0 } else { PAGE_SECTORS };
            let differs = move |i: &u64| {
                let bytes = (i * SECTOR_BYTES) as usize..((i + 1) * SECTOR_BYTES) as usize;
                mine.get(bytes.clone()) != theirs.get(bytes)
            };
            (0..sectors).filter(differs).map(move |i| page * PAGE_SECTORS + i)
        })
    }

    /// A fingerprint, which is equal for equal contents.
    pub fn fingerprint(&self) -> u64 {
        let mut sum = 0_u64;
        let pages = self.pages.iter().enumerate().filter_map(|(i, p)| Some((i as u64, p.as_ref()?)));
        for (i, page) in pages {
            // Four independent sums, so that the processor computes them in parallel.
            let mut lanes = [i, 1, 2, 3];
            for words in page.chunks_exact(32) {
                for (lane, word) in lanes.iter_mut().zip(words.chunks_exact(8)) {
                    let mut w = [0; 8];
                    w.copy_from_slice(word);
                    let mixed = (*lane ^ u64::from_le_bytes(w)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                    *lane = mixed ^ (mixed >> 29);
                }
            }
            for lane in lanes {
                sum = (sum ^ lane).wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(31);
            }
        }
        sum
    }

    /// A copy of `sectors` from `at` on.
    pub fn read_vec(&self, at: Sector, sectors: Sectors) -> Vec<u8> {
        let mut bytes = vec![0; sectors.bytes() as usize];
        self.read(at, &mut bytes);
        bytes
    }
}

impl ReadAt for Image {
    fn read_at(&self, at: Sector, into: &mut [u8]) -> Result<(), ReadError> {
        let wanted = Sectors(into.len() as u64 / SECTOR_BYTES);
        if at.checked_add(wanted).is_none_or(|end| end.0 > self.sectors.0) {
            return Err(ReadError {
                device: self.name.to_string(),
                at,
                sectors: wanted,
                reason: ReadFailure::PastEnd { end: self.sectors },
            });
        }
        self.read(at, into);
        Ok(())
    }

    fn sectors(&self) -> Sectors {
        self.sectors
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn next_data(&self, from: Sector) -> Sector {
        let first = (from.0 / PAGE_SECTORS) as usize;
        let page = self.pages.iter().skip(first).position(Option::is_some);
        match page {
            Some(0) => from,
            Some(n) => Sector((first + n) as u64 * PAGE_SECTORS),
            None => Sector(self.sectors.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_what_the_original_had() {
        let mut a = Image::zeros("a", Sectors(64));
        a.write(Sector(7), &[1; 1024]);
        let b = a.clone();
        a.write(Sector(8), &[2; 512]);
        assert_eq!(a.read_vec(Sector(7), Sectors(2)), [[1; 512], [2; 512]].concat());
        assert_eq!(b.read_vec(Sector(7), Sectors(3)), [[1; 512], [1; 512], [0; 512]].concat());
        assert_eq!(b.next_data(Sector(0)), Sector(0));
        assert_eq!(b.next_data(Sector(16)), Sector(64));
        assert!(b.read_at(Sector(63), &mut [0; 1024]).is_err());
    }

    #[test]
    fn sectors_that_differ() {
        let mut a = Image::zeros("a", Sectors(64));
        a.write(Sector(6), &[1; 3 * SECTOR_BYTES as usize]);
        let mut b = a.clone();
        assert_eq!(a.differing_sectors(&b).count(), 0);
        b.write(Sector(7), &[2; 2 * SECTOR_BYTES as usize]);
        b.write(Sector(40), &[0; 512]);
        b.write(Sector(63), &[3; 512]);
        assert_eq!(a.differing_sectors(&b).collect::<Vec<_>>(), [7, 8, 63]);
        assert_eq!(b.differing_sectors(&a).collect::<Vec<_>>(), [7, 8, 63]);
    }
}
