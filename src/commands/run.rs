//! `sweep run`

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::plan::load;
use super::prepare::prepare;
use super::report::{brief, generate};
use super::slurm;
use crate::cli::{Launcher, RunArguments};
use crate::error::{CommandError, ErrorKind};
use crate::event::Event;
use crate::protocol::{ResolvedModel, Timestamp};
use crate::run::dispatcher::{Dispatcher, Finish};
use crate::run::resume::{self, Progress, Rerun};
use crate::run::{self, Configuration, ExecutorOptions, Machine, Observer, RunSummary, Selection, TrialProgram, Work};
use crate::spec::plan::SweepPlan;
use crate::store::{
    self, FORMAT_VERSION, Host, LockAttempt, ManifestRow, RunFolder, RunLock, RunManifest, RunState, StoreError, write_json, write_whole,
};
use crate::telemetry::{self, Gpus, Sampler};
use crate::trial::{Purpose, TrialId};
use crate::ui::{self, EventSink};

/// Runs the command.
///
/// # Errors
/// See the README's exit codes.
pub fn run(arguments: &RunArguments) -> Result<(), CommandError> {
    if arguments.jobs == Some(0) {
        return Err(CommandError::user("--jobs 0 would run nothing").hint("give 1 or more"));
    }
    // Opened before anything slow: a rebuild from here on does no harm.
    let program = TrialProgram::from_environment().map_err(|error| CommandError::infrastructure(format!("cannot open this executable: {error}")))?;
    let gpus = Gpus::of_this_machine();
    let (text, plan) = load(&arguments.sweep, &gpus)?;
    if arguments.launcher == Launcher::Slurm {
        slurm::check(&plan)?;
    }
    store::check_writable(&arguments.results.join(&plan.name)).map_err(|error| unwritable(&error))?;
    let host = telemetry::host(&gpus);
    let prepared = prepare(&plan, host.memory_bytes)?;
    let planned = Planned { manifest: manifest(arguments, &text, &plan, prepared.rows, prepared.notices, host), text, models: prepared.models };

    let configurations = resume::configurations(&planned.manifest, &planned.models);
    let selection =
        resume::select(&arguments.only, &planned.manifest, &configurations).map_err(|name| unknown_selection(&name, &planned.manifest))?;
    let rerun = rerun(arguments, &configurations)?;
    let chosen = choose(arguments, &planned, &configurations)?;
    let adoption = slurm::adoption(arguments.launcher, &chosen.folder)?;
    let (progress, notices, damage) = match &chosen.state {
        Some(state) => (resume::progress(&configurations, state, &rerun), Vec::new(), damage(state)),
        None => (Progress::default(), chosen.manifest.notices.clone(), Vec::new()),
    };
    let remarks = [chosen.remarks, damage].concat();

    let (machine, pin_cores) =
        Machine::of_this_process(planned.manifest.host.memory_bytes, gpus.devices.iter().map(|gpu| gpu.uuid.clone()).collect());
    let options = ExecutorOptions {
        program: Arc::new(program),
        telemetry_interval: plan.telemetry_interval,
        pin_cores,
        gpus: gpus.library.clone(),
        samplers: Arc::new(move |process, lent| samplers(&gpus, process, lent)),
    };
    let mut work = Work {
        resumed: chosen.state.is_some(),
        selection,
        fail_fast: arguments.fail_fast,
        notices,
        remarks,
        ..work(&chosen.manifest, configurations, progress, machine)
    };
    work.limits.jobs = arguments.jobs.or(work.limits.jobs);
    if rerun != Rerun::Nothing && Dispatcher::new(work.clone()).is_idle() {
        return Err(CommandError::new(ErrorKind::NothingToDo, format!("run {} has no trial to run again", chosen.folder.0.display())));
    }
    let launcher = match arguments.launcher {
        Launcher::Local => options.into(),
        Launcher::Slurm => slurm::launcher(&plan, &chosen.folder, &adoption, options, &mut work)?,
    };
    let mut screen = Screen(ui::events(arguments.json));
    let summary = run::run(work, &chosen.folder, launcher, true, &mut screen)?;
    let report = generate(&chosen.folder);
    screen.0.finish(report.as_ref().ok().map(brief).as_ref());
    // Others may work in the folder from here on.
    drop(chosen.lock);
    ended(&summary, &chosen.folder, &again(arguments))?;
    report.map(drop)
}

/// Shows events on the screen.
struct Screen(Box<dyn EventSink>);

impl Observer for Screen {
    fn event(&mut self, event: &Event) {
        self.0.event(event);
    }

    fn tick(&mut self) {
        self.0.tick();
    }
}

/// The process tree, and the GPUs that the trial was lent; where it was lent none, all that can be seen.
fn samplers(gpus: &Gpus, process: u32, lent: &[String]) -> Vec<Box<dyn Sampler>> {
    let all = || gpus.devices.iter().map(|gpu| gpu.uuid.clone()).collect();
    let uuids: Vec<String> = if lent.is_empty() { all() } else { lent.to_vec() };
    telemetry::samplers(process, gpus, &uuids)
}

/// What the sweep file asks for, data and models at hand.
struct Planned {
    /// The sweep file as it was read.
    text: String,
    /// Without the name of a run.
    manifest: RunManifest,
    /// The model of each row.
    models: Vec<ResolvedModel>,
}

fn manifest(arguments: &RunArguments, text: &str, plan: &SweepPlan, rows: Vec<ManifestRow>, notices: Vec<String>, host: Host) -> RunManifest {
    RunManifest {
        format_version: FORMAT_VERSION,
        sweep_version: env!("CARGO_PKG_VERSION").to_owned(),
        sweep: plan.name.clone(),
        run: String::new(),
        description: plan.description.clone(),
        created_at: Timestamp::now(),
        sweep_file_sha256: Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect(),
        profiles: plan.profiles.clone(),
        overrides: arguments.sweep.set.clone(),
        host,
        control: plan.control.clone(),
        repeats: plan.repeats,
        rows,
        search: plan.search.clone(),
        checkpoint: plan.checkpoint.clone(),
        limits: plan.limits.clone(),
        report: plan.report.clone(),
        notices,
    }
}

/// The run folder to work in.
struct Chosen {
    folder: RunFolder,
    lock: RunLock,
    manifest: RunManifest,
    /// What it holds already; `None` for a new run.
    state: Option<RunState>,
    /// What the user should know about the choice.
    remarks: Vec<String>,
}

/// Decides between the newest run and a new one: an unfinished run of the same sweep goes on, everything else starts anew. `--resume`, `--rerun` and
/// `--new` leave no choice.
fn choose(arguments: &RunArguments, planned: &Planned, configurations: &[Configuration]) -> Result<Chosen, CommandError> {
    let must_go_on = arguments.resume || arguments.rerun.is_some();
    let flag = if arguments.resume { "--resume" } else { "--rerun" };
    if arguments.new && arguments.rerun.is_some() {
        return Err(CommandError::user("--rerun runs trials of the newest run again, --new starts another run").hint("give one of them"));
    }
    let sweep = &planned.manifest.sweep;
    let newest = if arguments.new { None } else { store::newest_run(&arguments.results, sweep)? };
    let Some(folder) = newest else {
        if must_go_on {
            let message = format!("{flag}: there is no run of {sweep} in {}", arguments.results.display());
            return Err(CommandError::user(message).hint(format!("leave {flag} out to start one")));
        }
        return start(arguments, planned, Vec::new());
    };
    let (lock, abandoned_by) = match RunLock::take(&folder, arguments.force_unlock)? {
        LockAttempt::Taken { lock, abandoned_by } => (lock, abandoned_by),
        LockAttempt::Held { by } => {
            let by = by.map_or_else(|| "another sweep".to_owned(), |by| format!("another sweep ({by})"));
            if must_go_on || arguments.force_unlock {
                let message = format!("run {} is in use by {by}", folder.0.display());
                return Err(CommandError::infrastructure(message).hint("wait for it to end, or start another run with --new"));
            }
            return start(arguments, planned, vec![format!("The newest run, {}, is in use by {by}: another run starts.", folder.name())]);
        }
        // Whether that process lives cannot be seen from here, and two of them would ruin the run.
        LockAttempt::Elsewhere { by } => {
            let error = CommandError::infrastructure(format!("run {} is in use by a sweep on another machine ({by})", folder.0.display()));
            let error = error.hint("where it does not run there any more, take the run over with --force-unlock");
            return Err(error.hint("otherwise wait for it to end, or start another run with --new"));
        }
    };
    let old = match folder.read_manifest() {
        Ok(old) => old,
        Err(error) if must_go_on => return Err(CommandError::user(format!("{flag}: {error}"))),
        Err(error) => return start(arguments, planned, vec![format!("The newest run cannot go on: {error}. Another run starts.")]),
    };
    let state = RunState::read(&folder)?;
    let differences = resume::differences(&old, &planned.manifest);
    if differences.is_empty() {
        let unfinished = is_unfinished(&old, configurations, &state) || was_cut_off(&folder, &state);
        if unfinished || arguments.rerun.is_some() {
            let how = if arguments.rerun.is_some() { "Trials of run" } else { "The unfinished run" };
            let goes_on = if arguments.rerun.is_some() { "run again" } else { "goes on" };
            let mut remarks = vec![format!("{how} {} {goes_on}; --new starts another.", folder.name())];
            remarks.extend(abandoned_by.map(|owner| format!("The sweep that worked on it before was cut off ({owner}).")));
            return Ok(Chosen { manifest: old, state: Some(state), remarks, lock, folder });
        }
        if arguments.resume {
            let message = format!("run {} is finished: nothing is missing", folder.0.display());
            return Err(
                CommandError::new(ErrorKind::NothingToDo, message).hint("start another with --new, or run trials again with --rerun failed|all|ID")
            );
        }
        return start(arguments, planned, Vec::new());
    }
    if must_go_on {
        let message = format!("{flag}: run {} was made from something else:\n  {}", folder.name(), differences.join("\n  "));
        let error = CommandError::user(message).hint(format!("the file it was made from is {}", folder.sweep_file().display()));
        return Err(error.hint("start another run with --new"));
    }
    // Without a flag a changed sweep is a new run; that the old one is left unfinished must not go unsaid.
    let shown = differences.iter().take(3).cloned().collect::<Vec<_>>().join("; ");
    let more = if differences.len() > 3 { format!(" and {} more differences", differences.len() - 3) } else { String::new() };
    start(arguments, planned, vec![format!("Another run starts, because the sweep differs from that of {}: {shown}{more}.", folder.name())])
}

/// The work of a manifest that is left after `progress`, without any restriction.
fn work(manifest: &RunManifest, configurations: Vec<Configuration>, progress: Progress, machine: Machine) -> Work {
    Work {
        sweep: manifest.sweep.clone(),
        run: manifest.run.clone(),
        resumed: false,
        configurations,
        probe_steps: manifest.search.as_ref().map_or(0, |search| search.probe_steps),
        selection: Selection::default(),
        checkpoint: manifest.checkpoint.clone(),
        limits: manifest.limits.clone(),
        fail_fast: false,
        machine,
        cluster: None,
        adopted: BTreeMap::new(),
        known: progress.known,
        lost: progress.lost,
        recovered: progress.recovered,
        announced: progress.announced,
        notices: Vec::new(),
        remarks: Vec::new(),
    }
}

/// Whether something is missing that may run.
fn is_unfinished(manifest: &RunManifest, configurations: &[Configuration], state: &RunState) -> bool {
    let progress = resume::progress(configurations, state, &Rerun::Nothing);
    let machine = Machine::default();
    !Dispatcher::new(work(manifest, configurations.to_vec(), progress, machine)).is_idle()
}

/// Whether the last sweep on a run was killed after its last trial: then the end of the run and its report are missing.
fn was_cut_off(folder: &RunFolder, state: &RunState) -> bool {
    let began = state.started_at.is_some();
    began && (state.exit_code.is_none() || !folder.report().join("report.html").exists())
}

/// Makes a new run folder.
fn start(arguments: &RunArguments, planned: &Planned, remarks: Vec<String>) -> Result<Chosen, CommandError> {
    let make = || -> Result<Chosen, StoreError> {
        let folder = store::create_run(&arguments.results, &planned.manifest.sweep)?;
        // Nobody knows the folder yet, so nobody can hold its lock.
        let lock = loop {
            if let LockAttempt::Taken { lock, .. } = RunLock::take(&folder, false)? {
                break lock;
            }
        };
        let manifest = RunManifest { run: folder.name(), created_at: Timestamp::now(), ..planned.manifest.clone() };
        write_whole(&folder.sweep_file(), planned.text.as_bytes())?;
        // With its manifest it becomes a run that others see.
        write_json(&folder.manifest(), &manifest)?;
        folder.publish()?;
        Ok(Chosen { folder, lock, manifest, state: None, remarks })
    };
    make().map_err(|error| unwritable(&error))
}

fn rerun(arguments: &RunArguments, configurations: &[Configuration]) -> Result<Rerun, CommandError> {
    match arguments.rerun.as_deref() {
        None => Ok(Rerun::Nothing),
        Some("failed") => Ok(Rerun::Failed),
        Some("all") => Ok(Rerun::All),
        Some(id) if configurations.iter().flat_map(Configuration::possible_trials).any(|trial| trial.id.0 == id) => {
            Ok(Rerun::Trial(TrialId(id.to_owned())))
        }
        Some(other) => {
            let error = CommandError::user(format!("--rerun {other}: the sweep has no trial with this id"));
            Err(error.hint("give `failed`, `all`, or the id of a trial as `sweep status` shows it"))
        }
    }
}

fn unknown_selection(name: &str, manifest: &RunManifest) -> CommandError {
    let labels: Vec<&str> = manifest.rows.iter().take(20).map(|row| row.row.label.as_str()).collect();
    CommandError::user(format!("--only {name}: no row has this label, and no configuration or trial this id"))
        .hint(format!("labels: {}", labels.join(", ")))
}

/// What is damaged in a run's folder, a sentence each.
fn damage(state: &RunState) -> Vec<String> {
    let events = state.unreadable_events.iter().map(|(line, reason)| format!("events.jsonl line {line} cannot be read and is left out: {reason}"));
    let trials = state.unreadable_trials.iter().map(|reason| format!("A trial runs again, its folder is damaged: {reason}"));
    events.chain(trials).collect()
}

/// A results folder that takes nothing. What only the user can change is the user's; a full or failing disk is the machine's.
fn unwritable(error: &StoreError) -> CommandError {
    use std::io::ErrorKind as Io;
    let kind = match error {
        StoreError::Io { error, .. } if matches!(error.kind(), Io::NotADirectory | Io::NotFound | Io::AlreadyExists | Io::InvalidFilename) => {
            ErrorKind::User
        }
        _ => ErrorKind::Infrastructure,
    };
    CommandError::new(kind, format!("the results folder cannot be written: {error}")).hint("choose another with --results DIR")
}

/// The command that finds this run again: the same file under the same overlays, in the same results folder, by the same launcher.
fn again(arguments: &RunArguments) -> String {
    let mut command = format!("sweep run {}", arguments.sweep.file.display());
    if let Some(profile) = &arguments.sweep.profile {
        command.push_str(&format!(" --profile {profile}"));
    }
    for set in &arguments.sweep.set {
        command.push_str(&format!(" --set '{}'", set.replace('\'', r"'\''")));
    }
    if arguments.results != Path::new("results") {
        command.push_str(&format!(" --results {}", arguments.results.display()));
    }
    if arguments.launcher == Launcher::Slurm {
        command.push_str(" --launcher slurm");
    }
    command
}

/// The end of a run as an error, or none.
fn ended(summary: &RunSummary, folder: &RunFolder, again: &str) -> Result<(), CommandError> {
    match &summary.finish {
        Finish::Done => Ok(()),
        Finish::TrialsFailed => {
            let count = summary.failed.len();
            let mut message = if count == 1 { "1 trial failed:".to_owned() } else { format!("{count} trials failed:") };
            for trial in &summary.failed {
                let purpose = match trial.purpose {
                    Purpose::Probe => "probe",
                    Purpose::Train => "training",
                };
                message.push_str(&format!("\n  {}, {purpose} at block size {} ({}): {}", trial.label, trial.block_size, trial.id, trial.outcome));
            }
            Err(CommandError::new(ErrorKind::TrialFailed, message)
                .hint(format!("their logs are {}/<id>/attempt-<n>/stderr.log", folder.trials().display()))
                .hint(format!("run them again with `{again} --rerun failed`")))
        }
        Finish::Interrupted => {
            let trials = if summary.outstanding == 1 { "1 trial".to_owned() } else { format!("{} trials", summary.outstanding) };
            Err(CommandError::new(ErrorKind::Interrupted, format!("interrupted with {trials} outstanding"))
                .hint(format!("`{again}` goes on with this run")))
        }
        Finish::Infrastructure { reason } => {
            Err(CommandError::infrastructure(reason.clone())
                .hint(format!("what is done is kept in {}; `{again}` goes on with it", folder.0.display())))
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn the_command_that_goes_on_names_the_same_run() {
        let cases = [
            (vec!["sweep", "run", "a.toml", "--json"], "sweep run a.toml"),
            (vec!["sweep", "run", "a.toml", "--profile", "cpu", "--results", "/r"], "sweep run a.toml --profile cpu --results /r"),
            (vec!["sweep", "run", "a.toml", "--jobs", "2", "--launcher", "slurm"], "sweep run a.toml --launcher slurm"),
            (vec!["sweep", "run", "a.toml", "--set", "name = 'x'"], r"sweep run a.toml --set 'name = '\''x'\'''"),
        ];
        for (typed, expected) in cases {
            let Command::Run(arguments) = Cli::parse_from(typed).command else { panic!("not a run") };
            assert_eq!(again(&arguments), expected);
        }
    }
}
