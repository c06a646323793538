//! A tree of files laid out like the kernel's bcache in sysfs.
