//! Processor use and resident memory of a child and everything it started, from `/proc`.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Reasons, Sample, Sampler};

/// Samples after which processes outside the tree are looked at again: one of their ids may by then name a new process of the tree.
const STRANGERS_KEPT_FOR: u32 = 50;

/// Samples the tree below one process: its descendants and its session, also where they were orphaned in between.
///
/// Resident memory is summed over processes, so pages they share count once each.
#[derive(Debug)]
pub struct ProcessTreeSampler {
    proc: PathBuf,
    root: u32,
    units: Units,
    /// Processes of the tree at the last sample.
    members: HashMap<u32, Process>,
    /// Processes outside the tree: not read again, which makes a sample cheap on a busy machine.
    strangers: HashSet<u32>,
    samples: u32,
    previous: Option<Duration>,
    reasons: Reasons,
}

/// What the kernel counts in.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Units {
    ticks_per_second: f64,
    page_bytes: u64,
}

/// The fields of `/proc/<pid>/stat` that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    parent: u32,
    session: u32,
    /// Ticks it computed itself.
    own_ticks: u64,
    /// Ticks of its ended children that it waited for.
    waited_ticks: u64,
    /// Ticks since boot when it started; with the id it names a process for good.
    started: u64,
    resident_pages: u64,
}

impl ProcessTreeSampler {
    /// A sampler of the tree below process `root`.
    pub fn new(root: u32) -> Self {
        Self::reading(Path::new("/proc"), root, Units::of_this_kernel())
    }

    fn reading(proc: &Path, root: u32, units: Units) -> Self {
        Self {
            proc: proc.to_owned(),
            root,
            units,
            members: HashMap::new(),
            strangers: HashSet::new(),
            samples: 0,
            previous: None,
            reasons: Reasons::default(),
        }
    }

    /// Reads the processes of the tree as they are now.
    fn tree(&mut self) -> std::io::Result<HashMap<u32, Process>> {
        let listed: HashSet<u32> = fs::read_dir(&self.proc)?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        if self.samples.is_multiple_of(STRANGERS_KEPT_FOR) {
            self.strangers.clear();
        }
        self.samples = self.samples.wrapping_add(1);
        self.strangers.retain(|pid| listed.contains(pid));
        // A process that ends between listing and reading is simply not there.
        let mut candidates: HashMap<u32, Process> = listed
            .difference(&self.strangers)
            .filter_map(|pid| Some((*pid, parse_stat(&fs::read(self.proc.join(pid.to_string()).join("stat")).ok()?)?)))
            .collect();
        let known = |pid: &u32, process: &Process| match self.members.get(pid) {
            Some(member) => member.started == process.started,
            None => self.samples == 1 && *pid == self.root,
        };
        let mut tree: HashMap<u32, Process> = candidates.extract_if(|pid, process| known(pid, process)).collect();
        // Ids wrap around, so a child may come before its parent: look again until nothing new is found.
        loop {
            let found: Vec<(u32, Process)> =
                candidates.extract_if(|_, process| process.session == self.root || tree.contains_key(&process.parent)).collect();
            if found.is_empty() {
                break;
            }
            tree.extend(found);
        }
        self.strangers.extend(candidates.into_keys());
        Ok(tree)
    }
}

impl Sampler for ProcessTreeSampler {
    fn sample(&mut self, elapsed: Duration) -> Vec<Sample> {
        let mut sample = Sample { source: "host".to_owned(), ..Sample::default() };
        match self.tree() {
            Ok(tree) => {
                if !tree.is_empty() {
                    sample.memory_bytes = Some(tree.values().map(|process| process.resident_pages.saturating_mul(self.units.page_bytes)).sum());
                    let seconds = self.previous.map_or(0.0, |previous| elapsed.saturating_sub(previous).as_secs_f64());
                    if seconds > 0.0 {
                        sample.utilization_percent = Some(100.0 * ticks_between(&self.members, &tree) as f64 / self.units.ticks_per_second / seconds);
                    }
                    self.previous = Some(elapsed);
                }
                self.members = tree;
            }
            Err(error) => {
                self.reasons.add(format!("processor use and memory of the child are missing: cannot list {}: {error}.", self.proc.display()));
            }
        }
        vec![sample]
    }

    fn take_reasons(&mut self) -> Vec<String> {
        self.reasons.take()
    }
}

/// Ticks the tree computed between two samples.
///
/// The time of a child that ended moves into its parent's `waited_ticks`, so the total over the tree goes on growing while processes come and go. Where a
/// child ended that nobody in the tree waited for, its time drops out of the total; what the survivors computed is then the least there was.
fn ticks_between(before: &HashMap<u32, Process>, now: &HashMap<u32, Process>) -> u64 {
    let total = |tree: &HashMap<u32, Process>| -> u64 { tree.values().map(|process| process.own_ticks.saturating_add(process.waited_ticks)).sum() };
    let own = now.iter().map(|(pid, process)| match before.get(pid) {
        Some(earlier) if earlier.started == process.started => process.own_ticks.saturating_sub(earlier.own_ticks),
        _ => process.own_ticks,
    });
    total(now).saturating_sub(total(before)).max(own.sum())
}

/// Parses `/proc/<pid>/stat`. The second field is the program's name in parentheses and may hold anything, spaces and parentheses too; the last `)` ends it.
fn parse_stat(stat: &[u8]) -> Option<Process> {
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields: Vec<&str> = std::str::from_utf8(stat.get(after_name..)?).ok()?.split_ascii_whitespace().collect();
    // Numbered from 1 as in proc(5); the first field after the name is the third.
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some(Process {
        parent: u32::try_from(field(4)?).ok()?,
        // Negative for kernel threads of some systems: then it is no session of ours.
        session: field(6).and_then(|session| u32::try_from(session).ok()).unwrap_or(0),
        own_ticks: field(14)?.saturating_add(field(15)?),
        waited_ticks: field(16).unwrap_or(0).saturating_add(field(17).unwrap_or(0)),
        started: field(22)?,
        resident_pages: field(24).unwrap_or(0),
    })
}

impl Units {
    /// From the auxiliary vector that the kernel hands every program.
    fn of_this_kernel() -> Self {
        Self::from_auxiliary_vector(&fs::read("/proc/self/auxv").unwrap_or_default())
    }

    fn from_auxiliary_vector(vector: &[u8]) -> Self {
        const AT_PAGESZ: usize = 6;
        const AT_CLKTCK: usize = 17;
        const WORD: usize = size_of::<usize>();
        let words: Vec<usize> = vector.chunks_exact(WORD).filter_map(|word| Some(usize::from_ne_bytes(word.try_into().ok()?))).collect();
        let entry = |key: usize| words.chunks_exact(2).find(|pair| pair[0] == key && pair[1] > 0).map(|pair| pair[1]);
        Self { ticks_per_second: entry(AT_CLKTCK).unwrap_or(100) as f64, page_bytes: entry(AT_PAGESZ).unwrap_or(4096) as u64 }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::Command;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::{Process, ProcessTreeSampler, Sampler, Units, parse_stat};

    const UNITS: Units = Units { ticks_per_second: 100.0, page_bytes: 4096 };

    /// Writes a process into a fake `/proc`.
    fn put(proc: &Path, pid: u32, process: Process) {
        let folder = proc.join(pid.to_string());
        fs::create_dir_all(&folder).expect("created");
        fs::write(folder.join("stat"), stat(pid, "a (b) c", process)).expect("written");
    }

    fn stat(pid: u32, name: &str, process: Process) -> String {
        let Process { parent, session, own_ticks, waited_ticks, started, resident_pages } = process;
        format!(
            "{pid} ({name}) S {parent} {pid} {session} 0 -1 0 0 0 0 0 {own_ticks} 0 {waited_ticks} 0 20 0 1 0 {started} 9999 {resident_pages} 0\n"
        )
    }

    fn process(parent: u32, session: u32, own_ticks: u64) -> Process {
        Process { parent, session, own_ticks, waited_ticks: 0, started: 7, resident_pages: 10 }
    }

    /// One sample: percent of a core, and resident pages.
    fn sample(sampler: &mut ProcessTreeSampler, milliseconds: u64) -> (Option<f64>, Option<u64>) {
        let samples = sampler.sample(Duration::from_millis(milliseconds));
        assert_eq!(samples.len(), 1);
        assert_eq!(samples[0].source, "host");
        (samples[0].utilization_percent, samples[0].memory_bytes.map(|bytes| bytes / 4096))
    }

    #[test]
    fn the_whole_tree_is_counted_and_nothing_else() {
        let world = tempfile::tempdir().expect("temporary folder");
        let proc = world.path();
        put(proc, 1, process(0, 1, 90_000));
        put(proc, 100, process(1, 100, 50));
        put(proc, 90, process(100, 100, 10)); // A child with a smaller id than its parent's.
        put(proc, 91, process(90, 91, 10)); // A grandchild in a session of its own.
        put(proc, 120, process(1, 100, 10)); // Orphaned, but of the session.
        put(proc, 130, process(1, 130, 1000)); // Somebody else's.
        fs::create_dir(proc.join("sys")).expect("created");
        let mut sampler = ProcessTreeSampler::reading(proc, 100, UNITS);
        assert_eq!(sample(&mut sampler, 0), (None, Some(40)), "no use before there is something to compare with");
        put(proc, 1, process(0, 1, 99_000));
        put(proc, 100, process(1, 100, 70));
        put(proc, 91, process(1, 91, 30)); // Orphaned meanwhile, and still ours.
        put(proc, 130, process(1, 130, 2000));
        put(proc, 140, process(91, 140, 5)); // Started in between.
        assert_eq!(sample(&mut sampler, 500), (Some(90.0), Some(50)));
        assert_eq!(sample(&mut sampler, 500), (None, Some(50)), "no time has passed");
        assert_eq!(sample(&mut sampler, 1000), (Some(0.0), Some(50)));
        assert_eq!(sampler.take_reasons(), Vec::<String>::new());
    }

    /// CASES 27: what ends takes its own time with it, never makes use negative, and a new process with an old id is a stranger.
    #[test]
    fn processes_that_end_are_counted_once() {
        let world = tempfile::tempdir().expect("temporary folder");
        let proc = world.path();
        put(proc, 100, process(1, 100, 100));
        put(proc, 101, process(100, 100, 400));
        put(proc, 102, process(100, 100, 300));
        let mut sampler = ProcessTreeSampler::reading(proc, 100, UNITS);
        sample(&mut sampler, 0);
        // 101 computed 20 more and ended, and its parent waited for it.
        fs::remove_dir_all(proc.join("101")).expect("removed");
        put(proc, 100, Process { waited_ticks: 420, ..process(1, 100, 110) });
        assert_eq!(sample(&mut sampler, 1000), (Some(30.0), Some(20)));
        // 102 ended and nobody waited for it.
        fs::remove_dir_all(proc.join("102")).expect("removed");
        put(proc, 100, Process { waited_ticks: 420, ..process(1, 100, 150) });
        assert_eq!(sample(&mut sampler, 2000), (Some(40.0), Some(10)));
        // The child ended; another program got its id.
        put(proc, 100, Process { started: 99, ..process(1, 1, 5000) });
        assert_eq!(sample(&mut sampler, 3000), (None, None));
        fs::remove_dir_all(proc.join("100")).expect("removed");
        assert_eq!(sample(&mut sampler, 4000), (None, None));
    }

    #[test]
    fn an_id_taken_over_from_a_stranger_is_noticed() {
        let world = tempfile::tempdir().expect("temporary folder");
        let proc = world.path();
        put(proc, 100, process(1, 100, 0));
        put(proc, 200, process(1, 200, 0));
        let mut sampler = ProcessTreeSampler::reading(proc, 100, UNITS);
        sample(&mut sampler, 0);
        put(proc, 200, process(100, 100, 0));
        let noticed = (1..=super::STRANGERS_KEPT_FOR).any(|index| sample(&mut sampler, u64::from(index)).1 == Some(20));
        assert!(noticed);
    }

    #[test]
    fn without_proc_the_reason_is_given_once() {
        let mut sampler = ProcessTreeSampler::reading(Path::new("/nowhere"), 1, UNITS);
        assert_eq!(sample(&mut sampler, 0), (None, None));
        assert_eq!(
            sampler.take_reasons(),
            ["processor use and memory of the child are missing: cannot list /nowhere: No such file or directory (os error 2)."]
        );
        sample(&mut sampler, 1);
        assert_eq!(sampler.take_reasons(), Vec::<String>::new());
    }

    /// A real process: this one, and a real child of it.
    #[test]
    fn real_processes_are_read() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep starts");
        let mut of_child = ProcessTreeSampler::new(child.id());
        let mut of_parent = ProcessTreeSampler::new(std::process::id());
        // Between fork and exec a child has no memory of its own.
        let resident = (0..100_000).find_map(|_| {
            std::thread::yield_now();
            of_child.sample(Duration::ZERO)[0].memory_bytes.filter(|bytes| *bytes > 0)
        });
        let child_bytes = resident.unwrap_or(0);
        let tree_bytes = of_parent.sample(Duration::ZERO)[0].memory_bytes.expect("resident");
        child.kill().expect("killed");
        child.wait().expect("waited for");
        assert!(child_bytes > 0 && tree_bytes > child_bytes, "{child_bytes} of {tree_bytes}");
        assert_eq!(of_child.sample(Duration::from_secs(1))[0].memory_bytes, None, "it is gone");
    }

    #[test]
    fn the_auxiliary_vector_is_read_and_a_torn_one_is_not() {
        let vector: Vec<u8> = [6_usize, 65536, 17, 250, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(Units::from_auxiliary_vector(&vector), Units { ticks_per_second: 250.0, page_bytes: 65536 });
        assert_eq!(Units::from_auxiliary_vector(&vector[..7]), UNITS);
        assert!(Units::of_this_kernel().page_bytes >= 4096);
    }

    proptest! {
        #[test]
        fn any_program_name_is_skipped(name in any::<String>(), own_ticks in 0_u64..1 << 40) {
            let expected = process(3, 4, own_ticks);
            prop_assert_eq!(parse_stat(stat(5, &name, expected).as_bytes()), Some(expected));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in any::<Vec<u8>>()) {
            parse_stat(&bytes);
        }

        #[test]
        fn a_torn_line_is_no_process(cut in 0_usize..40) {
            let line = stat(5, "sh", process(3, 4, 0));
            prop_assert_eq!(parse_stat(&line.as_bytes()[..cut.min(line.len())]), None);
        }
    }
}
