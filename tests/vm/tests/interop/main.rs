//! The kernel's bcache and ubcache on the same devices, in turns. After every step every sector is compared with what
//! must be there, ubcache's checker goes over the images, both tools must say the same of the superblocks, and the
//! kernel must have nothing to complain about.

mod crashes;
mod padding;
mod sets;
mod settings;
mod shapes;
mod turns;
mod volatile;
mod world;
