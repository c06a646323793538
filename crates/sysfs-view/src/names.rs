//! Names of disks, as directories in `block`.

/// Longest name of a directory.
const LONGEST: usize = 255;

/// The name of a device's directory: that of a block device in `/dev`, and the whole path of anything else, with `!` for each
/// slash, as the kernel writes slashes. It depends on nothing but the path, so that a name never changes to another device.
/// `None` if the path is too long for a name.
pub(crate) fn disk(device: &str) -> Option<String> {
    let in_dev = device.strip_prefix("/dev/").filter(|name| !is_volume_name(name));
    let name = in_dev.unwrap_or(device).trim_end_matches('/').replace('/', "!");
    let fits = !matches!(&*name, "" | "." | "..") && name.len() <= LONGEST;
    fits.then_some(name)
}

/// Whether a name could be that of a volume, such as that of a block device of a kernel's bcache.
fn is_volume_name(name: &str) -> bool {
    name.strip_prefix("bcache").is_some_and(|number| number.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_name_in_two_directories_are_two_disks() {
        for (path, name) in [
            ("/dev/sdb", "sdb"),
            ("/dev/mapper/vg-home", "mapper!vg-home"),
            ("disk.img", "disk.img"),
            ("/a/disk.img", "!a!disk.img"),
            ("/b/disk.img/", "!b!disk.img"),
            ("/sdb", "!sdb"),
            ("/dev/bcache0", "!dev!bcache0"),
        ] {
            assert_eq!(disk(path).as_deref(), Some(name), "{path}");
        }
        for path in ["/", "", "..", &"/long".repeat(52)] {
            assert_eq!(disk(path), None, "{path}");
        }
    }
}
