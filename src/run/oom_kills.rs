//! Which trials the kernel's out-of-memory killer ended.
//!
//! The kernel counts its victims and names them to nobody here, so the count is read again and again, and each kill is put down to the first trial that ends by
//! SIGKILL soon afterwards without us having sent it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a victim may take to end: gigabytes are not freed at once.
const MEMORY_OF_KILLS: Duration = Duration::from_secs(30);

/// Kills that no trial has been charged with yet.
#[derive(Debug)]
pub(super) struct OomKills {
    counters: Vec<PathBuf>,
    ledger: Mutex<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    counted: Option<u64>,
    unclaimed: Vec<Instant>,
}

impl Ledger {
    fn take_note(&mut self, count: Option<u64>, now: Instant) {
        if let (Some(count), Some(counted)) = (count, self.counted) {
            for _ in counted..count {
                self.unclaimed.push(now);
            }
        }
        self.counted = count.or(self.counted);
        self.unclaimed.retain(|noticed| now.duration_since(*noticed) < MEMORY_OF_KILLS);
    }

    fn claim(&mut self) -> bool {
        let any = !self.unclaimed.is_empty();
        if any {
            self.unclaimed.remove(0);
        }
        any
    }
}

impl OomKills {
    /// Counts kills in this process's memory control group, of either version, or on the whole machine where neither can be read.
    pub(super) fn of_this_process() -> Self {
        Self::reading(Path::new("/"))
    }

    fn reading(root: &Path) -> Self {
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let mut counters = Vec::new();
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
            let path = path.trim_start_matches('/');
            if controllers.split(',').any(|controller| controller == "memory") {
                counters.push(root.join("sys/fs/cgroup/memory").join(path).join("memory.oom_control"));
            } else if controllers.is_empty() {
                counters.push(root.join("sys/fs/cgroup").join(path).join("memory.events"));
            }
        }
        counters.push(root.join("proc/vmstat"));
        let kills = Self { counters, ledger: Mutex::default() };
        kills.take_note();
        kills
    }

    /// The first counter that can be read.
    fn count(&self) -> Option<u64> {
        self.counters.iter().find_map(|path| {
            let text = fs::read_to_string(path).ok()?;
            text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        })
    }

    /// Looks whether the killer has struck. To be called often while trials run.
    pub(super) fn take_note(&self) {
        let count = self.count();
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner).take_note(count, Instant::now());
    }

    /// Whether a kill can be put down to a trial that has just ended by SIGKILL; each kill answers once.
    pub(super) fn claim(&self) -> bool {
        self.take_note();
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner).claim()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Case 16, with several trials at once.
    #[test]
    fn each_kill_is_put_down_to_one_trial_and_not_for_ever() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut ledger = Ledger::default();
        ledger.take_note(Some(7), at(0));
        assert!(!ledger.claim(), "what was killed before is no trial of ours");
        ledger.take_note(Some(9), at(1));
        assert_eq!([ledger.claim(), ledger.claim(), ledger.claim()], [true, true, false]);
        ledger.take_note(Some(10), at(2));
        ledger.take_note(None, at(3));
        ledger.take_note(Some(10), at(40));
        assert!(!ledger.claim(), "its victim was something else");
    }

    #[test]
    fn the_count_of_the_nearest_group_is_read() {
        let machine = |files: &[(&str, &str)]| {
            let root = tempfile::tempdir().unwrap();
            for (path, contents) in files {
                let path = root.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, contents).unwrap();
            }
            OomKills::reading(root.path()).count()
        };
        let vmstat = ("proc/vmstat", "nr_free_pages 1\noom_kill 5\n");
        let version_1 = ("sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
        let version_2 = ("sys/fs/cgroup/a/b/memory.events", "low 0\noom 2\noom_kill 2\n");
        assert_eq!(machine(&[]), None);
        assert_eq!(machine(&[vmstat]), Some(5));
        assert_eq!(machine(&[vmstat, version_1, ("proc/self/cgroup", "4:cpu:/x\n3:hugetlb,memory:/job\n0::/\n")]), Some(3));
        assert_eq!(machine(&[vmstat, version_2, ("proc/self/cgroup", "0::/a/b\n")]), Some(2));
        assert!(OomKills::of_this_process().count().is_some(), "this kernel counts");
    }
}
