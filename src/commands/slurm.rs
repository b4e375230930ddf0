//! What `sweep run` does for SLURM's sake before the first trial.

use std::sync::Arc;

use crate::cli::Launcher;
use crate::error::CommandError;
use crate::run::slurm::{self, AdoptError, Adoption, Allocation, ClientError, SlurmOptions};
use crate::run::{Cluster, ExecutorOptions, LauncherOptions, TRIAL_PROGRAM, TrialProgram, Work};
use crate::spec::plan::SweepPlan;
use crate::spec::settings::DeviceKind;
use crate::store::RunFolder;

/// Refuses what cannot be run on a cluster, before anything is prepared.
///
/// # Errors
/// The plan asks for what cannot be, SLURM is not there, or it would not take the jobs.
pub(super) fn check(plan: &SweepPlan) -> Result<(), CommandError> {
    let settings = &plan.slurm;
    let (ranks, on_gpus) = largest(plan);
    if settings.nodes > 1 {
        // Another program may hold ranks on several nodes together; it is told its place.
        if std::env::var_os(TRIAL_PROGRAM).is_none() {
            let message = format!("slurm.nodes = {}: sweep's own trainer runs all ranks of a trial on one node", settings.nodes);
            return Err(CommandError::user(message).hint("remove slurm.nodes, and choose device.world_size up to what one node has"));
        }
        if let Some(row) = plan.rows.iter().find(|row| !row.effective.device.world_size.is_multiple_of(settings.nodes)) {
            let message =
                format!("slurm.nodes = {} does not divide the {} ranks of \"{}\"", settings.nodes, row.effective.device.world_size, row.label);
            return Err(CommandError::user(message).hint("every node holds as many ranks as every other"));
        }
    }
    match Allocation::of_this_process() {
        Some(allocation) if allocation.room(settings, ranks, on_gpus) == 0 => {
            let message = format!("the allocation of SLURM job {} has no room for a trial of {ranks} ranks", allocation.job);
            Err(CommandError::user(message)
                .hint("allocate more cores or GPUs, or choose slurm.cpus_per_task, slurm.gpus_per_node or device.world_size"))
        }
        Some(_) => Ok(()),
        None => slurm::check(settings, ranks, on_gpus).map_err(|error| refused(&error)),
    }
}

/// Ranks of the largest row, and whether any computes on GPUs.
fn largest(plan: &SweepPlan) -> (usize, bool) {
    plan.rows.iter().fold((1, false), |(ranks, on_gpus), row| {
        (ranks.max(row.effective.device.world_size), on_gpus || row.effective.device.kind == DeviceKind::Cuda)
    })
}

fn refused(error: &ClientError) -> CommandError {
    match error {
        ClientError::Missing { .. } => CommandError::user(format!("--launcher slurm: {error}"))
            .hint("run it where SLURM's client programs are, as on a login node, or leave --launcher out"),
        error if error.may_pass() => CommandError::infrastructure(format!("SLURM does not answer: {error}")),
        error => CommandError::user(format!("SLURM would not take the jobs: {error}")).hint("change [slurm] in the sweep file"),
    }
}

/// Jobs that an earlier `sweep run` on `folder` left with SLURM.
///
/// # Errors
/// They cannot be looked for; or the run is to go on without SLURM although there are some.
pub(super) fn adoption(launcher: Launcher, folder: &RunFolder) -> Result<Adoption, CommandError> {
    let elsewhere = |what: String| {
        CommandError::user(format!("run {} {what}", folder.0.display()))
            .hint("go on with --launcher slurm outside any allocation, or start another run with --new")
    };
    match (Adoption::look(folder), launcher) {
        (Ok(adoption), Launcher::Slurm) if Allocation::of_this_process().is_none() => {
            adoption.cancel_superseded().map_err(|error| CommandError::infrastructure(format!("jobs in the way cannot be cancelled: {error}")))?;
            Ok(adoption)
        }
        // Steps of an allocation are this machine's children, as local trials are.
        (Ok(adoption), _) if adoption.alive.is_empty() => Ok(Adoption::default()),
        (Ok(adoption), _) => Err(elsewhere(format!("has SLURM jobs that run or wait: {}", adoption.alive.join(", ")))),
        (Err(AdoptError::Store(error)), _) => Err(error.into()),
        (Err(AdoptError::Client(error)), Launcher::Local) => {
            Err(elsewhere(format!("was begun with SLURM, which cannot be asked about its jobs: {error}")))
        }
        (Err(AdoptError::Client(error)), Launcher::Slurm) => {
            Err(CommandError::infrastructure(format!("SLURM cannot be asked about the jobs of run {}: {error}", folder.0.display()))
                .hint("without an answer a trial could run twice"))
        }
    }
}

/// What starts the trials of `work`, on a cluster or in the allocation around this process.
///
/// # Errors
/// The program cannot be put where the nodes find it.
pub(super) fn launcher(
    plan: &SweepPlan,
    folder: &RunFolder,
    adoption: &Adoption,
    options: ExecutorOptions,
    work: &mut Work,
) -> Result<LauncherOptions, CommandError> {
    let program = slurm::program(folder)?;
    work.cluster = Some(Cluster { nodes: plan.slurm.nodes });
    adoption.enter(work);
    let Some(allocation) = Allocation::of_this_process() else {
        return Ok(LauncherOptions::Slurm(Box::new(SlurmOptions { settings: plan.slurm.clone(), program, found: adoption.found.clone() })));
    };
    let (ranks, on_gpus) = largest(plan);
    let room = allocation.room(&plan.slurm, ranks, on_gpus);
    let asked = work.limits.jobs;
    work.limits.jobs = Some(asked.map_or(room, |asked| asked.min(room)));
    let few =
        asked.filter(|asked| *asked > room).map(|asked| format!(" {asked} at a time were asked for, it has room for {room}.")).unwrap_or_default();
    work.remarks.push(format!("Trials run as steps of SLURM job {}, in which this sweep runs; nothing is submitted.{few}", allocation.job));
    let step = allocation.step(&plan.slurm, ranks, on_gpus, &program);
    let program = TrialProgram::behind(step).map_err(|error| CommandError::infrastructure(format!("cannot open this executable: {error}")))?;
    Ok(LauncherOptions::Local(ExecutorOptions { program: Arc::new(program), pin_cores: false, ..options }))
}
