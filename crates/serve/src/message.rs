//! Messages to the operator: lines on stderr, and to a listener of this thread.
//!
//! Messages have no colour and no cursor movement, so `NO_COLOR` has no effect. Must not know the listener: the daemon makes
//! events of the messages of a set's thread.

use std::cell::RefCell;
use std::io::{self, Write};
use std::rc::Rc;
use std::sync::OnceLock;

use crate::log_writer::LogWriter;
use crate::plain;

type Listener = Rc<dyn Fn(&str, &str)>;

static WRITER: OnceLock<LogWriter> = OnceLock::new();

thread_local! {
    static LISTENER: RefCell<Option<Listener>> = const { RefCell::new(None) };
    static SPEAKER: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Begins every line of this thread on stderr with the label of its set, unless the text begins with it. The listener gets the
/// text alone.
pub fn speak_for(label: &str) {
    SPEAKER.with(|s| *s.borrow_mut() = label.to_owned());
}

/// Passes the level and text of every message of this thread to `listener`, which must not send messages.
pub fn listen(listener: impl Fn(&str, &str) + 'static) {
    LISTENER.with(|l| *l.borrow_mut() = Some(Rc::new(listener)));
}

/// The label and the listener of one of several parts of a thread.
#[derive(Default)]
pub struct Voice {
    listener: Option<Listener>,
    speaker: String,
}

impl Voice {
    /// Does work whose messages have this label and this listener. Afterwards the thread has those that it had before.
    pub fn during<T>(&mut self, work: impl FnOnce() -> T) -> T {
        self.swap();
        let done = work();
        self.swap();
        done
    }

    fn swap(&mut self) {
        LISTENER.with(|l| std::mem::swap(&mut *l.borrow_mut(), &mut self.listener));
        SPEAKER.with(|s| std::mem::swap(&mut *s.borrow_mut(), &mut self.speaker));
    }
}

/// Writes one line to stderr, such as `ubcache: error: …`. An empty level is left out; line ends in the text are escaped.
pub fn message(level: &str, text: &str) {
    let text = &*plain::escaped(text);
    let listener = LISTENER.with(|l| l.borrow().clone());
    if let Some(listener) = listener {
        listener(level, text);
    }
    let level = if level.is_empty() { String::new() } else { format!("{level}: ") };
    let text = SPEAKER.with(|label| plain::about(&label.borrow(), text));
    let line = format!("ubcache: {level}{text}\n");
    match WRITER.get() {
        Some(writer) => writer.write(line),
        // If a write to stderr fails, the failure cannot be reported.
        None => drop(io::stderr().lock().write_all(line.as_bytes())),
    }
}

/// Starts a thread that writes the messages from now on.
///
/// The target of stderr may depend on a volume of this process, and threads that serve must not wait for it.
pub(crate) fn write_elsewhere() {
    if WRITER.get().is_none()
        && let Ok(writer) = LogWriter::start(io::stderr())
    {
        // Another thread may have started a writer. Its lines are written as well.
        let _ = WRITER.set(writer);
    }
}

/// Writes information for the operator.
pub fn note(text: impl AsRef<str>) {
    message("", text.as_ref());
}

/// Writes a warning: an abnormal condition that does not end the work.
pub fn warn(text: impl AsRef<str>) {
    message("warning", text.as_ref());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sets of a group are on one thread.
    #[test]
    fn parts_of_a_thread_have_their_own_listeners() {
        let heard: Rc<RefCell<Vec<String>>> = Rc::default();
        let sinks = ["outer", "inner"].map(|who| {
            let sink = heard.clone();
            move |level: &str, text: &str| sink.borrow_mut().push(format!("{who}|{level}|{text}"))
        });
        let [outer, inner] = sinks;
        listen(outer);
        let mut voice = Voice::default();
        voice.during(|| {
            listen(inner);
            note("one");
        });
        note("two");
        voice.during(|| warn("three"));
        assert_eq!(*heard.borrow(), ["inner||one", "outer||two", "inner|warning|three"]);
    }

    #[test]
    fn a_thread_has_its_own_listener() {
        let heard: Rc<RefCell<Vec<String>>> = Rc::default();
        let sink = heard.clone();
        listen(move |level, text| sink.borrow_mut().push(format!("{level}|{text}")));
        warn("here");
        let elsewhere = std::thread::spawn(|| note("elsewhere"));
        elsewhere.join().expect("no panic");
        assert_eq!(*heard.borrow(), ["warning|here"]);
    }
}
