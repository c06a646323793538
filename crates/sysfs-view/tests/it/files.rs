//! Reading and writing files.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use format::{Sectors, Uuid};
use sysfs_view::{DeviceOrder, Order, SetOrder};

use crate::viewed_set::{SET, ViewedSet, errno};

const EACCES: i32 = 13;
const EINVAL: i32 = 22;
const ERANGE: i32 = 34;

#[test]
fn echo_40_into_writeback_percent() {
    let view = ViewedSet::new();
    let file = view.path("block/bcache0/bcache/writeback_percent");
    let said = Command::new("sh").arg("-c").arg("echo 40 > \"$0\"").arg(&file).output().unwrap();
    assert!(said.status.success(), "{said:?}");
    assert_eq!(view.get("block/vdb/bcache/writeback_percent"), "40", "the same by either name");
    assert_eq!(view.put("block/bcache0/bcache/writeback_percent", "99"), Ok(()), "clamped");
    assert_eq!(view.get("block/bcache0/bcache/writeback_percent"), "40");
    for (bad, answer) in [("-1", EINVAL), ("4M", EINVAL), ("18446744073709551616", ERANGE)] {
        assert_eq!(view.put("block/bcache0/bcache/writeback_percent", bad), Err(answer), "{bad}");
    }
    let said = Command::new("sh").arg("-c").arg("echo nonsense > \"$0\"").arg(&file).output().unwrap();
    assert!(!said.status.success(), "{said:?}");
}

#[test]
fn links_lead_where_they_lead_in_the_kernel() {
    let view = ViewedSet::new();
    let set = format!("fs/bcache/{SET}");
    let real = |path: &str| view.path(path).canonicalize().unwrap();
    assert_eq!(real(&format!("{set}/bdev0")), real("block/vdb/bcache"));
    assert_eq!(real(&format!("{set}/cache0")), real("block/vda/bcache"));
    assert_eq!(real(&format!("{set}/volume1")), real("block/bcache1/bcache"));
    assert_eq!(real("block/bcache0/bcache"), real("block/vdb/bcache"));
    assert_eq!(real("block/bcache0/bcache/cache"), real(&set));
    assert_eq!(real("block/vda/bcache/set"), real(&set));
    assert_eq!(real("block/vdb/bcache/dev"), real("block/bcache0"));
    assert_eq!(view.get(&format!("{set}/bdev0/state")), "clean");
}

#[test]
fn writeonly_files_cannot_be_read_nor_others_written() {
    let view = ViewedSet::new();
    let open = |path: &str, write: bool| {
        std::fs::File::options().read(!write).write(write).open(view.path(path)).map(drop).map_err(errno)
    };
    assert_eq!(open("fs/bcache/register", false), Err(EACCES));
    assert_eq!(open("block/bcache0/bcache/state", true), Err(EACCES));
    assert_eq!(open("block/bcache0/bcache/state", false), Ok(()));
    assert_eq!(open("block/bcache7", false), Err(2));
    let mode = view.path("fs/bcache/register").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o200);
    assert_eq!(std::fs::write(view.path("fs/bcache/nonsense"), "").map_err(errno), Err(38), "ENOSYS");
}

#[test]
fn orders_go_to_the_owner() {
    let view = ViewedSet::new();
    let set = Uuid([7; 16]);
    let device = "block/bcache0/bcache";
    let tell = |path: &str, value: &str| view.put(path, value);
    assert_eq!(tell("fs/bcache/register", "/dev/nonsense"), Err(EINVAL));
    tell("fs/bcache/pendings_cleanup", "1").unwrap();
    tell(&format!("{device}/attach"), SET).unwrap();
    assert_eq!(tell(&format!("{device}/attach"), "nonsense"), Err(EINVAL));
    tell(&format!("{device}/detach"), "1").unwrap();
    tell(&format!("{device}/stop"), "1").unwrap();
    assert_eq!(tell(&format!("{device}/running"), "1"), Err(16), "EBUSY: it runs");
    tell(&format!("fs/bcache/{SET}/flash_vol_create"), "16M").unwrap();
    tell(&format!("fs/bcache/{SET}/internal/trigger_gc"), "1").unwrap();
    tell(&format!("fs/bcache/{SET}/unregister"), "1").unwrap();
    tell("block/bcache1/bcache/size", "1G").unwrap();
    let orders = view.orders();
    let of_device: Vec<&DeviceOrder> = orders
        .iter()
        .filter_map(|o| if let Order::Device(_, what) = o { Some(what) } else { None })
        .collect();
    assert_eq!(
        of_device,
        [
            &DeviceOrder::Attach(set),
            &DeviceOrder::Detach,
            &DeviceOrder::Stop,
            &DeviceOrder::Run,
            &DeviceOrder::Resize(Sectors(1 << 21))
        ]
    );
    assert_eq!(orders[0], Order::Register { path: "/dev/nonsense".into(), quiet: false });
    assert_eq!(orders[1], Order::ForgetPending);
    assert!(orders.contains(&Order::Set(set, SetOrder::CreateVolume(Sectors(32768)))));
    assert!(orders.contains(&Order::Set(set, SetOrder::Unregister)));
}

#[test]
fn figures_are_those_of_the_moment() {
    let view = ViewedSet::new();
    view.put("block/bcache0/bcache/writeback_running", "0").unwrap();
    view.write(0, 2048);
    view.read(0, 8);
    view.read(65536, 8);
    let device = "block/bcache0/bcache";
    assert_eq!(view.get(&format!("{device}/dirty_data")), "1.0M");
    assert_eq!(view.get(&format!("{device}/stats_total/cache_hits")), "1");
    assert_eq!(view.get(&format!("{device}/stats_total/cache_hit_ratio")), "50");
    assert_eq!(view.get(&format!("fs/bcache/{SET}/stats_total/cache_misses")), "1");
    assert_eq!(view.get(&format!("{device}/state")), "dirty");
    assert!(view.get(&format!("{device}/writeback_rate_debug")).contains("dirty:\t\t1.0M"));
    view.put(&format!("{device}/clear_stats"), "1").unwrap();
    assert_eq!(view.get(&format!("{device}/stats_total/cache_hits")), "0");
    assert_eq!(view.get(&format!("{device}/cache_mode")), "writethrough [writeback] writearound none");
    view.put(&format!("{device}/cache_mode"), "writethrough").unwrap();
    assert_eq!(view.get(&format!("{device}/cache_mode")), "[writethrough] writeback writearound none");
}
