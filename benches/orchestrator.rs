//! Time that `sweep run` itself spends on a trial: a run of children that do next to nothing, against the same children started bare.
//!
//! Prints numbers and asserts nothing: `cargo bench --no-default-features --bench orchestrator`.
#![expect(clippy::print_stdout, reason = "a bench prints its numbers")]

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sweep::data::{self, Cache, Hub};
use sweep::event::Event;
use sweep::protocol::Timestamp;
use sweep::run::resume::configurations;
use sweep::run::{ExecutorOptions, Machine, Observer, Selection, TrialProgram, Work, run};
use sweep::spec::ids::{ContentHashes, configuration_id};
use sweep::spec::{self, Overlays, Surroundings};
use sweep::store::{FORMAT_VERSION, Host, ManifestRow, RunFolder, RunManifest, create_run};
use sweep::telemetry::ProcessTreeSampler;

const TRIALS: usize = 200;

struct Nobody;

impl Observer for Nobody {
    fn event(&mut self, _: &Event) {}
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let world = tempfile::tempdir()?;
    let (manifest, work) = prepare(world.path())?;
    let folder = create_run(&world.path().join("results"), &manifest.sweep)?;
    let program = Path::new(env!("CARGO_BIN_EXE_fake-trial"));
    let options = ExecutorOptions {
        program: Arc::new(TrialProgram::at(program, Path::new(env!("CARGO_BIN_EXE_sweep")))),
        telemetry_interval: Duration::from_millis(200),
        pin_cores: false,
        samplers: Arc::new(|process| vec![Box::new(ProcessTreeSampler::new(process))]),
    };
    let trials: Vec<_> = work.configurations.iter().flat_map(|configuration| configuration.possible_trials()).collect();

    let began = Instant::now();
    let summary = run(work, &folder, options, false, &mut Nobody)?;
    let orchestrated = began.elapsed();
    if summary.done != TRIALS {
        return Err(format!("{} of {TRIALS} trials ended well", summary.done).into());
    }

    let bare = bare(program, &folder, &trials)?;
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3 / TRIALS as f64;
    println!("{TRIALS} trials, per trial: {:.2} ms by sweep run, {:.2} ms by bare processes", milliseconds(orchestrated), milliseconds(bare));
    println!("orchestrator time per trial: {:.2} ms (wanted: under 20 ms)", milliseconds(orchestrated.saturating_sub(bare)));
    Ok(())
}

/// The same requests given to the same program, one after another.
fn bare(program: &Path, folder: &RunFolder, trials: &[sweep::run::PlannedTrial]) -> std::io::Result<Duration> {
    let began = Instant::now();
    for trial in trials {
        let request = folder.attempt(&trial.id, 1).request();
        Command::new(program).arg("trial").arg(request).stdin(Stdio::null()).status()?;
    }
    Ok(began.elapsed())
}

/// A sweep of [`TRIALS`] trainings that differ in their learning rate.
fn prepare(world: &Path) -> Result<(RunManifest, Work), Box<dyn std::error::Error>> {
    let rates: Vec<String> = (1..=TRIALS).map(|rate| format!("{rate}e-6")).collect();
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
        machine: Machine { cores: vec![0], memory_bytes: u64::MAX },
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
