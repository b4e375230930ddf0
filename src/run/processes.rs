//! Processes as `/proc` shows them: who descends from whom, who carries a mark, and ending them without ever meeting a process that took over an id.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// Environment variable that every process of an attempt carries unless it takes it off: the attempt's folder.
pub const MARK: &str = "SWEEP_ATTEMPT";

/// A process, by what names it for good and by whom it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) id: u32,
    pub(super) parent: u32,
    pub(super) session: u32,
    /// Ticks since boot when it started.
    pub(super) started: u64,
    /// Whether it has ended and only waits to be waited for.
    ended: bool,
}

impl Process {
    /// The process with this id, if there is one.
    pub(super) fn read(id: u32) -> Option<Self> {
        parse(id, &fs::read(format!("/proc/{id}/stat")).ok()?)
    }

    /// Ends it at once, unless its id is another process's by now.
    fn kill(self) {
        let Some(pid) = i32::try_from(self.id).ok().and_then(Pid::from_raw) else { return };
        // A descriptor names one process for good, so what is checked after it was opened is what gets the signal.
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => {
                if Self::read(self.id).is_some_and(|now| now.started == self.started) {
                    let _ = pidfd_send_signal(descriptor, Signal::KILL);
                }
            }
            Err(rustix::io::Errno::SRCH) => {}
            // A kernel without such descriptors.
            Err(_) => {
                if Self::read(self.id).is_some_and(|now| now.started == self.started) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
    }
}

/// Parses `/proc/<pid>/stat`. The program's name stands in parentheses and may hold anything; the last `)` ends it.
fn parse(id: u32, stat: &[u8]) -> Option<Process> {
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields: Vec<&str> = std::str::from_utf8(stat.get(after_name..)?).ok()?.split_ascii_whitespace().collect();
    // Numbered from 1 as in proc(5); the first field after the name is the third.
    let field = |number: usize| fields.get(number - 3);
    Some(Process {
        id,
        parent: field(4)?.parse().ok()?,
        session: field(6)?.parse().unwrap_or(0),
        started: field(22)?.parse().ok()?,
        ended: matches!(*field(3)?, "Z" | "X" | "x"),
    })
}

/// All processes that have not ended.
pub(super) fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter_map(Process::read).filter(|process| !process.ended).collect()
}

/// Those of `processes` that descend from `ancestor`, itself not among them.
pub(super) fn descendants(processes: &[Process], ancestor: u32) -> Vec<Process> {
    let mut children: BTreeMap<u32, Vec<Process>> = BTreeMap::new();
    for process in processes {
        children.entry(process.parent).or_default().push(*process);
    }
    let mut found = Vec::new();
    let mut next = vec![ancestor];
    while let Some(parent) = next.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            next.push(child.id);
            found.push(child);
        }
    }
    found
}

/// Ends every descendant of this process once. Those that are started meanwhile are met by the next call.
pub(super) fn kill_descendants() {
    for process in descendants(&all(), std::process::id()) {
        process.kill();
    }
}

/// Ends every process that carries the mark of `folder`, an attempt's or one above it, or belongs to `session`, until none is left or a second has passed.
/// For what lost its supervisor. Returns how many there were.
pub(super) fn kill_marked(folder: &Path, session: Option<u32>) -> usize {
    let limit = Instant::now() + Duration::from_secs(1);
    let mut met: Vec<(u32, u64)> = Vec::new();
    loop {
        let strays: Vec<Process> = all()
            .into_iter()
            .filter(|process| process.id != std::process::id())
            .filter(|process| session.is_some_and(|session| session == process.session) || is_marked(process.id, folder))
            .collect();
        if strays.is_empty() || Instant::now() >= limit {
            return met.len();
        }
        for stray in strays {
            if !met.contains(&(stray.id, stray.started)) {
                met.push((stray.id, stray.started));
            }
            stray.kill();
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Whether the environment that a process was started with names `folder` or a folder in it. That of other users' processes cannot be read.
fn is_marked(id: u32, folder: &Path) -> bool {
    let Ok(environment) = fs::read(format!("/proc/{id}/environ")) else { return false };
    carries_mark(&environment, folder)
}

fn carries_mark(environment: &[u8], folder: &Path) -> bool {
    environment
        .split(|byte| *byte == 0)
        .filter_map(|variable| variable.strip_prefix(MARK.as_bytes())?.strip_prefix(b"="))
        .any(|value| Path::new(OsStr::from_bytes(value)).starts_with(folder))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn process(id: u32, parent: u32) -> Process {
        Process { id, parent, session: 1, started: 0, ended: false }
    }

    #[test]
    fn descendants_are_found_whatever_the_order_of_their_ids() {
        let processes = [process(1, 0), process(50, 9), process(9, 100), process(100, 1), process(7, 50), process(200, 1)];
        let mut found: Vec<u32> = descendants(&processes, 100).iter().map(|process| process.id).collect();
        found.sort_unstable();
        assert_eq!(found, [7, 9, 50]);
        // Reused ids may close a circle in a list that was read while processes came and went.
        assert_eq!(descendants(&[process(2, 3), process(3, 2)], 2).len(), 2);
    }

    #[test]
    fn this_process_is_read_and_damaged_lines_are_not() {
        let this = Process::read(std::process::id()).unwrap();
        assert_eq!(i32::try_from(this.parent).ok(), rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()));
        assert!(all().contains(&this));
        let line = b"7 (a) b) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0\n";
        assert_eq!(parse(7, line), Some(Process { id: 7, parent: 1, session: 7, started: 99, ended: false }));
        for length in 0..40 {
            assert_eq!(parse(7, &line[..length]), None);
        }
    }

    #[test]
    fn a_mark_names_a_folder_and_those_below_it() {
        let folder = Path::new("/results/run");
        for (environment, marked) in [
            (&b"A=1\0SWEEP_ATTEMPT=/results/run/trials/x/attempt-1\0B=2\0"[..], true),
            (b"SWEEP_ATTEMPT=/results/run", true),
            (b"SWEEP_ATTEMPT=/results/run-2/trials", false),
            (b"XSWEEP_ATTEMPT=/results/run\0SWEEP_ATTEMPTX=/results/run", false),
            (b"", false),
        ] {
            assert_eq!(carries_mark(environment, folder), marked, "{}", String::from_utf8_lossy(environment));
        }
    }

    #[test]
    fn marked_processes_and_those_of_a_session_are_ended_and_no_others() {
        let world = tempfile::tempdir().unwrap();
        let sleep = |mark: &Path| {
            let mut command = Command::new("sleep");
            command.arg("300").env(MARK, mark).stdin(Stdio::null()).spawn().unwrap()
        };
        let mut marked = sleep(&world.path().join("attempt-1"));
        let mut other = sleep(&world.path().with_extension("other"));
        assert_eq!(kill_marked(world.path(), None), 1);
        marked.wait().unwrap();
        assert_eq!(other.try_wait().unwrap(), None);
        assert_eq!(kill_marked(world.path(), None), 0);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
