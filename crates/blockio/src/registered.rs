//! Registered memory, which the ring identifies by a number.
//!
//! For each request the kernel looks up, pins and unpins the pages of its buffer; for registered memory it does this once.
//! Owns the numbers in use. A number belongs to the memory of a buffer ([`io::Registration`]) and is returned here when that
//! memory is freed. Invariant: the kernel has dropped the memory of a number before that number is used again. Registered
//! memory counts as locked: if a process may not lock more memory, it does not register any.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use io::{Buffer, Registration, Registry};

use crate::uring::Uring;

/// The numbers of a ring.
#[derive(Default)]
pub(crate) struct BufferNumbers {
    free: RefCell<Vec<u16>>,
    /// Numbers whose memory is freed and which are still registered with the kernel.
    forgotten: RefCell<Vec<u16>>,
}

impl Registry for BufferNumbers {
    fn forget(&self, number: u16) {
        self.forgotten.borrow_mut().push(number);
    }
}

impl BufferNumbers {
    /// The numbers that `uring` has; none without a ring.
    pub(crate) fn new(uring: Option<&Uring>) -> Rc<BufferNumbers> {
        let count = uring.map_or(0, |u| u.numbers);
        Rc::new(BufferNumbers { free: RefCell::new((0..count).rev().collect()), ..BufferNumbers::default() })
    }

    /// Registers the first `bytes` of `buffer` with the ring, if a number is free.
    pub(crate) fn register(self: &Rc<Self>, uring: &mut Uring, buffer: &mut Buffer, bytes: usize) {
        if self.number_of(buffer).is_some() || bytes > buffer.capacity() {
            return;
        }
        self.tell(uring);
        let Some(number) = self.free.borrow_mut().pop() else { return };
        let len = buffer.len();
        buffer.set_len(bytes);
        let known = buffer.get_mut().is_some_and(|memory| uring.register(number, memory));
        buffer.set_len(len);
        if known {
            let registry: Weak<dyn Registry> = Rc::downgrade(&(self.clone() as Rc<dyn Registry>));
            buffer.register(Registration { number, bytes, registry });
        } else {
            // The process may not lock more memory. Attempts for other buffers would fail too.
            self.free.borrow_mut().clear();
        }
    }

    /// Unregisters the numbers whose memory is freed.
    pub(crate) fn tell(&self, uring: &mut Uring) {
        for number in self.forgotten.borrow_mut().drain(..) {
            uring.unregister(number);
            self.free.borrow_mut().push(number);
        }
    }

    /// The number of a buffer's memory in this ring, and the number of registered bytes.
    pub(crate) fn number_of(self: &Rc<Self>, buffer: &Buffer) -> Option<(u16, usize)> {
        let registration = buffer.registration()?;
        let ours = std::ptr::addr_eq(registration.registry.as_ptr(), Rc::as_ptr(self));
        ours.then_some((registration.number, registration.bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use format::{Sector, Sectors};
    use io::Disk;

    use crate::claim::{Opened, open};
    use crate::uring::Uring;
    use crate::{Backend, Driver, DriverOptions, FileDevice, OpenOptions};

    /// Whether this kernel supports registered memory.
    fn has_numbers() -> bool {
        Uring::new(8).is_ok_and(|u| u.numbers > 0)
    }

    #[test]
    fn transfers_by_number_and_without_are_the_same() {
        for backend in [Backend::Auto, Backend::Pool] {
            let driver = Driver::new(DriverOptions { backend, ..DriverOptions::default() }).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
            // The ring is not used for a file in memory, so the test treats the file as one that is not.
            let opened = Opened { in_memory: false, ..open(&path, &OpenOptions::default()).unwrap() };
            let device = FileDevice::from_opened(driver.reactor(), opened);
            let disk = Disk::new(Rc::new(device), driver.handle());
            let pool = driver.handle().pool().clone();
            let mut buffer = pool.take(64 << 10);
            driver.reactor().register(&mut buffer, 16 << 10);
            let known = driver.reactor().numbers().number_of(&buffer);
            if backend == Backend::Pool || !has_numbers() {
                assert_eq!(known, None);
            } else {
                assert_eq!(known.map(|(_, bytes)| bytes), Some(16 << 10));
            }
            // Inside the registered part, at its end, and across its end.
            for (sectors, offset) in [(8, 0), (8, 12 << 10), (64, 0), (8, 512)] {
                for (at, byte) in buffer.as_mut().iter_mut().enumerate() {
                    *byte = (at / 512) as u8 + sectors as u8;
                }
                let wanted = buffer.as_slice()[offset..][..sectors * 512].to_vec();
                let (at, sectors) = (Sector(64), Sectors(sectors as u64));
                let done = driver.block_on(disk.start_write(at, sectors, buffer, offset, false));
                assert_eq!(done.result, Ok(()));
                buffer = done.buffer.unwrap();
                buffer.as_mut().fill(0);
                let done = driver.block_on(disk.start_read(at, sectors, buffer, offset));
                assert_eq!(done.result, Ok(()));
                buffer = done.buffer.unwrap();
                assert_eq!(&buffer.as_slice()[offset..][..wanted.len()], wanted);
            }
        }
    }

    #[test]
    fn numbers_go_with_their_memory_and_come_back() {
        let driver = Driver::new(DriverOptions::default()).unwrap();
        let numbers = driver.reactor().numbers().clone();
        let all = numbers.free.borrow().len();
        let pool = driver.handle().pool().clone();
        let mut kept = pool.take(4096);
        driver.reactor().register(&mut kept, 4096);
        let number = numbers.number_of(&kept);
        driver.reactor().register(&mut kept, 4096);
        assert_eq!(numbers.number_of(&kept), number, "memory is registered once");
        drop(kept);
        assert_eq!(numbers.number_of(&pool.take(4096)), number, "the pool keeps it");
        let Some((number, _)) = number else { return assert!(!has_numbers()) };

        // Larger than the pool keeps.
        let mut large = pool.take(100 << 20);
        driver.reactor().register(&mut large, 4096);
        assert_eq!(numbers.free.borrow().len(), all - 2);
        drop(large);
        driver.reactor().turn();
        assert_eq!(numbers.free.borrow().len(), all - 1);
        assert!(!numbers.free.borrow().contains(&number));

        let other = Driver::new(DriverOptions::default()).unwrap();
        assert_eq!(other.reactor().numbers().number_of(&pool.take(4096)), None, "another ring's number");
    }
}
