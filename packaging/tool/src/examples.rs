//! Examples, files and references of the manual pages.
//!
//! Owns one entry for each command. Tests parse the examples and check the references. Must not know the layout.

/// What the manual page of a command has besides its arguments.
pub(crate) struct Page {
    /// Name of the page.
    pub(crate) name: &'static str,
    /// What each example does, and its command.
    pub(crate) examples: &'static [(&'static str, &'static str)],
    pub(crate) files: &'static [(&'static str, &'static str)],
    /// Other pages, `NAME(SECTION)`, and pages of the guide, by their paths in it.
    pub(crate) see: &'static [&'static str],
}

/// Files of commands that work on devices without the daemon.
const OFFLINE: &[(&str, &str)] = &[(
    "/run/ubcache",
    "Crash logs: acknowledged writes of a process that was killed. A start on the same devices takes them over.",
)];

/// Files of commands that ask the daemon.
const CLIENT: &[(&str, &str)] = &[("/run/ubcache/control.sock", "Control socket of the daemon.")];

/// Files of the daemon.
pub(crate) const DAEMON: &[(&str, &str)] = &[
    ("/etc/ubcache/ubcache.toml", "Configuration."),
    ("/run/ubcache/control.sock", "Control socket."),
    ("/run/ubcache", "Crash logs: acknowledged writes of a process that was killed."),
    ("/var/lib/ubcache/state.json", "Remembered devices, names of volumes, and changed tunables."),
    ("/etc/ubcache/take-devices", "If this file exists, udev hands every bcache device to ubcache."),
    ("/usr/share/doc/ubcache/examples", "Alert rules for Prometheus and a dashboard for Grafana."),
];

const fn page(
    name: &'static str,
    examples: &'static [(&'static str, &'static str)],
    files: &'static [(&'static str, &'static str)],
    see: &'static [&'static str],
) -> Page {
    Page { name, examples, files, see }
}

/// The entries of all commands.
pub(crate) const PAGES: &[Page] = &[
    page(
        "ubcache",
        &[
            (
                "Format a cache device and a disk, and serve them in the foreground:",
                "ubcache make -C /dev/nvme0n1p4 -B /dev/sdb --writeback\nubcache up -C /dev/nvme0n1p4 -B /dev/sdb",
            ),
            (
                "Serve them after every boot:",
                "systemctl enable --now ubcache\nubcache register /dev/nvme0n1p4 /dev/sdb\nubcache status",
            ),
            (
                "Copy the data of a set that does not start; nothing is written to its devices:",
                "ubcache extract -C /dev/nvme0n1p4 -B /dev/sdb -o /mnt/data.img",
            ),
        ],
        DAEMON,
        &[
            "ubcache.toml(5)",
            "ubcache-make(8)",
            "ubcache-up(8)",
            "ubcache-daemon(8)",
            "day2/index.md",
            "troubleshooting.md",
        ],
    ),
    page(
        "ubcache-make",
        &[
            (
                "A cache device and a disk, with a label:",
                "ubcache make -C /dev/nvme0n1p4 -B /dev/sdb --writeback --label data",
            ),
            ("A disk alone, to be attached to a set that exists:", "ubcache make -B /dev/sdc"),
            ("A new cache device that replaces an old one:", "ubcache make -C /dev/nvme1n1p1"),
        ],
        OFFLINE,
        &["ubcache-up(8)", "ubcache-register(8)", "ubcache-super(8)", "day2/size.md", "day2/replace-ssd.md"],
    ),
    page(
        "ubcache-super",
        &[("Show the state of a disk: detached, clean, dirty or inconsistent:", "ubcache super /dev/sdb")],
        OFFLINE,
        &["ubcache-check(8)", "ubcache-dump(8)", "troubleshooting.md"],
    ),
    page(
        "ubcache-up",
        &[
            ("Serve a set as a ublk device:", "ubcache up -C /dev/nvme0n1p4 -B /dev/sdb --export ublk"),
            (
                "Serve it over NBD, with a tunable:",
                "ubcache up -C fast -B slow --export nbd=sock --set writeback_percent=20",
            ),
            ("Serve a clean disk whose cache device is lost:", "ubcache up --without-cache -B /dev/sdb"),
            (
                "Replace the running program under mounted file systems:",
                "ubcache up -C /dev/nvme0n1p4 -B /dev/sdb --export ublk --takeover",
            ),
        ],
        OFFLINE,
        &[
            "ubcache-make(8)",
            "ubcache-daemon(8)",
            "quick-start.md",
            "day2/dead-ssd-clean.md",
            "day2/upgrade.md",
        ],
    ),
    page(
        "ubcache-extract",
        &[
            (
                "Copy a volume, dirty data included, into a file:",
                "ubcache extract -C /dev/nvme0n1p4 -B /dev/sdb -o /backup/data.img",
            ),
            (
                "Copy what can be read of a damaged set:",
                "ubcache extract -C /dev/nvme0n1p4 -B /dev/sdb -o data.img --best-effort",
            ),
        ],
        OFFLINE,
        &["ubcache-check(8)", "ubcache-drain(8)", "day2/back-up.md", "day2/dead-ssd-dirty.md"],
    ),
    page(
        "ubcache-check",
        &[(
            "Verify a set that is stopped; exit code 1 if something is wrong:",
            "ubcache check /dev/nvme0n1p4 /dev/sdb",
        )],
        OFFLINE,
        &["ubcache-super(8)", "ubcache-extract(8)", "ubcache-repair(8)", "troubleshooting.md"],
    ),
    page(
        "ubcache-repair",
        &[
            (
                "Print what would be mended, and what not:",
                "ubcache repair -C /dev/nvme0n1p4 -B /dev/sdb --dry-run",
            ),
            (
                "Mend a set, with a file that takes it back:",
                "ubcache repair -C /dev/nvme0n1p4 -B /dev/sdb --undo-file before.undo",
            ),
            ("Make the devices what they were before:", "ubcache repair --undo before.undo"),
        ],
        OFFLINE,
        &["ubcache-check(8)", "ubcache-extract(8)", "ubcache-salvage(8)", "troubleshooting.md"],
    ),
    page(
        "ubcache-group",
        &[
            ("Give a served set a second cache device:", "ubcache group add fast /dev/nvme1n1p4"),
            (
                "Replace a cache device that is worn out:",
                "ubcache group replace fast /dev/nvme0n1p4 /dev/nvme2n1p4",
            ),
        ],
        CLIENT,
        &[
            "ubcache-group-add(8)",
            "ubcache-group-remove(8)",
            "ubcache-group-replace(8)",
            "ubcache-group-show(8)",
            "day2/two-ssds.md",
        ],
    ),
    page(
        "ubcache-group-show",
        &[(
            "Show which dirty data is on one cache device only:",
            "ubcache group show -C /dev/nvme0n1p4 -C /dev/nvme1n1p4 -B /dev/sdb",
        )],
        OFFLINE,
        &["ubcache-group-add(8)", "ubcache-make(8)", "ubcache-status(8)"],
    ),
    page(
        "ubcache-group-add",
        &[
            ("Give a served set a second cache device:", "ubcache group add fast /dev/nvme1n1p4"),
            (
                "Make a second cache device beside one that no process serves:",
                "ubcache group add -C /dev/nvme0n1p4 /dev/nvme1n1p4",
            ),
        ],
        CLIENT,
        &["ubcache-group-remove(8)", "ubcache-group-replace(8)", "ubcache-group-show(8)", "ubcache-jobs(8)"],
    ),
    page(
        "ubcache-group-remove",
        &[
            (
                "See whether a cache device can leave its group:",
                "ubcache group remove fast /dev/nvme0n1p4 --dry-run",
            ),
            ("Remove it:", "ubcache group remove fast /dev/nvme0n1p4"),
        ],
        CLIENT,
        &["ubcache-group-add(8)", "ubcache-group-replace(8)", "ubcache-jobs(8)", "day2/two-ssds.md"],
    ),
    page(
        "ubcache-group-replace",
        &[(
            "Replace a cache device while file systems are mounted:",
            "ubcache group replace fast /dev/nvme0n1p4 /dev/nvme2n1p4",
        )],
        CLIENT,
        &["ubcache-group-add(8)", "ubcache-group-remove(8)", "ubcache-jobs(8)", "day2/two-ssds.md"],
    ),
    page(
        "ubcache-salvage",
        &[(
            "Copy what is left of a damaged set, with a map of what is certain:",
            "ubcache salvage -C /dev/nvme0n1p4 -B /dev/sdb -o /backup/disk.img --map /backup/disk.map",
        )],
        OFFLINE,
        &["ubcache-extract(8)", "ubcache-repair(8)", "troubleshooting.md"],
    ),
    page(
        "ubcache-dump",
        &[("Print the table of the volumes of a set:", "ubcache dump /dev/nvme0n1p4 uuids")],
        OFFLINE,
        &["ubcache-super(8)", "ubcache-check(8)"],
    ),
    page(
        "ubcache-demo",
        &[("Measure a slow disk without and with a cache:", "ubcache demo")],
        OFFLINE,
        &["ubcache-up(8)", "quick-start.md"],
    ),
    page(
        "ubcache-daemon",
        &[
            ("Start it at every boot:", "systemctl enable --now ubcache"),
            (
                "Start another one, with all its files in a directory:",
                "ubcache daemon --config my.toml --socket my.sock --state-dir state",
            ),
        ],
        DAEMON,
        &[
            "ubcache.toml(5)",
            "ubcache-register(8)",
            "ubcache-status(8)",
            "daemon.md",
            "security.md",
            "day2/alert.md",
        ],
    ),
    page(
        "ubcache-register",
        &[
            ("Serve a set now and after every boot:", "ubcache register /dev/nvme0n1p4 /dev/sdb"),
            (
                "Accept a disk that is a copy of the one before:",
                "ubcache register --accept-replacement /dev/sdc",
            ),
        ],
        CLIENT,
        &["ubcache-unregister(8)", "ubcache-attach(8)", "ubcache-wait(8)", "day2/move.md"],
    ),
    page(
        "ubcache-unregister",
        &[(
            "Stop a volume and forget its disk; its dirty data stays in the cache:",
            "ubcache unregister data",
        )],
        CLIENT,
        &["ubcache-register(8)", "ubcache-stop(8)", "ubcache-detach(8)", "day2/move.md"],
    ),
    page(
        "ubcache-attach",
        &[
            ("Put a cache in front of a disk that is served alone:", "ubcache attach /dev/nvme0n1p4 data"),
            (
                "The cache device of a clean disk is lost; attach the disk to a new one:",
                "ubcache attach /dev/nvme1n1p1 data --force",
            ),
        ],
        CLIENT,
        &["ubcache-detach(8)", "ubcache-make(8)", "day2/replace-ssd.md", "day2/dead-ssd-clean.md"],
    ),
    page(
        "ubcache-detach",
        &[
            ("Write the dirty data of a volume back and stop caching it:", "ubcache detach data"),
            ("Then overwrite its data on the cache device, too:", "ubcache detach data --wipe"),
            (
                "The cache device of a clean disk is lost; serve the disk alone:",
                "ubcache detach data --force",
            ),
        ],
        CLIENT,
        &[
            "ubcache-attach(8)",
            "ubcache-drain(8)",
            "ubcache-wipe(8)",
            "day2/give-up.md",
            "day2/dead-ssd-clean.md",
            "day2/orphan.md",
        ],
    ),
    page(
        "ubcache-stop",
        &[("Stop a volume until the next start of the daemon:", "ubcache stop data")],
        CLIENT,
        &["ubcache-register(8)", "ubcache-unregister(8)", "day2/back-up.md"],
    ),
    page(
        "ubcache-wait",
        &[(
            "Wait until a volume is served, before a mount:",
            "ubcache wait data && mount /dev/ubcache/data /data",
        )],
        CLIENT,
        &["ubcache-status(8)", "daemon.md"],
    ),
    page(
        "ubcache-set-cachemode",
        &[("Let the SSD take writes:", "ubcache set-cachemode data writeback")],
        CLIENT,
        &["ubcache-set(8)", "ubcache-drain(8)", "tunables.md"],
    ),
    page(
        "ubcache-set-label",
        &[("Rename a volume:", "ubcache set-label data archive")],
        CLIENT,
        &["ubcache-show(8)", "day2/rename.md"],
    ),
    page(
        "ubcache-drain",
        &[
            ("Write all dirty data of a volume back:", "ubcache drain data"),
            ("Do so for a whole set, without waiting:", "ubcache drain /dev/nvme0n1p4 --no-wait"),
            (
                "Do so offline, for a set that no process serves:",
                "ubcache drain -C /dev/nvme0n1p4 -B /dev/sdb",
            ),
        ],
        CLIENT,
        &["ubcache-detach(8)", "ubcache-check(8)", "ubcache-jobs(8)", "day2/move.md", "day2/give-up.md"],
    ),
    page(
        "ubcache-wipe",
        &[("Overwrite what no volume needs on a cache device:", "ubcache wipe /dev/nvme0n1p4")],
        CLIENT,
        &["ubcache-detach(8)", "security.md"],
    ),
    page(
        "ubcache-scrub",
        &[
            ("Read and verify all cached data of a set with checksums:", "ubcache scrub /dev/nvme0n1p4"),
            ("See what it found:", "ubcache damaged /dev/nvme0n1p4"),
        ],
        CLIENT,
        &["ubcache-damaged(8)", "ubcache-check(8)", "ubcache-jobs(8)", "day2/bit-rot.md"],
    ),
    page(
        "ubcache-damaged",
        &[
            ("List the damaged dirty data of a volume:", "ubcache damaged data"),
            ("Keep the damaged bytes of one range:", "ubcache damaged data accept --range 2048+8"),
            (
                "Lose all damaged data, and read the older data of the disk:",
                "ubcache damaged data drop --all --yes",
            ),
        ],
        CLIENT,
        &["ubcache-scrub(8)", "ubcache-extract(8)", "day2/bit-rot.md"],
    ),
    page(
        "ubcache-gc",
        &[("Make the buckets of deleted data available now:", "ubcache gc /dev/nvme0n1p4")],
        CLIENT,
        &["ubcache-status(8)", "ubcache-wipe(8)", "daemon.md"],
    ),
    page(
        "ubcache-volume",
        &[
            (
                "A volume whose data is on the SSD alone:",
                "ubcache volume create /dev/nvme0n1p4 20G --label scratch",
            ),
            ("What its deletion would destroy:", "ubcache volume delete scratch --dry-run"),
        ],
        CLIENT,
        &["ubcache-volume-create(8)", "ubcache-volume-delete(8)", "daemon.md"],
    ),
    page(
        "ubcache-volume-create",
        &[
            ("Does a volume of 20 GiB fit?", "ubcache volume create /dev/nvme0n1p4 20G --dry-run"),
            ("Make it:", "ubcache volume create /dev/nvme0n1p4 20G --label scratch"),
            (
                "Make it before the daemon starts:",
                "ubcache volume create /dev/nvme0n1p4 20G --label scratch --offline",
            ),
        ],
        CLIENT,
        &["ubcache-volume-delete(8)", "ubcache-gc(8)", "daemon.md"],
    ),
    page(
        "ubcache-volume-delete",
        &[("Destroy a flash-only volume with its data:", "ubcache volume delete scratch --force")],
        CLIENT,
        &["ubcache-volume-create(8)", "daemon.md"],
    ),
    page(
        "ubcache-show",
        &[("List the devices:", "ubcache show"), ("Show more of one device:", "ubcache show --more")],
        CLIENT,
        &["ubcache-status(8)", "ubcache-tree(8)", "ubcache-super(8)"],
    ),
    page(
        "ubcache-tree",
        &[("Show sets and their volumes as a tree:", "ubcache tree")],
        CLIENT,
        &["ubcache-show(8)", "ubcache-status(8)"],
    ),
    page(
        "ubcache-status",
        &[
            ("Show sets, volumes, devices, jobs and the last errors:", "ubcache status"),
            ("Print the status as JSON, for scripts:", "ubcache status --json"),
        ],
        CLIENT,
        &["ubcache-explain(8)", "ubcache-top(8)", "ubcache-events(8)", "day2/alert.md"],
    ),
    page(
        "ubcache-top",
        &[("Watch requests, hits and writeback:", "ubcache top")],
        CLIENT,
        &["ubcache-status(8)", "ubcache-explain(8)"],
    ),
    page(
        "ubcache-explain",
        &[("Why is the volume slow, and what does writeback do?", "ubcache explain data")],
        CLIENT,
        &["ubcache-top(8)", "ubcache-set(8)", "tunables.md", "troubleshooting.md"],
    ),
    page(
        "ubcache-get",
        &[
            ("All tunables of a volume:", "ubcache get data"),
            ("One of them:", "ubcache get data writeback_percent"),
        ],
        CLIENT,
        &["ubcache-set(8)", "ubcache-reset(8)", "tunables.md"],
    ),
    page(
        "ubcache-set",
        &[
            ("Collect more dirty data; remembered over restarts:", "ubcache set data writeback_percent=20"),
            ("Cache streams until the next restart:", "ubcache set data sequential_cutoff=0 --runtime"),
            ("Change the set that serves a volume:", "ubcache set data --set-of-volume journal_delay_ms=50"),
        ],
        CLIENT,
        &["ubcache-get(8)", "ubcache-reset(8)", "ubcache.toml(5)", "tunables.md"],
    ),
    page(
        "ubcache-reset",
        &[("Return to the value of the configuration:", "ubcache reset data writeback_percent")],
        CLIENT,
        &["ubcache-set(8)", "ubcache.toml(5)"],
    ),
    page(
        "ubcache-jobs",
        &[("List running and finished jobs:", "ubcache jobs")],
        CLIENT,
        &["ubcache-cancel(8)", "ubcache-drain(8)", "ubcache-detach(8)"],
    ),
    page(
        "ubcache-cancel",
        &[("Cancel the job with the number 3:", "ubcache cancel 3")],
        CLIENT,
        &["ubcache-jobs(8)"],
    ),
    page(
        "ubcache-events",
        &[("Follow the events as JSON:", "ubcache events --json")],
        CLIENT,
        &["ubcache-status(8)", "reference.md", "day2/alert.md"],
    ),
    page(
        "ubcache-reload",
        &[("Apply a changed configuration:", "ubcache reload")],
        DAEMON,
        &["ubcache.toml(5)", "ubcache-daemon(8)"],
    ),
];

/// The description of the configuration file.
pub(crate) const CONFIGURATION: &[&str] = &[
    "The file is TOML. Every key is optional, and the file itself is. `ubcache reload` or SIGHUP applies changes without a \
     restart and lists them. An unknown key is an error that names its line; the daemon then changes nothing.",
    "Later settings in this list override earlier ones: the preset, the section [tunables], the section of a set or volume, \
     and the values of `ubcache set`.",
];

/// The examples of the configuration file.
pub(crate) const CONFIGURATION_EXAMPLES: &[(&str, &str)] = &[
    (
        "Two devices, served as block devices:",
        "devices = [\n  \"/dev/disk/by-id/nvme-example-part4\",\n  \"/dev/disk/by-id/ata-example\",\n]\nexports = [\"ublk\"]",
    ),
    (
        "Tunables of all volumes, and of the volume with the label data:",
        "[tunables]\nwriteback_percent = 20\n\n[volume.data]\npreset = \"latency\"\nexports = [\"ublk=7\"]\n\n[volume.data.tunables]\nsequential_cutoff = \"4M\"",
    ),
    ("The control API over TCP:", "listen = [\"127.0.0.1:9420\"]\ntoken_file = \"/etc/ubcache/token\""),
];

/// References of the page of the configuration file.
pub(crate) const CONFIGURATION_SEE: &[&str] =
    &["ubcache-daemon(8)", "ubcache-reload(8)", "ubcache-set(8)", "daemon.md", "security.md", "tunables.md"];

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn examples_are_commands() {
        let mut seen = 0;
        for page in PAGES {
            let own = page.name.replacen('-', " ", 1);
            let own = own.replacen("volume-", "volume ", 1).replacen("group-", "group ", 1);
            let commands = page.examples.iter().flat_map(|(_, commands)| commands.lines());
            assert!(commands.clone().any(|c| c.starts_with(&own)), "{}: no example of it", page.name);
            for line in commands.filter(|c| c.starts_with("ubcache ")) {
                let words = line.split(" && ").next().unwrap_or(line).split_whitespace();
                let parsed = cli::command().try_get_matches_from(words);
                assert!(parsed.is_ok(), "{}: {line}\n{}", page.name, parsed.unwrap_err());
                seen += 1;
            }
        }
        assert!(seen > 40, "{seen}");
    }

    #[test]
    fn references_lead_somewhere() {
        let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src");
        for entry in PAGES.iter().flat_map(|page| page.see).chain(CONFIGURATION_SEE) {
            let is_there = match entry.split_once('(') {
                Some((name, "8)")) => PAGES.iter().any(|page| page.name == name),
                Some((name, section)) => (name, section) == ("ubcache.toml", "5)"),
                None => guide.join(entry).exists(),
            };
            assert!(is_there, "{entry}");
        }
    }

    /// A page without its command was left behind.
    #[test]
    fn every_page_has_a_command() {
        let mut command = cli::command();
        command.build();
        let mut there = vec!["ubcache".to_owned()];
        names(&command, &mut there);
        for page in PAGES {
            assert!(there.iter().any(|name| name == page.name), "{}", page.name);
        }
    }

    /// The names of the pages of all commands below this one.
    fn names(command: &clap::Command, all: &mut Vec<String>) {
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            all.extend(sub.get_display_name().map(str::to_owned));
            names(sub, all);
        }
    }
}
