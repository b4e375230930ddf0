//! Where a process stands among the processes of its trial and what of the machine is its own, as SLURM says it in the environment.

use std::ffi::OsString;

/// The place of a process that `srun` started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// `SLURM_PROCID`: which process of the trial, from 0. There is one on each node.
    pub node_rank: usize,
    /// `SLURM_NTASKS`: processes of the trial.
    pub nodes: usize,
    /// `SLURM_LAUNCH_NODE_IPADDR`: address of the machine that the processes were started from, where they can meet.
    pub master_addr: Option<String>,
    /// `SLURM_CPUS_PER_TASK`: cores that are this process's.
    pub cpus: Option<usize>,
}

impl Place {
    /// The place of this process; `None` where it is no task of SLURM's.
    pub fn of_this_process() -> Option<Self> {
        Self::from_environment(|name| std::env::var_os(name))
    }

    /// The place that `variable` tells of.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let text = |name: &str| variable(name)?.into_string().ok();
        let number = |name: &str| text(name)?.parse::<usize>().ok();
        // Every process of a job has the job's id; a task has a step too, and a number in it.
        text("SLURM_STEP_ID")?;
        let nodes = number("SLURM_NTASKS").filter(|nodes| *nodes > 0)?;
        Some(Self {
            node_rank: number("SLURM_PROCID").filter(|rank| *rank < nodes)?,
            nodes,
            master_addr: text("SLURM_LAUNCH_NODE_IPADDR"),
            cpus: number("SLURM_CPUS_PER_TASK").filter(|cpus| *cpus > 0),
        })
    }

    /// The global ranks of this process where each holds `ranks_per_node`.
    pub fn ranks(&self, ranks_per_node: usize) -> std::ops::Range<usize> {
        self.node_rank * ranks_per_node..(self.node_rank + 1) * ranks_per_node
    }
}

/// Cores that SLURM gave to this process, where it runs on a node of SLURM's: a cluster need not bind processes to their cores. `variable` reads the
/// environment.
pub fn cores_given(variable: impl Fn(&str) -> Option<OsString>) -> Option<usize> {
    let number = |name: &str| variable(name)?.into_string().ok()?.parse::<usize>().ok().filter(|cores| *cores > 0);
    // In the shell that `salloc` starts on a login node the numbers are those of another machine.
    variable("SLURMD_NODENAME")?;
    match variable("SLURM_STEP_ID") {
        Some(_) => number("SLURM_CPUS_PER_TASK").or_else(|| number("SLURM_CPUS_ON_NODE")),
        None => number("SLURM_CPUS_ON_NODE"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Option<Place> {
        Place::from_environment(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn a_task_knows_its_place() {
        let task = [
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7"),
            ("SLURM_CPUS_PER_TASK", "4"),
        ];
        let found = place(&task).unwrap();
        assert_eq!(found, Place { node_rank: 1, nodes: 2, master_addr: Some("10.0.0.7".into()), cpus: Some(4) });
        assert_eq!(found.ranks(4), 4..8);
        assert_eq!(place(&task[..4]).map(|place| (place.master_addr, place.cpus)), Some((None, None)));
    }

    #[test]
    fn cores_are_given_on_nodes_alone() {
        let given =
            |variables: &[(&str, &str)]| cores_given(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()));
        assert_eq!(given(&[]), None);
        assert_eq!(given(&[("SLURM_CPUS_ON_NODE", "8")]), None, "a shell of salloc");
        assert_eq!(given(&[("SLURMD_NODENAME", "n1"), ("SLURM_CPUS_ON_NODE", "8"), ("SLURM_CPUS_PER_TASK", "2")]), Some(8), "a batch script");
        let step = [("SLURMD_NODENAME", "n1"), ("SLURM_STEP_ID", "0"), ("SLURM_CPUS_ON_NODE", "8"), ("SLURM_CPUS_PER_TASK", "2")];
        assert_eq!(given(&step), Some(2));
        assert_eq!(given(&[("SLURMD_NODENAME", "n1"), ("SLURM_CPUS_ON_NODE", "x")]), None);
    }

    #[test]
    fn what_is_no_task_has_no_place() {
        assert_eq!(place(&[]), None);
        assert_eq!(place(&[("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]), None);
        assert_eq!(place(&[("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "2"), ("SLURM_NTASKS", "2")]), None);
        assert_eq!(place(&[("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "x"), ("SLURM_NTASKS", "2")]), None);
    }
}
