//! Cores and memory that running trials hold: which trial may start beside those that run.

use std::collections::BTreeMap;

use crate::trial::TrialId;

/// What the machine has to give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Processor cores this process may use, by their numbers.
    pub cores: Vec<usize>,
    /// Memory of the host in bytes.
    pub memory_bytes: u64,
}

impl Machine {
    /// This machine with `memory_bytes`, and whether the numbers of its cores mean anything: a quota of processor time names none.
    pub fn of_this_process(memory_bytes: u64) -> (Self, bool) {
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        let cores: Vec<usize> = match rustix::thread::sched_getaffinity(None) {
            Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect(),
            Err(_) => Vec::new(),
        };
        let named = cores.len() == usable;
        let cores = if named { cores } else { (0..usable).collect() };
        (Self { cores, memory_bytes }, named)
    }
}

/// What is lent to whom. Each trial gets an equal share of the cores, so that times of one run can be compared, and no core is lent twice.
#[derive(Clone, Debug)]
pub(super) struct Leases {
    /// Cores of each slot.
    slots: Vec<Vec<usize>>,
    /// Trials at a time where another shares out the machines they run on: then no core and no memory of this one is lent.
    elsewhere: Option<usize>,
    memory_bytes: u64,
    held: BTreeMap<TrialId, Lease>,
}

#[derive(Clone, Debug)]
struct Lease {
    slot: usize,
    memory_bytes: u64,
}

impl Leases {
    /// Divides `machine` among at most `jobs` trials. Fewer where there are fewer cores: two trials never share one.
    pub(super) fn new(machine: &Machine, jobs: usize) -> Self {
        let jobs = jobs.clamp(1, machine.cores.len().max(1));
        let share = machine.cores.len() / jobs;
        let slots = (0..jobs).map(|job| machine.cores[job * share..(job + 1) * share].to_vec()).collect();
        Self { slots, elsewhere: None, memory_bytes: machine.memory_bytes, held: BTreeMap::new() }
    }

    /// For trials that run elsewhere, at most `jobs` at a time.
    pub(super) fn elsewhere(jobs: usize) -> Self {
        Self { slots: Vec::new(), elsewhere: Some(jobs.max(1)), memory_bytes: 0, held: BTreeMap::new() }
    }

    /// Trials at a time.
    pub(super) fn jobs(&self) -> usize {
        self.elsewhere.unwrap_or(self.slots.len())
    }

    /// Lends cores and `memory_bytes` to `trial` and returns the cores; `None` where that must wait for another trial's end. What is larger than the host
    /// runs alone.
    pub(super) fn take(&mut self, trial: &TrialId, memory_bytes: u64) -> Option<Vec<usize>> {
        if let Some(jobs) = self.elsewhere {
            return (self.held.len() < jobs).then(|| {
                self.held.insert(trial.clone(), Lease { slot: 0, memory_bytes: 0 });
                Vec::new()
            });
        }
        let slot = (0..self.slots.len()).find(|slot| self.held.values().all(|lease| lease.slot != *slot))?;
        let in_use: u64 = self.held.values().map(|lease| lease.memory_bytes).sum();
        if !self.held.is_empty() && in_use.saturating_add(memory_bytes) > self.memory_bytes {
            return None;
        }
        self.held.insert(trial.clone(), Lease { slot, memory_bytes });
        Some(self.slots[slot].clone())
    }

    /// Takes back what `trial` holds.
    pub(super) fn give_back(&mut self, trial: &TrialId) {
        self.held.remove(trial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> TrialId {
        TrialId(name.to_owned())
    }

    #[test]
    fn cores_are_disjoint_and_come_back() {
        let machine = Machine { cores: vec![0, 1, 4, 5, 6], memory_bytes: 100 };
        let mut leases = Leases::new(&machine, 2);
        assert_eq!(leases.take(&id("a"), 10), Some(vec![0, 1]));
        assert_eq!(leases.take(&id("b"), 10), Some(vec![4, 5]));
        assert_eq!(leases.take(&id("c"), 10), None);
        leases.give_back(&id("a"));
        assert_eq!(leases.take(&id("c"), 10), Some(vec![0, 1]));
    }

    #[test]
    fn one_trial_gets_all_and_more_jobs_than_cores_are_cut() {
        let machine = Machine { cores: vec![0, 1], memory_bytes: 100 };
        assert_eq!(Leases::new(&machine, 1).take(&id("a"), 0), Some(vec![0, 1]));
        assert_eq!(Leases::new(&machine, 8).jobs(), 2);
    }

    #[test]
    fn elsewhere_only_the_number_counts() {
        let mut leases = Leases::elsewhere(2);
        assert_eq!(leases.take(&id("a"), u64::MAX), Some(vec![]));
        assert_eq!(leases.take(&id("b"), u64::MAX), Some(vec![]));
        assert_eq!(leases.take(&id("c"), 0), None);
        leases.give_back(&id("a"));
        assert_eq!(leases.take(&id("c"), 0), Some(vec![]));
    }

    #[test]
    fn memory_of_running_trials_fits_the_host() {
        let machine = Machine { cores: vec![0, 1, 2], memory_bytes: 100 };
        let mut leases = Leases::new(&machine, 3);
        assert!(leases.take(&id("a"), 60).is_some());
        assert!(leases.take(&id("b"), 60).is_none());
        assert!(leases.take(&id("c"), 40).is_some());
        leases.give_back(&id("a"));
        leases.give_back(&id("c"));
        assert!(leases.take(&id("alone"), 1000).is_some());
    }
}
