//! What a stalled trial's threads are doing, as far as the kernel says: text for people.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use super::processes;

/// Processes and threads beyond these are counted and not shown.
const MOST_PROCESSES: usize = 64;
const MOST_THREADS: usize = 256;

/// Every thread of `process`, of its session and of its descendants: name, state, what it waits for, and its kernel stack where this user may see it.
pub(super) fn of_family(process: u32) -> String {
    let all = processes::all();
    let mut family: Vec<u32> = all.iter().filter(|other| other.id == process || other.session == process).map(|other| other.id).collect();
    family.extend(processes::descendants(&all, process).iter().map(|other| other.id));
    family.sort_unstable();
    family.dedup();
    let mut text = String::new();
    for id in family.iter().take(MOST_PROCESSES) {
        describe(&mut text, &Path::new("/proc").join(id.to_string()), *id);
    }
    if family.len() > MOST_PROCESSES {
        let _ = writeln!(text, "\n... and {} more processes", family.len() - MOST_PROCESSES);
    }
    text
}

fn describe(text: &mut String, folder: &Path, id: u32) {
    let arguments = fs::read(folder.join("cmdline")).unwrap_or_default();
    let arguments: Vec<String> =
        arguments.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).escape_debug().to_string()).collect();
    let _ = writeln!(text, "\nprocess {id}: {}", arguments.join(" ").trim_end());
    let Ok(entries) = fs::read_dir(folder.join("task")) else { return };
    let mut threads: Vec<u32> = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    threads.sort_unstable();
    for thread in threads.iter().take(MOST_THREADS) {
        describe_thread(text, &folder.join("task").join(thread.to_string()), *thread);
    }
    if threads.len() > MOST_THREADS {
        let _ = writeln!(text, "  ... and {} more threads", threads.len() - MOST_THREADS);
    }
}

fn describe_thread(text: &mut String, folder: &Path, id: u32) {
    let read =
        |name: &str| fs::read_to_string(folder.join(name)).ok().map(|contents| contents.trim().to_owned()).filter(|contents| !contents.is_empty());
    let status = read("status").unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).unwrap_or("unknown");
    let name = read("comm").unwrap_or_default();
    let _ = write!(text, "  thread {id} ({}): {}", name.escape_debug(), field("State:"));
    // `0` is the kernel's word for nothing.
    if let Some(function) = read("wchan").filter(|function| function != "0") {
        let _ = write!(text, ", waits in {function}");
    }
    if let Some(call) = read("syscall") {
        let _ = write!(text, ", system call {call}");
    }
    let _ = writeln!(text, ", switches {} + {}", field("voluntary_ctxt_switches:"), field("nonvoluntary_ctxt_switches:"));
    for frame in read("stack").unwrap_or_default().lines() {
        let _ = writeln!(text, "    {frame}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_is_named_with_its_state() {
        let (ready, wait) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let waiting = move || {
            ready.send(()).unwrap();
            ended.recv().unwrap_err();
        };
        let thread = std::thread::Builder::new().name("rank 3".to_owned()).spawn(waiting).unwrap();
        wait.recv().unwrap();
        let text = of_family(std::process::id());
        drop(end);
        thread.join().unwrap();
        assert!(text.contains(&format!("process {}: ", std::process::id())), "{text}");
        let rank = text.lines().find(|line| line.contains("(rank 3): ")).unwrap();
        assert!(rank.contains("S (sleeping)") || rank.contains("R (running)"), "{rank}");
    }

    #[test]
    fn a_process_that_is_gone_says_nothing() {
        assert_eq!(of_family(u32::MAX), "");
    }
}
