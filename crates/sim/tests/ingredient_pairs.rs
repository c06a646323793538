//! No two ingredients of a plan exclude each other: every pair is drawn within 10,000 plans, or is listed here with the reason.
//!
//! Plans are drawn and not run. A pair counts if both are in one boot; requests also count if they follow each other at one
//! place, with and without another cache mode in between, and if the power fails right after an answer.

use std::collections::{BTreeMap, BTreeSet};

use sim::disk::Landmark;
use sim::plan::{BootPlan, Cut, Faults, NOT_AGAIN, OperatorAction, Plan, Request, Substitute};

const PLANS: u64 = 10_000;

/// Ingredients of one kind of which a boot has at most one; or which do not go together, with the reason.
const NOT_TOGETHER: &[(&str, &str, &str)] = &[
    ("cut ", "cut ", "a boot ends in one way"),
    ("aim ", "aim ", "a boot has one aim"),
    ("outage for good", "outage that ends", "a boot has one outage"),
    ("hang ", "hang ", "one device hangs"),
    ("pull ", "pull ", "one device is pulled out"),
    ("lossy flush ", "lossy flush ", "one flush loses data"),
    ("crash in a durable write", "aim ", "a boot is aimed at one thing"),
    (
        "a copy of",
        "flash-only volume",
        "nothing tells how new the cache device was when a flash-only volume was written",
    ),
    ("a volume that", "a copy of", "a boot has one substitute"),
    ("a key that", "a copy of", "a boot has one substitute"),
    ("a key that", "a volume that", "a boot has one substitute"),
    ("a full set", "a copy of", "a boot has one substitute"),
    ("a full set", "a key that", "a boot has one substitute"),
    ("a full set", "a volume that", "a boot has one substitute"),
    ("released", "hang ", "the same fault"),
    ("first mode ", "first mode ", "counted for the first device"),
    ("mode setting ", "mode setting ", "a boot has one"),
    ("damaged data", "cache errors", "a footer that cannot be read leaves data without a checksum"),
    ("damaged data", "unreadable cache", "a footer that cannot be read leaves data without a checksum"),
    ("damaged data", "pull cache", "a footer that cannot be read leaves data without a checksum"),
    ("damaged data", "action wipe", "a wipe overwrites footers, and data without a checksum is not verified"),
    ("used by a kernel", "after a kernel", "a kernel uses the first boots"),
];

type Set = BTreeSet<String>;

fn of_request(r: &Request) -> Option<String> {
    let fua = |fua: bool| if fua { " with FUA" } else { "" };
    Some(match r {
        Request::Read { .. } => "read".into(),
        Request::Write { fua: f, .. } => format!("write{}", fua(*f)),
        Request::Flush => "flush".into(),
        Request::Discard { .. } => "discard".into(),
        Request::Zeroes { sectors, fua: f, .. } => {
            format!("{} zeroes{}", if *sectors > 128 { "large" } else { "small" }, fua(*f))
        }
        Request::FlushGivenUp { .. } => "given-up flush".into(),
        Request::Pause { .. } | Request::PauseUntilFailure { .. } | Request::PauseUntilRead { .. } => {
            return None;
        }
    })
}

fn range(r: &Request) -> Option<(u64, u64)> {
    match r {
        Request::Read { start, sectors }
        | Request::Write { start, sectors, .. }
        | Request::Discard { start, sectors }
        | Request::Zeroes { start, sectors, .. } => Some((*start, start + sectors)),
        Request::Flush
        | Request::FlushGivenUp { .. }
        | Request::Pause { .. }
        | Request::PauseUntilFailure { .. }
        | Request::PauseUntilRead { .. } => None,
    }
}

/// Reaches the same sectors; a flush reaches all.
fn overlap(a: &Request, b: &Request) -> bool {
    match (range(a), range(b)) {
        (Some(a), Some(b)) => a.0 < b.1 && b.0 < a.1,
        _ => true,
    }
}

fn of_action(action: &OperatorAction) -> String {
    match action {
        OperatorAction::Tune { name, value, .. } if name == "cache_mode" => format!("action mode {value}"),
        OperatorAction::Tune { name, .. } | OperatorAction::TuneSet { name, .. } => format!("action {name}"),
        OperatorAction::Gc => "action gc".into(),
        OperatorAction::Detach { .. } => "action detach".into(),
        OperatorAction::Recreate => "action recreate".into(),
        OperatorAction::Release { ns: NOT_AGAIN, .. } => "action release for the boot".into(),
        OperatorAction::Release { .. } => "action release".into(),
        OperatorAction::GiveUpDetach { .. } => "action detach given up".into(),
        OperatorAction::Scrub { ns: 0 } => "action scrub".into(),
        OperatorAction::Scrub { .. } => "action scrub given up".into(),
        OperatorAction::Wipe { ns: 0 } => "action wipe".into(),
        OperatorAction::Wipe { .. } => "action wipe given up".into(),
        OperatorAction::Drain { .. } => "action drain given up".into(),
        OperatorAction::Attach { .. } => "action attach".into(),
        OperatorAction::PowerFails => "action power fails".into(),
        OperatorAction::NextFlushLoses { device: 0 } => "action next flush of the cache fails".into(),
        OperatorAction::NextFlushLoses { .. } => "action next flush of a backing device fails".into(),
    }
}

fn of_faults(f: &Faults, all: &mut Set) {
    let mut add = |is: bool, what: &str| {
        if is {
            all.insert(what.to_owned());
        }
    };
    let at = |device: usize| if device == 0 { "cache" } else { "backing" };
    add(f.cache_one_in > 0, "cache errors");
    add(f.backing_one_in > 0, "backing errors");
    add(f.unreadable.is_some(), "unreadable cache");
    add(f.unreadable_backing.is_some(), "unreadable backing");
    if let Some(o) = &f.outage {
        add(true, if o.requests.is_some() { "outage that ends" } else { "outage for good" });
    }
    if let Some(h) = &f.hang {
        add(true, if h.flushes { "hang of flushes" } else { "hang of everything" });
        add(h.released, "released");
    }
    if let Some(l) = &f.lossy_flush {
        add(true, &format!("lossy flush {}", at(l.device)));
    }
    if let Some(p) = &f.pull {
        add(true, &format!("pull {}", at(p.device)));
    }
    add(f.damage.is_some(), "damaged data");
    add(f.failed_writes.is_some(), "failed writes");
}

fn of_boot(plan: &Plan, (number, b): (usize, &BootPlan)) -> Set {
    let mut all: Set = b.requests.iter().filter_map(|(_, r)| of_request(r)).collect();
    all.extend(b.actions.iter().map(|(_, a)| of_action(a)));
    if let Some(f) = &b.faults {
        of_faults(f, &mut all);
    }
    let cut = match b.cut {
        Cut::Power(..) => "cut all",
        Cut::Cache(_) => "cut cache",
        Cut::Backing(_) => "cut backing",
        Cut::Kill => "cut none: the process dies",
    };
    let flags = [
        (b.crash.is_some(), cut),
        (b.crash_in_durable_write.is_some(), "crash in a durable write"),
        (b.late.is_some(), "late writes"),
        (b.older.is_some(), "older devices"),
        (matches!(b.substitute, Some(Substitute::Copy(_))), "a copy of the cache device"),
        (b.substitute == Some(Substitute::LargeVolume), "a volume that is too large"),
        (b.substitute == Some(Substitute::FarKey), "a key that is too far"),
        (b.substitute == Some(Substitute::Full), "a full set"),
        (b.cache_speed.nodes.0 > 0, "slow nodes"),
        (b.alone, "alone"),
        (!b.absent.is_empty(), "absent"),
        (plan.crash_log, "crash log"),
        (plan.first_gen > 0, "aged"),
        (plan.layout.checksums, "checksums"),
        ((number as u64) < plan.kernel_boots, "used by a kernel"),
        (plan.kernel_boots > 0 && number as u64 >= plan.kernel_boots, "after a kernel"),
        (plan.flash_sectors > 0, "flash-only volume"),
    ];
    all.extend(flags.into_iter().filter(|(is, _)| *is).map(|(_, what)| what.to_owned()));
    if let Some(aim) = &b.aim {
        all.insert(format!("aim {:?}", aim.at));
    }
    if let Some(first) = plan.layout.backings.first() {
        all.insert(format!("first mode {:?}", first.mode));
    }
    if let Some(mode) = &b.settings.cache_mode {
        all.insert(format!("mode setting {mode}"));
    }
    all
}

fn excused(a: &str, b: &str) -> bool {
    let fits = |x: &str, y: &str| {
        NOT_TOGETHER
            .iter()
            .any(|(p, q, _)| x.starts_with(p) && y.starts_with(q) || x.starts_with(q) && y.starts_with(p))
    };
    fits(a, b)
}

/// Pairs of requests at one place: before, after; and what was between.
fn follow(b: &BootPlan, near: &mut BTreeMap<(String, String, bool), u64>, last: &mut BTreeMap<String, u64>) {
    let mode_at = |from: usize, to: usize| {
        let is_mode =
            |a: &OperatorAction| matches!(a, OperatorAction::Tune { name, .. } if name == "cache_mode");
        b.actions
            .iter()
            .any(|(at, a)| (from as u64..to as u64).contains(&(at.saturating_sub(1))) && is_mode(a))
    };
    let asked: Vec<(usize, &(usize, Request))> =
        b.requests.iter().enumerate().filter(|(_, (_, r))| of_request(r).is_some()).collect();
    for (n, (i, (volume, first))) in asked.iter().enumerate() {
        for (j, (other, second)) in asked.iter().skip(n + 1).take(3) {
            if let (true, Some(a), Some(c)) =
                (other == volume && overlap(first, second), of_request(first), of_request(second))
            {
                *near.entry((a.clone(), c.clone(), false)).or_default() += 1;
                if mode_at(*i, *j) {
                    *near.entry((a, c, true)).or_default() += 1;
                }
            }
        }
    }
    if let Some(aim) = b.aim.filter(|a| a.at == Landmark::Answer) {
        let changes = b.requests.iter().filter_map(|(_, r)| of_request(r).filter(|what| what != "read"));
        if let Some(what) = changes.into_iter().nth(aim.nth as usize - 1) {
            *last.entry(what).or_default() += 1;
        }
    }
}

#[test]
fn every_pair_is_drawn() {
    let (mut pairs, mut known) = (BTreeMap::<(String, String), u64>::new(), Set::new());
    let (mut near, mut last) = (BTreeMap::new(), BTreeMap::new());
    for plan in (0..PLANS).map(Plan::from_seed) {
        for (number, b) in plan.boots.iter().enumerate() {
            let all: Vec<String> = of_boot(&plan, (number, b)).into_iter().collect();
            for (i, a) in all.iter().enumerate() {
                known.insert(a.clone());
                for c in &all[i + 1..] {
                    *pairs.entry((a.clone(), c.clone())).or_default() += 1;
                }
            }
            follow(b, &mut near, &mut last);
        }
    }
    assert!(known.len() >= 85, "{} ingredients: {known:?}", known.len());
    let all: Vec<&String> = known.iter().collect();
    let mut missing = Vec::new();
    for (i, a) in all.iter().enumerate() {
        for b in &all[i + 1..] {
            if !excused(a, b) && !pairs.contains_key(&((*a).clone(), (*b).clone())) {
                missing.push(format!("{a} + {b}"));
            }
        }
    }
    assert!(missing.is_empty(), "{} pairs were not drawn: {missing:#?}", missing.len());
    let requests: Vec<&str> = all.iter().map(|a| a.as_str()).filter(|a| is_request(a)).collect();
    assert_eq!(requests.len(), 9, "{requests:?}");
    for a in &requests {
        for b in &requests {
            for mode in [false, true] {
                let n = near.get(&((*a).to_owned(), (*b).to_owned(), mode)).copied().unwrap_or(0);
                assert!(n >= 20, "{a}, then {b} at one place, another mode between: {mode}: {n} times");
            }
        }
        let n = last.get(*a).copied().unwrap_or(0);
        assert!(*a == "read" || n >= 20, "the power fails right after {a}: {n} times");
    }
}

fn is_request(what: &str) -> bool {
    ["read", "write", "flush", "discard", "small zeroes", "large zeroes"]
        .iter()
        .any(|r| what == *r || what == format!("{r} with FUA"))
}
