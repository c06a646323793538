//! Tests of the rate of writeback: the controller's terms, its limits, idle sets, and the pauses between groups.

use proptest::prelude::*;

use super::*;
use crate::tunables::DeviceTunables;

const T0: Nanos = Nanos::from_secs(100);

fn params() -> RateParams {
    DeviceTunables::default().rate_params()
}

/// A cache of 1 GiB (2 097 152 sectors) in front of one device, 30 % in use.
fn inputs(dirty: u64) -> RateInputs {
    RateInputs {
        nbuckets: 2048,
        available_buckets: 1434,
        bucket: Sectors(1024),
        in_use_percent: 30,
        volumes_dirty: Sectors(0),
        backing: Sectors(1 << 30),
        all_backing: Sectors(1 << 30),
        has_dirty: true,
        dirty: Sectors(dirty),
    }
}

fn set() -> IdleInputs {
    IdleInputs { attached_devices: 1, enabled: true, gc_running: false }
}

/// An update of a set that is not idle.
fn update(rate: &mut WritebackRate, inputs: &RateInputs, now: Nanos) {
    let update = rate.update(inputs, &params(), &mut IdleCounter::default(), &set(), now);
    assert_eq!(update, RateUpdate::Controlled);
}

#[test]
fn the_target_is_a_share_of_the_cache() {
    assert_eq!(inputs(0).target(10), 209_715, "a tenth of 2 097 152");
    assert_eq!(RateInputs { volumes_dirty: Sectors(97_152), ..inputs(0) }.target(10), 200_000);
    // 1000 of 3000: 5461 / 16384 of 209 715 = 69 900.7.
    let third = RateInputs { backing: Sectors(1000), all_backing: Sectors(3000), ..inputs(0) };
    assert_eq!(third.target(10), 69_900);
    // A tiny device gets 1 / 16384 of the target.
    assert_eq!(RateInputs { backing: Sectors(1), ..inputs(0) }.target(10), 12);
    assert_eq!(RateInputs { volumes_dirty: Sectors(u64::MAX), ..inputs(0) }.target(10), 0);
}

#[test]
fn proportional_and_integral_terms_add_up() {
    let mut rate = WritebackRate::new(T0);
    assert_eq!(rate.rate(), 1024);
    // error 200 000: P = 5000; integral 1 000 000: I = 100.
    update(&mut rate, &inputs(409_715), T0);
    assert_eq!((rate.rate(), rate.change), (5100, 4076));
    update(&mut rate, &inputs(409_715), T0);
    assert_eq!((rate.rate(), rate.change), (5200, 100));
    // More than 1 ms behind the limiter: the integral does not grow.
    update(&mut rate, &inputs(409_715), T0.after(Nanos(1_000_000)));
    assert_eq!(rate.rate(), 5200);
    // error -209 715: P = -5242; integral 2 000 000 - 1 048 575 = 951 425: I = 95; minimum 8.
    update(&mut rate, &inputs(0), T0.after(Nanos::from_secs(1)));
    assert_eq!((rate.proportional, rate.integral_scaled, rate.rate()), (-5242, 95, 8));
    update(&mut rate, &inputs(0), T0);
    assert_eq!(rate.integral, -97_150);
    update(&mut rate, &inputs(0), T0);
    assert_eq!(rate.integral, -97_150, "it does not wind up below zero");
}

#[test]
fn fragmentation_takes_over_from_the_proportional_term() {
    // 1229 buckets used; 122 900 dirty: 10 times as much space as data, 100 sectors per bucket.
    let case = |in_use_percent, dirty| RateInputs { available_buckets: 819, in_use_percent, ..inputs(dirty) };
    for (in_use, term) in [
        (50, None),
        (51, Some(100)),
        (57, Some(700)),
        (58, Some(1000)),
        (60, Some(3000)),
        (64, Some(7000)),
        (65, Some(100_000)),
        (100, Some(3_600_000)),
    ] {
        assert_eq!(case(in_use, 122_900).fragmentation_term(&params()), term, "{in_use} %");
    }
    assert_eq!(case(60, 400_000).fragmentation_term(&params()), None, "1 258 496 / 400 000 is 3");
    assert_eq!(case(60, 0).fragmentation_term(&params()), None);
    let off = RateParams { consider_fragment: false, ..params() };
    assert_eq!(case(60, 122_900).fragmentation_term(&off), None);

    let mut rate = WritebackRate::new(T0);
    update(&mut rate, &case(60, 122_900), T0);
    assert_eq!(rate.rate(), 3000, "P would be -2170");
    // More dirty data than the target: P = (300 000 - 209 715) / 40 = 2257 and 244 · 30 = 7320.
    update(&mut rate, &case(60, 300_000), T0);
    assert_eq!(rate.proportional, 7320);
    update(&mut rate, &case(51, 300_000), T0);
    assert_eq!(rate.proportional, 2257, "244 · 1 is less");
}

#[test]
fn the_rate_is_clamped() {
    let mut rate = WritebackRate::new(T0);
    update(&mut rate, &inputs(u64::MAX), T0);
    assert_eq!(rate.rate(), 1_000_000_000);
    let minimum = RateParams { minimum: u32::MAX, ..params() };
    rate.update(&inputs(0), &minimum, &mut IdleCounter::default(), &set(), T0);
    assert_eq!(rate.rate(), 1_000_000_000, "the upper end wins");
    rate.set_rate(0);
    assert_eq!(rate.rate(), 1);
    rate.set_rate(u32::MAX);
    assert_eq!(rate.rate(), 2_147_483_647);
}

#[test]
fn nothing_changes_without_dirty_data_or_throttling() {
    let mut rate = WritebackRate::new(T0);
    let mut idle = IdleCounter::default();
    let clean = RateInputs { has_dirty: false, ..inputs(0) };
    let unthrottled = RateParams { percent: 0, ..params() };
    for _ in 0..10 {
        assert_eq!(rate.update(&clean, &params(), &mut idle, &set(), T0), RateUpdate::Unchanged);
        let update = rate.update(&inputs(9), &unthrottled, &mut idle, &set(), T0);
        assert_eq!(update, RateUpdate::Unchanged);
    }
    assert_eq!((rate.rate(), idle.rounds), (1024, 0));
}

#[test]
fn an_idle_set_writes_back_without_limit() {
    let mut rate = WritebackRate::new(T0);
    let mut idle = IdleCounter::default();
    let due = inputs(409_715);
    for _ in 0..5 {
        let update = rate.update(&due, &params(), &mut idle, &set(), T0);
        assert_eq!(update, RateUpdate::Controlled);
    }
    assert!(!idle.foreground_request());
    for _ in 0..5 {
        rate.update(&due, &params(), &mut idle, &set(), T0);
    }
    let gc = IdleInputs { gc_running: true, ..set() };
    assert_eq!(rate.update(&due, &params(), &mut idle, &gc, T0), RateUpdate::Controlled);
    assert_eq!(rate.update(&due, &params(), &mut idle, &set(), T0), RateUpdate::Idle);
    assert_eq!(rate.rate(), 2_147_483_647);
    let debug = rate.debug(Sectors(409_715), true, T0);
    assert_eq!((debug.proportional, debug.integral, debug.change), (0, 0, 0));
    assert!(idle.foreground_request(), "somebody has to slow the devices down");
    assert!(!idle.foreground_request(), "once");
    rate.leave_idle();
    assert_eq!(rate.rate(), 1);
    assert_eq!(rate.update(&due, &params(), &mut idle, &set(), T0), RateUpdate::Controlled);
}

#[test]
fn idleness_takes_six_rounds_per_device_squared() {
    let disabled = IdleInputs { enabled: false, ..set() };
    for (devices, rounds) in [(1, 6), (2, 24), (3, 54)] {
        let mut idle = IdleCounter::default();
        let mut rate = WritebackRate::new(T0);
        let set = IdleInputs { attached_devices: devices, ..set() };
        let mut n = 1;
        while rate.update(&inputs(1), &params(), &mut idle, &set, T0) != RateUpdate::Idle {
            n += 1;
        }
        assert_eq!(n, rounds);
        assert_eq!(rate.update(&inputs(1), &params(), &mut idle, &disabled, T0), RateUpdate::Controlled);
    }
    let counter = IdleCounter { rounds: u64::MAX, at_max: false };
    assert!(!counter.exceeded(0));
    assert!(counter.exceeded(u32::MAX));
}

#[test]
fn the_limiter_spaces_groups_out() {
    let mut limiter = RateLimiter::new(1024, T0);
    assert_eq!(limiter.delay(Sectors(512), T0), Nanos::from_ms(500));
    assert_eq!(limiter.delay(Sectors(512), T0), Nanos::from_ms(1000), "it had not waited");
    assert_eq!(limiter.delay(Sectors(1 << 40), T0), Nanos::from_ms(2500), "not further ahead");
    // An hour later the limiter makes up for at most 2 s, i.e. 2048 sectors.
    let later = T0.after(Nanos::from_secs(3600));
    assert_eq!(limiter.delay(Sectors(0), later), Nanos(0));
    assert_eq!(limiter.next(), later.since(Nanos::from_secs(2)));
    assert_eq!(limiter.delay(Sectors(2048), later), Nanos(0));
    assert_eq!(limiter.delay(Sectors(1024), later), Nanos::from_secs(1));
    limiter.reset(later);
    assert_eq!(limiter.next(), later);
    let mut fresh = RateLimiter::new(1, Nanos(0));
    assert_eq!(fresh.delay(Sectors(0), Nanos(0)), Nanos(0), "before two seconds have passed");
}

#[test]
fn unlimited_writeback_is_not_accounted_for() {
    let mut rate = WritebackRate::new(T0);
    assert_eq!(rate.delay_after(Sectors(1 << 30), true, T0), Nanos(0));
    assert_eq!(rate.delay_after(Sectors(1024), false, T0), Nanos::from_secs(1));
    rate.reset_clock(T0);
    assert_eq!(rate.delay_after(Sectors(1024), false, T0), Nanos::from_secs(1));
}

#[test]
fn the_debug_text_is_the_kernels() {
    let mut rate = WritebackRate::new(T0);
    update(&mut rate, &inputs(409_715), T0);
    rate.delay_after(Sectors(5100), false, T0);
    let shown = rate.debug(Sectors(409_715), true, T0.after(Nanos::from_ms(1500)));
    assert_eq!(
        shown.to_string(),
        "rate:\t\t2.4M/sec\n\
         dirty:\t\t200.0M\n\
         target:\t\t102.3M\n\
         proportional:\t2.4M\n\
         integral:\t50.0k\n\
         change:\t\t1.9M/sec\n\
         next io:\t-500ms\n"
    );
    let stopped = rate.debug(Sectors(409_715), false, T0);
    assert_eq!((stopped.rate, stopped.proportional, stopped.next_io_ms), (0, 0, 0));
    assert_eq!((stopped.dirty, stopped.target), (409_715 * 512, 209_715 * 512));
}

fn any_inputs() -> impl Strategy<Value = RateInputs> {
    let number = || (any::<u64>(), 0u32..64).prop_map(|(n, shift)| n >> shift);
    let sectors = move || number().prop_map(Sectors);
    (number(), number(), sectors(), 0u8..=100, sectors(), sectors(), sectors(), sectors()).prop_map(
        |(nbuckets, available, bucket, in_use, volumes_dirty, backing, all_backing, dirty)| RateInputs {
            nbuckets,
            available_buckets: available,
            bucket,
            in_use_percent: in_use,
            volumes_dirty,
            backing,
            all_backing,
            has_dirty: true,
            dirty,
        },
    )
}

proptest! {
    #[test]
    fn nothing_overflows(
        steps in prop::collection::vec((any_inputs(), any::<u64>(), any::<u64>()), 1..20),
        p in any::<u32>(), i in any::<u32>(), fp in any::<[u32; 3]>(), minimum in any::<u32>(),
        seconds in any::<u32>(), percent in 1u8..=100,
    ) {
        let params = RateParams {
            percent, p_term_inverse: p, i_term_inverse: i,
            fp_term_low: fp[0], fp_term_mid: fp[1], fp_term_high: fp[2],
            minimum, update_seconds: seconds, consider_fragment: true,
        };
        let mut rate = WritebackRate::new(T0);
        let mut idle = IdleCounter::default();
        for (inputs, now, written) in steps {
            rate.update(&inputs, &params, &mut idle, &set(), Nanos(now));
            prop_assert!((1..=IDLE_RATE).contains(&rate.rate()));
            let delay = rate.delay_after(Sectors(written), false, Nanos(now));
            prop_assert!(delay <= MAX_AHEAD);
            let _ = rate.debug(inputs.dirty, true, Nanos(now)).to_string();
        }
    }

    /// On ordinary numbers the controller is the formula (semantics section 11.4).
    #[test]
    fn agrees_with_the_formula(
        dirty in prop::collection::vec(0u64..4_000_000, 1..30), used in 1u64..=2048, late in any::<bool>(),
    ) {
        let now = if late { T0.after(Nanos::from_secs(1)) } else { T0 };
        let mut rate = WritebackRate::new(T0);
        let mut integral = 0i64;
        for dirty in dirty {
            let in_use = (used * 100 / 2048) as u8;
            let case = RateInputs {
                available_buckets: 2048 - used, in_use_percent: in_use, ..inputs(dirty)
            };
            update(&mut rate, &case, now);

            let error = dirty as i64 - 209_715;
            let mut p = error / 40;
            if in_use > 50 && dirty > 0 {
                let frag = used * 1024 / dirty;
                let fp = match in_use {
                    51..=57 => i64::from(in_use) - 50,
                    58..=64 => 10 * (i64::from(in_use) - 57),
                    _ => 1000 * (i64::from(in_use) - 64),
                };
                let fps = (dirty / used) as i64 * fp;
                if frag > 3 && fps > p {
                    p = fps;
                }
            }
            if (error < 0 && integral > 0) || (error > 0 && !late) {
                integral += error * 5;
            }
            let expected = (p + integral / 10000).clamp(8, 1_000_000_000);
            prop_assert_eq!(i64::from(rate.rate()), expected);
        }
    }
}

/// Divisors and the least rate of 0 count as 1; so does a device without a size.
#[test]
fn zeros_count_as_one() {
    let odd = RateParams { p_term_inverse: 0, i_term_inverse: 0, minimum: 0, ..params() };
    for (case, dirty, rate, terms) in [
        // 100 sectors above the target: P = 100, I = 500.
        (odd, 209_815, 600, (100, 500)),
        (RateParams { p_term_inverse: 1, i_term_inverse: 1, ..odd }, 209_815, 600, (100, 500)),
        (RateParams { p_term_inverse: 2, i_term_inverse: 2, ..odd }, 209_815, 300, (50, 250)),
        // Below the target: P = -209 715.
        (odd, 0, 1, (-209_715, 0)),
        (RateParams { minimum: 1, ..odd }, 0, 1, (-209_715, 0)),
        (RateParams { minimum: 2, ..odd }, 0, 2, (-209_715, 0)),
    ] {
        let mut r = WritebackRate::new(T0);
        r.update(&inputs(dirty), &case, &mut IdleCounter::default(), &set(), T0);
        assert_eq!((r.rate(), (r.proportional, r.integral_scaled)), (rate, terms), "{case:?}");
    }
    assert_eq!(RateInputs { backing: Sectors(1), all_backing: Sectors(1), ..inputs(0) }.target(10), 209_715);
    assert_eq!(RateInputs { backing: Sectors(0), all_backing: Sectors(0), ..inputs(0) }.target(10), 12);
    let twice = RateInputs { backing: Sectors(2), all_backing: Sectors(1), ..inputs(0) };
    assert_eq!(twice.target(10), 209_715, "a share is no more than all");
    assert_eq!((inputs(0).target(100), inputs(0).target(50)), (2_097_152, 1_048_576));
    let (mut zero, mut one) = (RateLimiter::new(0, T0), RateLimiter::new(1, T0));
    assert_eq!((zero.rate(), one.rate()), (1, 1));
    assert_eq!(zero.delay(Sectors(1), T0), one.delay(Sectors(1), T0));
}

/// Before the first update only the rate is shown; the result of the last update can be read.
#[test]
fn the_last_update_can_be_read() {
    let mut rate = WritebackRate::new(T0);
    let fresh = rate.debug(Sectors(0), true, T0);
    let nothing = RateDebug {
        rate: 1024 * 512,
        dirty: 0,
        target: 0,
        proportional: 0,
        integral: 0,
        change: 0,
        next_io_ms: 0,
    };
    assert_eq!(fresh, nothing);
    assert!(!rate.is_idle() && !rate.is_fragmented());
    let spread = RateInputs { available_buckets: 819, in_use_percent: 60, ..inputs(122_900) };
    update(&mut rate, &spread, T0);
    assert!(rate.is_fragmented() && !rate.is_idle());
    update(&mut rate, &inputs(409_715), T0);
    assert!(!rate.is_fragmented(), "P decides");
    let mut idle = IdleCounter { rounds: 9, at_max: false };
    update(&mut rate, &spread, T0);
    let alone = IdleInputs { attached_devices: 1, ..set() };
    assert_eq!(rate.update(&spread, &params(), &mut idle, &alone, T0), RateUpdate::Idle);
    assert!(rate.is_idle() && !rate.is_fragmented());
    rate.leave_idle();
    assert!(!rate.is_idle(), "a request came");
    update(&mut rate, &inputs(409_715), T0);
    rate.set_rate(IDLE_RATE);
    assert!(!rate.is_idle(), "by hand");
}

/// Terms outside the range are limited to its ends.
#[test]
fn terms_saturate_to_their_side() {
    let max = i128::from(i64::MAX);
    for (value, saturated) in [
        (0, 0),
        (-1, -1),
        (max, i64::MAX),
        (max + 1, i64::MAX),
        (i128::from(i64::MIN), i64::MIN),
        (i128::from(i64::MIN) - 1, i64::MIN),
    ] {
        assert_eq!(saturate(value), saturated);
    }
    assert_eq!((in_bytes(3), in_bytes(-3)), (1536, -1536));
    assert_eq!((in_bytes(i64::MAX), in_bytes(i64::MIN)), (i64::MAX, i64::MIN));
}

/// Each condition under which fragmentation does not count, and the first value at which it does.
#[test]
fn fragmentation_counts_from_each_of_its_limits() {
    // 1229 of 2048 buckets of 1024 sectors are used.
    let case = |dirty| RateInputs { available_buckets: 819, in_use_percent: 51, ..inputs(dirty) };
    let term = |case: RateInputs| case.fragmentation_term(&params());
    // 1 258 496 sectors are four times as many as 314 624, and less than four times as many as 314 625.
    assert_eq!(term(case(314_624)), Some(256), "314 624 / 1229");
    assert_eq!(term(case(314_625)), None);
    assert_eq!(term(case(1)), Some(0), "less than a sector for each bucket");
    assert_eq!(term(case(1229)), Some(1));
    assert_eq!(term(RateInputs { available_buckets: 2048, ..case(8) }), None, "no bucket is used");
    assert_eq!(term(RateInputs { available_buckets: 2047, ..case(8) }), Some(8), "1024 sectors over 8");
    assert_eq!(term(RateInputs { available_buckets: 9999, ..case(8) }), None);
}

/// A set with one device is idle after six rounds; a request restarts the count.
#[test]
fn a_request_begins_the_count_of_idle_rounds_anew() {
    let (mut rate, mut idle) = (WritebackRate::new(T0), IdleCounter::default());
    let mut next = |idle: &mut IdleCounter| rate.update(&inputs(1), &params(), idle, &set(), T0);
    for _ in 0..2 {
        for _ in 0..5 {
            assert_eq!(next(&mut idle), RateUpdate::Controlled);
        }
        assert!(!idle.foreground_request());
    }
    for _ in 0..5 {
        assert_eq!(next(&mut idle), RateUpdate::Controlled);
    }
    assert_eq!(next(&mut idle), RateUpdate::Idle);
    let one = IdleCounter { rounds: 0, at_max: false };
    assert!(!one.exceeded(1) && !one.exceeded(0));
}

/// The integral term grows by error times seconds while writeback keeps up, and falls only until it is negative.
#[test]
fn the_integral_winds_up_by_its_rules() {
    let now = T0.after(Nanos::from_ms(1));
    for (late, before, error, after) in [
        (Nanos(0), 0, 0, 0),
        (Nanos(0), 100, 0, 100),
        (Nanos(0), 0, 1, 5),
        (Nanos(0), -100, 1, -95),
        (Nanos(1), 0, 1, 0),
        (Nanos(0), 0, -1, 0),
        (Nanos(0), 1, -1, -4),
        (Nanos(1), 1, -1, -4),
        (Nanos(0), -1, -1, -1),
    ] {
        let mut rate = WritebackRate { integral: before, ..WritebackRate::new(T0) };
        // The update is a nanosecond less than a millisecond late, and then exactly a millisecond.
        let at = Nanos(now.0 - 1 + late.0);
        update(&mut rate, &inputs(u64::try_from(209_715 + error).unwrap()), at);
        assert_eq!(rate.integral, after, "{late:?} late, {before}, error {error}");
    }
}

/// If both terms are equal, the fragmentation term does not count.
#[test]
fn an_equal_fragmentation_term_does_not_decide() {
    // The target is 119 900, so P = 3000 with a divisor of 1. Fragmentation: 100 sectors for each used bucket, times 30.
    let case = RateInputs {
        available_buckets: 819,
        in_use_percent: 60,
        volumes_dirty: Sectors(2_097_152 - 1_199_000),
        ..inputs(122_900)
    };
    for (divisor, term, decides) in [(1, 3000, false), (2, 3000, true)] {
        let params = RateParams { p_term_inverse: divisor, ..params() };
        let mut rate = WritebackRate::new(T0);
        rate.update(&case, &params, &mut IdleCounter::default(), &set(), T0);
        assert_eq!((rate.target, rate.proportional, rate.is_fragmented()), (119_900, term, decides));
    }
}

/// The result of an update does not depend on the result of the one before.
#[test]
fn an_update_without_dirty_data_ends_what_was_before() {
    let spread = RateInputs { available_buckets: 819, in_use_percent: 60, ..inputs(122_900) };
    let clean = RateInputs { has_dirty: false, ..spread };
    let unthrottled = RateParams { percent: 0, ..params() };
    for (case, params) in [(clean, params()), (spread, unthrottled)] {
        let (mut rate, mut idle) = (WritebackRate::new(T0), IdleCounter::default());
        update(&mut rate, &spread, T0);
        assert!(rate.is_fragmented());
        assert_eq!(rate.update(&case, &params, &mut idle, &set(), T0), RateUpdate::Unchanged);
        assert!(!rate.is_fragmented() && !rate.is_idle());
    }
}
