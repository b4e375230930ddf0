//! How trials end and what is kept of them, where that takes a real disk, a real out-of-memory killer, or real logs.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::json;
use sweep::store::RunState;
use sweep::trial::{TrialId, TrialOutcome};

use crate::world::{Ended, World, newest_of, trainings};

/// Says why a test cannot run here; the rest of its file does.
fn skip(why: &str) {
    // A test may not print by the standard macros, which the lints keep for `ui`.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// A small disk of its own, unmounted when it goes.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None` where this user may not mount.
    fn mount(folder: &Path, size: &str) -> Option<Self> {
        fs::create_dir_all(folder).unwrap();
        let options = format!("size={size}");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(folder).stderr(Stdio::null()).status();
        mount.is_ok_and(|status| status.success()).then(|| Self(folder.to_owned()))
    }

    fn resize(&self, size: &str) {
        let options = format!("remount,size={size}");
        assert!(Command::new("mount").args(["-o", &options]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Case 7 on a real disk that is really full: the run stops as infrastructure and names the path; what is there is intact, and with room it goes on.
#[test]
fn a_full_disk_loses_nothing_that_was_finished() {
    let mut world = World::new(&trainings(3));
    let Some(disk) = SmallDisk::mount(&world.path("disk"), "1m") else { return skip("no small disk can be mounted") };
    world.behave(&json!([{"when": {"label": "t2", "attempts_up_to": 1}, "do": {"flood_stderr": 16 << 20}}]));
    let ended = world.run(&["--results", "disk"]).with_code(75);
    assert!(ended.stderr.contains("disk/trainings/") && ended.stderr.contains("No space left on device"), "{}", ended.stderr);
    let run = newest_of(&world.path("disk"));
    let state = RunState::read(&run).unwrap();
    assert_eq!((state.unreadable_events, state.unreadable_trials), (vec![], vec![]));
    let done = state.trials.values().filter(|trial| trial.outcome() == Some(&TrialOutcome::Done)).count();
    assert_eq!((done, world.begun().len()), (1, 2), "nothing is started on a full disk");

    // Still full: nothing is begun that could not be recorded.
    let begun = world.begun().len();
    let ended = world.run(&["--results", "disk"]).with_code(75);
    assert!(ended.stderr.contains("disk/trainings"), "{}", ended.stderr);
    disk.resize("64m");
    world.run(&["--results", "disk"]).with_code(0);
    assert!(world.begun().len() <= begun + 3);
    let state = RunState::read(&newest_of(&world.path("disk"))).unwrap();
    assert!(state.trials.values().all(|trial| trial.outcome() == Some(&TrialOutcome::Done)));
    let first: Vec<_> = world.log().into_iter().filter(|line| line[0] == "begin" && line[4] == "1").map(|line| line[1].clone()).collect();
    assert_eq!(first.iter().filter(|id| **id == first[0]).count(), 1, "what was done is not run again");
    assert_eq!(newest_of(&world.path("disk")), run, "the same run went on");
}

/// A memory control group of version 1 or 2, removed when it goes.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// `None` where this user may make none.
    fn make(bytes: u64) -> Option<Self> {
        let name = format!("sweep-test-{}", std::process::id());
        for (root, limit) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")] {
            let folder = Path::new(root).join(&name);
            if Path::new(root).join("cgroup.procs").exists() && fs::create_dir(&folder).is_ok() {
                let group = Self(folder);
                if fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        None
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Case 16 with the kernel's own out-of-memory killer, beside a trial that somebody kills.
#[test]
fn the_kernels_out_of_memory_killer_is_told_from_others() {
    let Some(group) = MemoryGroup::make(256 << 20) else { return skip("no memory control group can be made") };
    let mut world = World::new(&trainings(3));
    world.behave(&json!([{"when": {"label": "t1"}, "do": {"eat_memory": true}}, {"when": {"label": "t2"}, "do": {"signal": 9}}]));
    let run = world.command(&["run", "sweep.toml"]);
    let mut grouped = Command::new("sh");
    let script = format!("echo $$ > {}/cgroup.procs && exec \"$0\" run sweep.toml", group.0.display());
    grouped.args(["-c", &script]).arg(run.get_program()).current_dir(world.path("")).env_clear().stdin(Stdio::null());
    grouped.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let ended = Ended::of(grouped.output().unwrap());
    if ended.stderr.contains("cgroup.procs") {
        return skip("this process may not join a control group");
    }
    let ended = ended.with_code(100);
    let outcomes: Vec<TrialOutcome> = world.outcomes().into_iter().map(|trial| trial.3).collect();
    let killer = TrialOutcome::OutOfHostMemory { reason: "ended by the kernel's out-of-memory killer".to_owned() };
    assert_eq!(outcomes, [killer, TrialOutcome::Crashed { code: None, signal: Some(9) }, TrialOutcome::Done], "{}", ended.stderr);
}

/// Case 17: another runner's words for out of memory, in a log that ends with something else; and the same words in a trial that ends well.
#[test]
fn another_runners_out_of_memory_is_known_by_its_words() {
    let mut world = World::new(&trainings(3));
    let words = |text: &str| format!("step 1\n{text}\n{}", "  File \"train.py\", line 7\n".repeat(60));
    world.behave(&json!([
        {"when": {"label": "t1"}, "do": {"stderr": words("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."), "exit": 1}},
        {"when": {"label": "t2"}, "do": {"stderr": words("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), "exit": 1}},
        {"when": {"label": "t3"}, "do": {"stderr": words("CUDA out of memory, trying a smaller cache")}},
    ]));
    world.run(&[]).with_code(100);
    let outcomes: Vec<TrialOutcome> = world.outcomes().into_iter().map(|trial| trial.3).collect();
    let reason = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.".to_owned();
    assert_eq!(outcomes, [TrialOutcome::OutOfDeviceMemory { details: None }, TrialOutcome::OutOfHostMemory { reason }, TrialOutcome::Done]);
}

/// Case 18: four ranks write lines of 64 KiB at once, with progress bars, no final newline, bytes that are no UTF-8, and NUL. Every line is whole and says
/// whose it is, and what is shown of it is text.
#[test]
fn four_ranks_that_write_at_once_keep_every_line() {
    let mut world = World::new(&trainings(1));
    world.behave(&json!([{"do": {"ranks_write": 4, "exit": 3}}]));
    let ended = world.run(&[]).with_code(100);
    let id = TrialId(world.log()[0][1].clone());
    let log = fs::read(world.newest().attempt(&id, 1).stderr()).unwrap();
    let mut lines: Vec<&[u8]> = log.split(|byte| *byte == b'\n').collect();
    assert_eq!(lines.pop(), Some(&b"no newline at the end \xff\0"[..]));
    let mut next = [0; 4];
    for line in lines {
        let rank = usize::from(line[b"rank ".len()] - b'0');
        let mut expected = format!("rank {rank} line {}\r 10%\r\0\u{1b}[31m", next[rank]).into_bytes();
        expected.push(0xff);
        expected.resize((64 << 10) - 1, b'a' + rank as u8);
        assert!(line == expected, "line {} of rank {rank} is not whole", next[rank]);
        next[rank] += 1;
    }
    assert_eq!(next, [40; 4]);
    for text in [&ended.stdout, &ended.stderr] {
        assert!(!text.chars().any(|character| character.is_control() && character != '\n'), "control characters reach the terminal");
        assert!(text.len() < 100_000, "{} bytes are shown", text.len());
    }
    assert!(ended.stdout.contains("no newline at the end \u{fffd}"), "{}", ended.stdout);
    let page = fs::read_to_string(world.newest().report().join("report.md")).unwrap();
    assert!(
        page.contains("no newline at the end \u{fffd}") && !page.contains('\0') && !page.contains('\u{1b}'),
        "control characters reach the report"
    );
    let page = fs::read_to_string(world.newest().report().join("report.html")).unwrap();
    assert!(!page.contains('\0') && !page.contains('\u{1b}'), "control characters reach the page");
}
