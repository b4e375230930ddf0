//! The end of a process whose rank is over its budget: the `oom` message and `_exit(4)`, written from the allocator and therefore without allocating.

use std::fmt::{self, Write as _};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use crate::trial::child_exit;

/// The open messages file; standard error until [`super::arm`] names one.
pub(super) static MESSAGES: AtomicI32 = AtomicI32::new(2);

/// Set by the first rank over its budget, so that there is exactly one message.
static ENDING: AtomicBool = AtomicBool::new(false);

/// What the message says.
#[derive(Clone, Copy, Debug)]
pub(super) struct LastWords {
    pub(super) rank: usize,
    pub(super) requested: usize,
    pub(super) in_use: usize,
    pub(super) budget: usize,
    pub(super) phase: &'static str,
}

/// Appends the message and ends the process. No destructor runs and nothing unwinds: other threads may be anywhere.
pub(super) fn end_process(words: LastWords) -> ! {
    if ENDING.swap(true, Relaxed) {
        // Another rank is writing its message; it ends this thread with the process.
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    let line = message(words, SystemTime::now());
    // SAFETY: `arm` was given the descriptor for good and nobody closes it; standard error is open or the writes fail harmlessly.
    let file = unsafe { BorrowedFd::borrow_raw(MESSAGES.load(Relaxed)) };
    let mut rest = line.as_bytes();
    while !rest.is_empty() {
        match rustix::io::write(file, rest) {
            Ok(0) => break,
            Ok(written) => rest = &rest[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    // The exit code says the same as the message, so a message that cannot be made durable is no reason to stay.
    let _ = rustix::fs::fdatasync(file);
    // SAFETY: `_exit` may be called from anywhere.
    unsafe { libc::_exit(child_exit::OUT_OF_DEVICE_MEMORY) }
}

/// A line on the stack.
struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl Line {
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

/// The line of `messages.jsonl`: `MessageKind::Oom` of the protocol, written by hand because serialising allocates.
fn message(words: LastWords, now: SystemTime) -> Line {
    let LastWords { rank, requested, in_use, budget, phase } = words;
    let mut line = Line { bytes: [0; 512], length: 0 };
    // The longest possible line is under 300 bytes, so writing cannot fail.
    let _ = writeln!(
        line,
        r#"{{"at":"{}","kind":"oom","rank":{rank},"requested_bytes":{requested},"in_use_bytes":{in_use},"budget_bytes":{budget},"phase":"{phase}"}}"#,
        humantime::format_rfc3339_millis(now)
    );
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Message, MessageKind, OutOfMemory, Timestamp};

    #[test]
    fn the_message_is_the_protocols() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_millis(1_796_053_200_123);
        let line = message(LastWords { rank: 3, requested: usize::MAX, in_use: 7, budget: usize::MAX, phase: "backward" }, now);
        let read: Message = serde_json::from_slice(line.as_bytes()).unwrap();
        let out_of_memory = OutOfMemory { rank: 3, requested_bytes: u64::MAX, in_use_bytes: 7, budget_bytes: u64::MAX, phase: "backward".to_owned() };
        assert_eq!(read, Message { at: Timestamp(now), kind: MessageKind::Oom(out_of_memory) });
        assert!(line.as_bytes().ends_with(b"}\n"));
    }
}
