//! Time that `sweep run` itself spends on a trial: a run of children that do next to nothing, against the same children started bare.
//!
//! Then how many trials a second run two at a time, whether memory grows over ten thousand, and how fast a long event log is read.
//!
//! Prints numbers and asserts nothing: `cargo bench --no-default-features --bench orchestrator`.
#![expect(clippy::print_stdout, reason = "a bench prints its numbers")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sweep::data::{self, Cache, Hub};
use sweep::event::{Event, EventKind};
use sweep::protocol::Timestamp;
use sweep::run::resume::configurations;
use sweep::run::{ExecutorOptions, Machine, Observer, PlannedTrial, Selection, TrialProgram, Work, run};
use sweep::spec::ids::{ContentHashes, configuration_id};
use sweep::spec::{self, Overlays, Surroundings};
use sweep::store::{FORMAT_VERSION, Host, JsonLines, ManifestRow, RunFolder, RunManifest, RunState, create_run};
use sweep::telemetry::ProcessTreeSampler;
use sweep::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

/// Trials of the comparison with bare processes.
const TRIALS: usize = 200;
/// Trials over which memory must not grow.
const MANY: usize = 10_000;
/// Records of the event log that is folded.
const RECORDS: usize = 100_000;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Looks at this process's memory as trials end.
#[derive(Default)]
struct Memory {
    ended: usize,
    /// Trials ended, and resident KiB by then.
    seen: Vec<(usize, u64)>,
}

impl Observer for Memory {
    fn event(&mut self, event: &Event) {
        if matches!(event.kind, EventKind::TrialEnded { .. }) {
            self.ended += 1;
            if self.ended.is_multiple_of(MANY / 10) {
                self.seen.push((self.ended, resident_kib()));
            }
        }
    }
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok()).unwrap_or(0)
}

fn main() -> Outcome<()> {
    compare_with_bare_processes()?;
    two_at_a_time()?;
    fold()
}

/// One trial at a time, against the same processes started bare.
fn compare_with_bare_processes() -> Outcome<()> {
    let world = tempfile::tempdir()?;
    let (folder, trials, orchestrated) = orchestrate(world.path(), TRIALS, 1, &mut Memory::default())?;
    let bare = bare(program(), &folder, &trials)?;
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3 / TRIALS as f64;
    println!("{TRIALS} trials, per trial: {:.2} ms by sweep run, {:.2} ms by bare processes", milliseconds(orchestrated), milliseconds(bare));
    println!("orchestrator time per trial: {:.2} ms (wanted: at most 2 ms)", milliseconds(orchestrated.saturating_sub(bare)));
    Ok(())
}

/// Two at a time for long: how many a second, and whether memory grows.
fn two_at_a_time() -> Outcome<()> {
    let world = tempfile::tempdir()?;
    let mut memory = Memory::default();
    let (.., took) = orchestrate(world.path(), MANY, 2, &mut memory)?;
    println!("{MANY} trials, two at a time: {:.0} a second (wanted: at least 400)", MANY as f64 / took.as_secs_f64());
    let grown: Vec<String> = memory.seen.iter().map(|(trials, kib)| format!("{trials}: {:.1}", *kib as f64 / 1024.0)).collect();
    println!("resident MiB by trials ended (wanted: flat): {}", grown.join(", "));
    Ok(())
}

/// Reads a long event log.
fn fold() -> Outcome<()> {
    let world = tempfile::tempdir()?;
    let folder = RunFolder(world.path().to_owned());
    let mut lines = JsonLines::append_to(&folder.events())?;
    for number in 0..RECORDS / 2 {
        let trial = TrialId(format!("{:016x}", number * 7919));
        let started = EventKind::TrialStarted {
            trial: trial.clone(),
            configuration: ConfigurationId("c".to_owned()),
            label: "FULL_SHARD, learning_rate = 5e-5".to_owned(),
            purpose: Purpose::Train,
            block_size: 64,
            repeat: 0,
            attempt: 1,
            budget_bytes: Some(1 << 30),
        };
        let ended = EventKind::TrialEnded {
            trial,
            label: "FULL_SHARD, learning_rate = 5e-5".to_owned(),
            purpose: Purpose::Train,
            block_size: 64,
            attempt: 1,
            outcome: TrialOutcome::Done,
            seconds: 1.5,
            stderr_tail: String::new(),
        };
        for kind in [started, ended] {
            lines.push(&Event { at: Timestamp::now(), kind })?;
        }
    }
    let began = Instant::now();
    let state = RunState::read(&folder)?;
    println!("{RECORDS} events folded in {:.2} s (wanted: under 1 s)", began.elapsed().as_secs_f64());
    if state.ended_events.len() != RECORDS / 2 {
        return Err(format!("{} trials ended", state.ended_events.len()).into());
    }
    Ok(())
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_fake-trial"))
}

/// Runs `count` trials, `jobs` at a time; returns where, which, and how long it took.
fn orchestrate(world: &Path, count: usize, jobs: usize, observer: &mut dyn Observer) -> Outcome<(RunFolder, Vec<PlannedTrial>, Duration)> {
    let (manifest, mut work) = prepare(world, count)?;
    work.limits.jobs = Some(jobs);
    let folder = create_run(&world.join("results"), &manifest.sweep)?;
    let options = ExecutorOptions {
        program: Arc::new(TrialProgram::at(program(), Path::new(env!("CARGO_BIN_EXE_sweep")))),
        telemetry_interval: Duration::from_millis(200),
        pin_cores: false,
        samplers: Arc::new(|process, _| vec![Box::new(ProcessTreeSampler::new(process))]),
        gpus: None,
    };
    let trials: Vec<_> = work.configurations.iter().flat_map(|configuration| configuration.possible_trials()).collect();
    let began = Instant::now();
    let summary = run(work, &folder, options, false, observer)?;
    let took = began.elapsed();
    if summary.done != count {
        return Err(format!("{} of {count} trials ended well", summary.done).into());
    }
    Ok((folder, trials, took))
}

/// The same requests given to the same program, one after another.
fn bare(program: &Path, folder: &RunFolder, trials: &[PlannedTrial]) -> std::io::Result<Duration> {
    let began = Instant::now();
    for trial in trials {
        let request = folder.attempt(&trial.id, 1).request();
        Command::new(program).arg("trial").arg(request).stdin(Stdio::null()).status()?;
    }
    Ok(began.elapsed())
}

/// A sweep of `count` trainings that differ in their learning rate.
fn prepare(world: &Path, count: usize) -> Outcome<(RunManifest, Work)> {
    let rates: Vec<String> = (1..=count).map(|rate| format!("{rate}e-6")).collect();
    let text = format!(
        "[model]\nid = \"gpt2-tiny\"\ninit = \"random\"\n[data]\ndataset = {{ synthetic = {{ vocab = 64, train_tokens = 65536, eval_tokens = 4096 }} }}\n\
         [train]\nblock_size = 64\nmax_steps = 4\n[device]\nkind = \"cpu\"\nworld_size = 2\n[grid]\ntrain.learning_rate = [{}]\n",
        rates.join(", ")
    );
    let plan = spec::load("orchestrator.toml", &text, &Overlays::default(), &Surroundings::default())?;
    let (hub, cache) = (Hub::new(world, "http://localhost:1", None, true), Cache::at(world.join("cache")));
    let mut rows = Vec::new();
    let mut models = Vec::new();
    for row in plan.rows.iter() {
        let data = data::prepare(&row.effective.data, &row.effective.model, &hub, &cache)?.data;
        let model = data::model::resolve(&row.effective.model, data.vocab_size, &hub)?;
        rows.push(ManifestRow { configuration: configuration_id(&row.effective, &ContentHashes::of(&model, &data)), row, data });
        models.push(model);
    }
    let manifest = RunManifest {
        format_version: FORMAT_VERSION,
        sweep_version: String::new(),
        sweep: plan.name.clone(),
        run: "bench".to_owned(),
        description: None,
        created_at: Timestamp::now(),
        sweep_file_sha256: String::new(),
        profiles: Vec::new(),
        overrides: Vec::new(),
        host: Host { name: String::new(), cores: 1, memory_bytes: 0, gpus: Vec::new() },
        control: None,
        repeats: 1,
        rows,
        search: None,
        checkpoint: Default::default(),
        limits: plan.limits.clone(),
        report: plan.report.clone(),
        notices: Vec::new(),
    };
    let work = Work {
        sweep: manifest.sweep.clone(),
        run: manifest.run.clone(),
        resumed: false,
        configurations: configurations(&manifest, &models),
        probe_steps: 0,
        selection: Selection::default(),
        checkpoint: Default::default(),
        limits: manifest.limits.clone(),
        fail_fast: false,
        machine: Machine { cores: vec![0, 1], memory_bytes: u64::MAX, gpus: Vec::new() },
        cluster: None,
        adopted: Default::default(),
        known: Default::default(),
        lost: Default::default(),
        recovered: Vec::new(),
        announced: Default::default(),
        notices: Vec::new(),
        remarks: Vec::new(),
    };
    Ok((manifest, work))
}
