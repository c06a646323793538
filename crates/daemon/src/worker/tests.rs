//! Tests of the thread of a set and of its handle.

use super::*;
use crate::config::Config;
use crate::state::State;

fn shared(dir: &std::path::Path) -> Arc<Shared> {
    Arc::new(Shared::new(Config::default(), State::open(dir).unwrap()))
}

fn device(dir: &std::path::Path) -> PathBuf {
    let path = dir.join("ssd");
    std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
    path
}

#[test]
fn a_device_that_cannot_be_served_is_an_error_and_ends_the_thread() {
    let dir = tempfile::tempdir().unwrap();
    let (shared, cache) = (shared(dir.path()), device(dir.path()));
    let plan = Plan { id: "x".into(), cache: Some(cache), alone: None, group: None };
    let (worker, up) = start(plan, shared.clone()).unwrap();
    let said = up.wait().unwrap().err().unwrap();
    assert!(said.message().unwrap().contains("expected a cache device"), "{said:?}");
    worker.join();
    assert!(matches!(worker.phase(), Phase::Failed(_)));
    assert!(worker.order(Order::Stop).is_err());
    assert_eq!(shared.hub.last(9, |e| e.kind == "set" && e.level == "error").len(), 1);
}

/// A command to a set that was being unregistered got the answer `stopped before it answered`.
#[tokio::test]
async fn a_command_to_a_set_that_stops_says_that_nothing_was_done_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let shared = shared(dir.path());
    let jobs = Jobs::new(Arc::default());
    for (daemon_stops, id) in [(false, 2), (true, 3)] {
        let cache = crate::testing::cache_device(dir.path(), id);
        let plan = Plan { id: "the set".into(), cache: Some(cache.clone()), alone: None, group: None };
        let (worker, up) = start(plan, shared.clone()).unwrap();
        up.wait().unwrap().unwrap();
        if daemon_stops {
            shared.begin_stop();
        }
        // The orders behind the stop are in the queue, unless the thread is faster.
        worker.order(Order::Stop).unwrap();
        let (job, gc) = (
            worker.begin_job(&jobs, "scrub", "the set", None, Order::Scrub),
            worker.command(Command::Gc).await,
        );
        worker.join();
        let job = job.map_or_else(|e| e.to_string(), |job| job.problem().unwrap());
        let late = worker.command(Command::Gc).await.err().unwrap().to_string();
        let next = match daemon_stops {
            false => format!("run `ubcache register {}`, then this command", cache.display()),
            true => "run this command again after the next start of the daemon".to_owned(),
        };
        for said in [job, gc.err().unwrap().to_string(), late] {
            assert!(said.contains("set the set is not served any more: this command was not"), "{said}");
            assert!(said.contains(&next), "{said}");
        }
    }
}

/// A job that had no place in the queue had failed because its set had stopped, and so had a job of a set that had panicked.
#[test]
fn a_job_that_a_thread_does_not_carry_out_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let (shared, jobs) = (shared(dir.path()), Jobs::new(Arc::default()));
    let cache = crate::testing::cache_device(dir.path(), 2);
    let plan = Plan { id: "the set".into(), cache: Some(cache), alone: None, group: None };
    let (orders, receiver) = channel(1);
    let state = ThreadState::new(plan.clone(), shared.clone());
    let idle = Worker { plan: plan.clone(), state, orders, thread: Arc::default() };
    idle.order(Order::Force).unwrap();
    let refused = |worker: &Worker| {
        let said = worker.begin_job(&jobs, "wipe", "x", None, Order::Wipe).err().unwrap().to_string();
        let last = jobs.get(jobs.all().len() as u64).unwrap().problem().unwrap();
        assert_eq!(last, format!("wipe x: {said}"));
        said
    };
    assert!(refused(&idle).contains("too many commands are queued"));
    drop(receiver);
    idle.state.phase.set(Phase::Stopped);
    assert!(refused(&idle).contains("is not served any more"));

    let (worker, up) = start(plan, shared).unwrap();
    let job = worker.begin_job(&jobs, "wipe", "x", None, Order::Wipe).unwrap();
    worker.order(Order::Panic).unwrap();
    up.wait().unwrap().unwrap();
    worker.join();
    let said = job.problem().unwrap();
    assert!(said.starts_with("wipe x: set the set has failed: internal error"), "{said}");
}

#[test]
fn a_panic_ends_one_thread_and_its_devices_can_be_had_again() {
    let dir = tempfile::tempdir().unwrap();
    let [cache, other] = [2, 3].map(|n| crate::testing::cache_device(dir.path(), n));
    let shared = shared(dir.path());
    let plan = Plan { id: "the set".into(), cache: Some(cache), alone: None, group: None };
    let (worker, up) = start(plan.clone(), shared.clone()).unwrap();
    up.wait().unwrap().unwrap();
    let other = Plan { id: "another set".into(), cache: Some(other), alone: None, group: None };
    let (bystander, up) = start(other, shared.clone()).unwrap();
    up.wait().unwrap().unwrap();
    assert_eq!(worker.phase(), Phase::Serving);
    let (reply, answer) = oneshot();
    worker.order(Order::Panic).unwrap();
    let sent = worker.order(Order::Do(Command::Stats, reply));
    let said = sent.and_then(|()| answer.wait().unwrap().map(drop)).unwrap_err().to_string();
    assert!(
        said.contains("has failed: internal error"),
        "a command to a thread that has panicked gets an answer: {said}"
    );
    worker.join();
    assert!(matches!(worker.phase(), Phase::Failed(why) if why.text().contains("internal error")));
    let (reply, answer) = oneshot();
    bystander.order(Order::Do(Command::Stats, reply)).unwrap();
    assert!(matches!(answer.wait().unwrap(), Ok(Answer::Stats(_))), "the other set has not noticed");
    bystander.order(Order::Stop).unwrap();
    bystander.join();
    assert_eq!(bystander.phase(), Phase::Stopped);
    let (again, up) = start(plan, shared).unwrap();
    up.wait().unwrap().unwrap();
    again.order(Order::Stop).unwrap();
    again.join();
    assert_eq!(again.phase(), Phase::Stopped);
}

type Up = Awaited<Result<(), Failure>>;

/// Two sets of a group, the second one on the thread of the first one; `None` if that thread has ended already.
fn pair(dir: &std::path::Path, first: PathBuf) -> Option<(Worker, Worker, [Up; 2])> {
    let shared = shared(dir);
    let plan =
        |id: &str, cache| Plan { id: id.into(), cache: Some(cache), alone: None, group: Some("g".into()) };
    let (one, one_up) = start(plan("one", first), shared.clone()).unwrap();
    let second = crate::testing::cache_device(dir, 3);
    let (two, two_up) = one.start_beside(plan("two", second), shared)?;
    Some((one, two, [one_up, two_up]))
}

#[test]
fn a_set_of_a_group_stops_and_the_others_on_its_thread_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let first = crate::testing::cache_device(dir.path(), 2);
    let (one, two, up) = pair(dir.path(), first).unwrap();
    up.into_iter().for_each(|up| up.wait().unwrap().unwrap());
    one.order(Order::Stop).unwrap();
    one.join();
    assert_eq!((one.phase(), two.phase()), (Phase::Stopped, Phase::Serving));
    let (reply, answer) = oneshot();
    two.order(Order::Do(Command::Stats, reply)).unwrap();
    assert!(matches!(answer.wait().unwrap(), Ok(Answer::Stats(_))));
    two.order(Order::Stop).unwrap();
    two.join();
    assert_eq!(two.phase(), Phase::Stopped);
    let shared = two.state.shared.clone();
    let (late, up) = (Plan { id: "late".into(), ..two.plan.clone() }, shared);
    assert!(one.start_beside(late, up).is_none(), "the thread has ended");
}

/// The device of the set that started the thread cannot be served. The set that joined meanwhile was never served and never ended, and
/// the daemon could not stop.
#[test]
fn a_set_that_joins_a_thread_whose_first_set_fails_is_served() {
    let mut joined = 0;
    for _ in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        // The thread may have ended before the second set.
        let Some((one, two, up)) = pair(dir.path(), device(dir.path())) else { continue };
        joined += 1;
        let [one_up, two_up] = up.map(|up| up.wait().unwrap());
        assert!(one_up.is_err());
        two_up.unwrap();
        two.order(Order::Stop).unwrap();
        one.join();
        two.join();
        assert_eq!(two.phase(), Phase::Stopped);
    }
    assert!(joined > 0);
}

#[test]
fn a_panic_ends_every_set_of_the_thread_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let first = crate::testing::cache_device(dir.path(), 2);
    let (one, two, up) = pair(dir.path(), first).unwrap();
    up.into_iter().for_each(|up| up.wait().unwrap().unwrap());
    two.order(Order::Panic).unwrap();
    for worker in [&one, &two] {
        worker.join();
        let said = format!("{:?}", worker.phase());
        assert!(said.contains("internal error: by an order"), "{said}");
        assert!(worker.order(Order::Stop).is_err());
    }
}
