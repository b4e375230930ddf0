//! What an allocation that `sweep` itself runs in has to give, as SLURM says it in the environment.

use std::ffi::OsString;
use std::path::Path;

use super::needs;
use crate::spec::slurm::SlurmSettings;

/// An allocation: trials run in it as steps, and nothing is submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// `SLURM_JOB_ID`
    pub job: String,
    /// Cores on each of its nodes.
    cpus_per_node: Vec<usize>,
    /// GPUs on each node, where SLURM says so.
    gpus_on_node: Option<usize>,
}

impl Allocation {
    /// The allocation this process runs in; `None` where it runs in none.
    pub fn of_this_process() -> Option<Self> {
        Self::from_environment(|name| std::env::var_os(name))
    }

    /// The allocation that `variable` tells of.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let text = |name: &str| variable(name)?.into_string().ok();
        let job = text("SLURM_JOB_ID").filter(|job| !job.is_empty())?;
        let nodes = text("SLURM_JOB_NUM_NODES").and_then(|nodes| nodes.parse().ok()).unwrap_or(1);
        let cpus_per_node = text("SLURM_JOB_CPUS_PER_NODE").and_then(|cpus| per_node(&cpus)).unwrap_or_else(|| vec![1; nodes]);
        Some(Self { job, cpus_per_node, gpus_on_node: text("SLURM_GPUS_ON_NODE").and_then(|gpus| gpus.parse().ok()) })
    }

    /// How many trials of `ranks` ranks it holds at a time; 0 where not even one fits.
    pub fn room(&self, settings: &SlurmSettings, ranks: usize, on_gpus: bool) -> usize {
        let needs = needs(settings, ranks, on_gpus);
        let by_gpus = match (self.gpus_on_node, needs.gpus_per_node) {
            (Some(there), Some(wanted)) => there / wanted.max(1),
            _ => usize::MAX,
        };
        let mut rooms: Vec<usize> = self.cpus_per_node.iter().map(|cpus| (cpus / needs.cpus_per_task.max(1)).min(by_gpus)).collect();
        if needs.nodes == 1 {
            return rooms.iter().sum();
        }
        // Several nodes for one trial: as many groups of nodes as have room.
        rooms.sort_unstable_by(|one, other| other.cmp(one));
        rooms.chunks_exact(needs.nodes).map(|group| group[needs.nodes - 1]).sum()
    }

    /// What stands before the program of a trial of `ranks` ranks: a step of its own, which shares with no other.
    pub fn step(&self, settings: &SlurmSettings, ranks: usize, on_gpus: bool, program: &Path) -> Vec<OsString> {
        let needs = needs(settings, ranks, on_gpus);
        let mut words: Vec<OsString> = ["srun", "--exact", "--kill-on-bad-exit=1", "--unbuffered"].map(OsString::from).to_vec();
        words.push(format!("--nodes={}", needs.nodes).into());
        words.push(format!("--ntasks={}", needs.nodes).into());
        words.push(format!("--cpus-per-task={}", needs.cpus_per_task).into());
        words.extend(needs.gpus_per_node.map(|gpus| format!("--gpus-per-node={gpus}").into()));
        words.extend(settings.mem.map(|bytes| format!("--mem={}M", bytes.div_ceil(1 << 20)).into()));
        words.extend((needs.nodes > 1).then(|| "--label".into()));
        words.push(program.into());
        words
    }
}

/// Reads `SLURM_JOB_CPUS_PER_NODE`: numbers, each with how many nodes it holds for, as in `8(x2),4`.
fn per_node(written: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in written.split(',') {
        let (cpus, nodes) = match part.split_once("(x") {
            Some((cpus, nodes)) => (cpus, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1_usize),
        };
        all.extend(std::iter::repeat_n(cpus.trim().parse::<usize>().ok()?, nodes.min(100_000)));
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(variables: &[(&str, &str)]) -> Option<Allocation> {
        Allocation::from_environment(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn cpus_per_node_as_slurm_writes_them() {
        let table: [(&str, Option<&[usize]>); 5] =
            [("8", Some(&[8])), ("8(x2)", Some(&[8, 8])), ("8(x2),4", Some(&[8, 8, 4])), ("", None), ("8(y2)", None)];
        for (written, expected) in table {
            assert_eq!(per_node(written).as_deref(), expected, "{written}");
        }
    }

    #[test]
    fn an_allocation_holds_as_many_trials_as_fit() {
        assert_eq!(allocation(&[]), None);
        let two = allocation(&[("SLURM_JOB_ID", "7"), ("SLURM_JOB_NUM_NODES", "3"), ("SLURM_JOB_CPUS_PER_NODE", "8(x2),4")]).unwrap();
        let settings = |nodes| SlurmSettings { nodes, ..SlurmSettings::default() };
        assert_eq!(two.room(&settings(1), 2, false), 10);
        assert_eq!(two.room(&settings(1), 5, false), 2);
        assert_eq!(two.room(&settings(1), 9, false), 0);
        assert_eq!(two.room(&settings(2), 8, false), 2);
        assert_eq!(two.room(&SlurmSettings { cpus_per_task: Some(4), ..settings(1) }, 2, false), 5);
        let gpus = allocation(&[("SLURM_JOB_ID", "7"), ("SLURM_JOB_CPUS_PER_NODE", "32"), ("SLURM_GPUS_ON_NODE", "4")]).unwrap();
        assert_eq!(gpus.room(&settings(1), 2, true), 2);
        assert_eq!(gpus.room(&settings(1), 2, false), 16);
    }

    #[test]
    fn a_step_asks_for_what_its_trial_needs() {
        let here = allocation(&[("SLURM_JOB_ID", "7")]).unwrap();
        let settings = SlurmSettings { nodes: 1, mem: Some(3 << 30), ..SlurmSettings::default() };
        let words = here.step(&settings, 2, true, Path::new("/bin/sweep"));
        let expected =
            "srun --exact --kill-on-bad-exit=1 --unbuffered --nodes=1 --ntasks=1 --cpus-per-task=2 --gpus-per-node=2 --mem=3072M /bin/sweep";
        assert_eq!(words.join(std::ffi::OsStr::new(" ")), expected);
    }
}
