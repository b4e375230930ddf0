//! Cores, memory and GPUs that running trials hold: which trial may start beside those that run.

use std::collections::{BTreeMap, BTreeSet};

use crate::trial::TrialId;

/// What the machine has to give.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Processor cores this process may use, by their numbers.
    pub cores: Vec<usize>,
    /// Memory of the host in bytes.
    pub memory_bytes: u64,
    /// GPUs this process may use, by their UUIDs.
    pub gpus: Vec<String>,
}

impl Machine {
    /// This machine with `memory_bytes` and `gpus`, and whether the numbers of its cores mean anything: a quota of processor time names none.
    pub fn of_this_process(memory_bytes: u64, gpus: Vec<String>) -> (Self, bool) {
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        let cores: Vec<usize> = match rustix::thread::sched_getaffinity(None) {
            Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect(),
            Err(_) => Vec::new(),
        };
        let named = cores.len() == usable;
        let mut cores = if named { cores } else { (0..usable).collect() };
        // Which of its cores a node gave is not said where it binds nobody to them: only their count is kept.
        let given = crate::place::cores_given(|name| std::env::var_os(name)).unwrap_or(usize::MAX);
        let named = named && given >= cores.len();
        cores.truncate(given);
        (Self { cores, memory_bytes, gpus }, named)
    }
}

/// What a trial needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// Memory of the host in bytes.
    pub(super) memory_bytes: u64,
    /// GPUs of its own.
    pub(super) gpus: usize,
}

/// What a trial is lent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Processor cores, by their numbers; all where none is named.
    pub cores: Vec<usize>,
    /// GPUs, by their UUIDs; none where the trial needs none.
    pub gpus: Vec<String>,
}

/// What is lent to whom. Each trial gets an equal share of the cores, so that times of one run can be compared, and no core and no GPU is lent twice.
#[derive(Clone, Debug)]
pub(super) struct Leases {
    /// Cores of each slot.
    slots: Vec<Vec<usize>>,
    /// Trials at a time where another shares out the machines they run on: then no core and no memory of this one is lent.
    elsewhere: Option<usize>,
    memory_bytes: u64,
    gpus: Vec<String>,
    /// GPUs that are lent no more.
    quarantined: BTreeSet<String>,
    held: BTreeMap<TrialId, Lease>,
}

#[derive(Clone, Debug)]
struct Lease {
    slot: usize,
    memory_bytes: u64,
    gpus: Vec<String>,
}

impl Leases {
    /// Divides `machine` among at most `jobs` trials. Fewer where there are fewer cores: two trials never share one.
    pub(super) fn new(machine: &Machine, jobs: usize) -> Self {
        let jobs = jobs.clamp(1, machine.cores.len().max(1));
        let share = machine.cores.len() / jobs;
        let slots = (0..jobs).map(|job| machine.cores[job * share..(job + 1) * share].to_vec()).collect();
        let (memory_bytes, gpus) = (machine.memory_bytes, machine.gpus.clone());
        Self { slots, elsewhere: None, memory_bytes, gpus, quarantined: BTreeSet::new(), held: BTreeMap::new() }
    }

    /// For trials that run elsewhere, at most `jobs` at a time.
    pub(super) fn elsewhere(jobs: usize) -> Self {
        let (slots, gpus, quarantined) = (Vec::new(), Vec::new(), BTreeSet::new());
        Self { slots, elsewhere: Some(jobs.max(1)), memory_bytes: 0, gpus, quarantined, held: BTreeMap::new() }
    }

    /// Trials at a time.
    pub(super) fn jobs(&self) -> usize {
        self.elsewhere.unwrap_or(self.slots.len())
    }

    /// Lends `trial` what it needs; `None` where that must wait for another trial's end. A trial that needs more memory than the host has runs alone.
    pub(super) fn take(&mut self, trial: &TrialId, demand: Demand) -> Option<Place> {
        if let Some(jobs) = self.elsewhere {
            return (self.held.len() < jobs).then(|| {
                self.held.insert(trial.clone(), Lease { slot: 0, memory_bytes: 0, gpus: Vec::new() });
                Place::default()
            });
        }
        let slot = (0..self.slots.len()).find(|slot| self.held.values().all(|lease| lease.slot != *slot))?;
        let in_use: u64 = self.held.values().map(|lease| lease.memory_bytes).sum();
        if !self.held.is_empty() && in_use.saturating_add(demand.memory_bytes) > self.memory_bytes {
            return None;
        }
        let lent: BTreeSet<&String> = self.held.values().flat_map(|lease| &lease.gpus).collect();
        let free = self.healthy().filter(|gpu| !lent.contains(gpu));
        let gpus: Vec<String> = free.take(demand.gpus).cloned().collect();
        if gpus.len() < demand.gpus {
            return None;
        }
        self.held.insert(trial.clone(), Lease { slot, memory_bytes: demand.memory_bytes, gpus: gpus.clone() });
        Some(Place { cores: self.slots[slot].clone(), gpus })
    }

    /// Takes back what `trial` holds.
    pub(super) fn give_back(&mut self, trial: &TrialId) {
        self.held.remove(trial);
    }

    fn healthy(&self) -> impl Iterator<Item = &String> {
        self.gpus.iter().filter(|gpu| !self.quarantined.contains(*gpu))
    }

    /// Whether what is asked for can be lent once everything has come back.
    pub(super) fn could_ever_take(&self, demand: Demand) -> bool {
        self.elsewhere.is_some() || demand.gpus <= self.healthy_gpus()
    }

    /// How many GPUs are lent out at all.
    pub(super) fn healthy_gpus(&self) -> usize {
        self.healthy().count()
    }

    /// Lends a GPU to nobody any more; says whether it was lent before.
    pub(super) fn quarantine(&mut self, gpu: &str) -> bool {
        self.quarantined.insert(gpu.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> TrialId {
        TrialId(name.to_owned())
    }

    fn memory(memory_bytes: u64) -> Demand {
        Demand { memory_bytes, gpus: 0 }
    }

    fn gpus(gpus: usize) -> Demand {
        Demand { memory_bytes: 0, gpus }
    }

    #[test]
    fn cores_are_disjoint_and_come_back() {
        let machine = Machine { cores: vec![0, 1, 4, 5, 6], memory_bytes: 100, gpus: Vec::new() };
        let mut leases = Leases::new(&machine, 2);
        let take = |leases: &mut Leases, name: &str| leases.take(&id(name), memory(10)).map(|place| place.cores);
        assert_eq!(take(&mut leases, "a"), Some(vec![0, 1]));
        assert_eq!(take(&mut leases, "b"), Some(vec![4, 5]));
        assert_eq!(take(&mut leases, "c"), None);
        leases.give_back(&id("a"));
        assert_eq!(take(&mut leases, "c"), Some(vec![0, 1]));
    }

    #[test]
    fn one_trial_gets_all_and_more_jobs_than_cores_are_cut() {
        let machine = Machine { cores: vec![0, 1], memory_bytes: 100, gpus: Vec::new() };
        assert_eq!(Leases::new(&machine, 1).take(&id("a"), memory(0)), Some(Place { cores: vec![0, 1], gpus: Vec::new() }));
        assert_eq!(Leases::new(&machine, 8).jobs(), 2);
    }

    #[test]
    fn elsewhere_only_the_number_counts() {
        let mut leases = Leases::elsewhere(2);
        assert_eq!(leases.take(&id("a"), memory(u64::MAX)), Some(Place::default()));
        assert_eq!(leases.take(&id("b"), gpus(8)), Some(Place::default()));
        assert_eq!(leases.take(&id("c"), memory(0)), None);
        leases.give_back(&id("a"));
        assert_eq!(leases.take(&id("c"), memory(0)), Some(Place::default()));
        assert!(leases.could_ever_take(gpus(8)));
    }

    #[test]
    fn memory_of_running_trials_fits_the_host() {
        let machine = Machine { cores: vec![0, 1, 2], memory_bytes: 100, gpus: Vec::new() };
        let mut leases = Leases::new(&machine, 3);
        assert!(leases.take(&id("a"), memory(60)).is_some());
        assert!(leases.take(&id("b"), memory(60)).is_none());
        assert!(leases.take(&id("c"), memory(40)).is_some());
        leases.give_back(&id("a"));
        leases.give_back(&id("c"));
        assert!(leases.take(&id("alone"), memory(1000)).is_some());
    }

    #[test]
    fn trials_are_packed_on_disjoint_gpus_and_quarantined_ones_are_left_out() {
        let machine = Machine { cores: (0..8).collect(), memory_bytes: 100, gpus: ["a", "b", "c", "d"].map(str::to_owned).into() };
        let mut leases = Leases::new(&machine, 4);
        let take = |leases: &mut Leases, name: &str, count| leases.take(&id(name), gpus(count)).map(|place| place.gpus.join(" "));
        assert_eq!(take(&mut leases, "one", 2).as_deref(), Some("a b"));
        assert_eq!(take(&mut leases, "two", 1).as_deref(), Some("c"));
        assert_eq!(take(&mut leases, "three", 2), None, "two are not free");
        assert_eq!(take(&mut leases, "four", 1).as_deref(), Some("d"));
        assert_eq!(take(&mut leases, "on the processor", 0).as_deref(), Some(""));
        leases.give_back(&id("one"));
        assert!(leases.quarantine("a") && !leases.quarantine("a"));
        assert_eq!(leases.healthy_gpus(), 3);
        assert_eq!(take(&mut leases, "three", 2), None);
        assert_eq!(take(&mut leases, "five", 1).as_deref(), Some("b"));
    }
}
