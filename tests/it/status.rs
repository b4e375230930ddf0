//! `sweep status` on run folders in every state: running, ended, cut off, damaged.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use sweep::event::{Event, EventKind, LimitedBy};
use sweep::protocol::{
    DataCounts, Evaluation, Message, MessageKind, Number, PROTOCOL, PreparedData, Step, Timestamp, Timing, TrialEnding, TrialResult,
};
use sweep::spec::{self, Overlays, Surroundings};
use sweep::store::{self, AttemptRecord, FORMAT_VERSION, Host, JsonLines, LockAttempt, ManifestRow, RunFolder, RunLock, RunManifest, TrialRecord};
use sweep::trial::{ConfigurationId, Purpose, TrialId, TrialOutcome};

const SWEEP: &str = r#"
[model]
id = "gpt2-tiny"
init = "random"
[data]
dataset = { synthetic = { vocab = 64, train_tokens = 4096, eval_tokens = 1024 } }
[train]
max_steps = 96
[device]
kind = "cpu"
[search.block_size]
candidates = [64, 128]
[[case]]
label = "first"
[[case]]
label = "second"
train.learning_rate = 1e-3
[[case]]
label = "third"
train.learning_rate = 2e-3
"#;

/// A run of three rows, with nothing done yet.
struct World {
    results: tempfile::TempDir,
    folder: RunFolder,
    manifest: RunManifest,
    events: JsonLines,
}

fn at(seconds: u64) -> Timestamp {
    Timestamp(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000 + seconds))
}

impl World {
    fn new() -> Self {
        let results = tempfile::tempdir().expect("temporary folder");
        let folder = store::create_run(results.path(), "demo").expect("created");
        let plan = spec::load("demo.toml", SWEEP, &Overlays::default(), &Surroundings::default()).expect("a sweep");
        let data = PreparedData {
            train: "train".into(),
            eval: None,
            fingerprint: "f".into(),
            vocab_size: 64,
            train_tokens: 4096,
            eval_tokens: 1024,
            floor_perplexity: None,
            description: String::new(),
        };
        let rows = plan.rows.iter().map(|row| ManifestRow { configuration: ConfigurationId(row.label.clone()), data: data.clone(), row });
        let manifest = RunManifest {
            format_version: FORMAT_VERSION,
            sweep_version: "0.1.0".into(),
            sweep: "demo".into(),
            run: folder.name(),
            description: None,
            created_at: at(0),
            sweep_file_sha256: String::new(),
            profiles: Vec::new(),
            overrides: Vec::new(),
            host: Host { name: "host".into(), cores: 2, memory_bytes: 1 << 30, gpus: Vec::new() },
            control: None,
            repeats: 1,
            rows: rows.collect(),
            search: plan.search.clone(),
            checkpoint: Default::default(),
            limits: plan.limits.clone(),
            report: plan.report.clone(),
            notices: Vec::new(),
        };
        store::write_json(&folder.manifest(), &manifest).expect("written");
        let events = JsonLines::append_to(&folder.events()).expect("opened");
        let mut world = Self { results, folder, manifest, events };
        world.event(0, EventKind::RunStarted { sweep: "demo".into(), run: world.folder.name(), configurations: 3, resumed: false });
        world
    }

    fn event(&mut self, seconds: u64, kind: EventKind) {
        self.events.push(&Event { at: at(seconds), kind }).expect("written");
    }

    /// Begins attempt 1 of a trial of row `row`.
    fn begin(&self, row: usize, purpose: Purpose, block_size: usize) -> TrialId {
        let row = &self.manifest.rows[row];
        let id = TrialId(format!("{}-{purpose:?}-{block_size}", row.row.label).to_lowercase());
        fs::create_dir_all(self.folder.attempt(&id, 1).0).expect("created");
        let record = TrialRecord {
            id: id.clone(),
            label: row.row.label.clone(),
            purpose,
            configuration: row.configuration.clone(),
            block_size,
            repeat: 0,
            settings: row.row.effective.clone(),
        };
        store::write_json(&self.folder.trial(&id).join("trial.json"), &record).expect("written");
        id
    }

    fn say(&self, trial: &TrialId, kind: MessageKind) {
        let mut messages = JsonLines::append_to(&self.folder.attempt(trial, 1).messages()).expect("opened");
        messages.push(&Message { at: at(10), kind }).expect("written");
    }

    fn step(&self, trial: &TrialId, step: u64, loss: f64) {
        let step = Step {
            step,
            steps: 96,
            loss: Number(loss),
            grad_norm: Number(1.0),
            learning_rate: 1e-3,
            tokens: 512,
            step_seconds: 0.1,
            allocated_bytes: vec![1],
            peak_bytes: vec![1],
            loss_scale: None,
            skipped: false,
        };
        self.say(trial, MessageKind::Step(step));
    }

    fn end(&self, trial: &TrialId, outcome: TrialOutcome, stderr_tail: &str) {
        let record = AttemptRecord { trial: trial.clone(), attempt: 1, started_at: at(1), seconds: 2.0, outcome, stderr_tail: stderr_tail.into() };
        store::write_json(&self.folder.attempt(trial, 1).outcome(), &record).expect("written");
    }

    /// Exit code, and output with the folder's name and the time left out.
    fn status(&self) -> (Option<i32>, String) {
        let output = sweep_status(self.results.path());
        let text = String::from_utf8(output.stdout).expect("UTF-8") + &String::from_utf8(output.stderr).expect("UTF-8");
        (output.status.code(), text.replace(&*self.folder.0.to_string_lossy(), "RUN"))
    }
}

fn result(trial: &TrialId) -> TrialResult {
    TrialResult {
        protocol: PROTOCOL,
        trial: trial.clone(),
        ending: TrialEnding::Done,
        optimizer_steps: 96,
        skipped_steps: 0,
        tokens_seen: 1,
        evaluation: None,
        evaluation_common: None,
        timing: Timing::default(),
        peak_bytes: vec![1],
        host_bytes: vec![0],
        parameters: 1,
        data: DataCounts::default(),
        warnings: Vec::new(),
    }
}

fn sweep_status(results: &Path) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sweep"));
    command.args(["status", "--results"]).arg(results).env_clear().output().expect("sweep runs")
}

#[test]
fn a_running_run_is_shown_with_its_newest_step() {
    let world = World::new();
    let training = world.begin(0, Purpose::Train, 64);
    world.step(&training, 1, 6.5);
    world.step(&training, 2, 6.25);
    // The child is in the middle of its next line.
    let messages = world.folder.attempt(&training, 1).messages();
    let whole = fs::read_to_string(&messages).expect("readable");
    fs::write(&messages, format!("{whole}{{\"at\":\"2027-01")).expect("written");
    world.begin(1, Purpose::Probe, 128);
    let lock = RunLock::take(&world.folder, false).expect("locked");
    assert!(matches!(lock, LockAttempt::Taken { .. }));
    let (code, text) = world.status();
    assert_eq!(code, Some(0));
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].starts_with("running for "), "{text}");
    assert_eq!(
        [&lines[..1], &lines[2..]].concat().join("\n"),
        "demo  RUN
0 trials done, 0 failed, 2 running

State     Block size max  Steps    Loss  Perplexity  Method
training              64   2/96  6.2500              first
probing                                              second
waiting                                              third"
    );
}

/// CASES 8: failures with their reason and the last lines of their stderr.
#[test]
fn an_ended_run_shows_results_and_failures() {
    let mut world = World::new();
    let fits = world.begin(0, Purpose::Probe, 128);
    world.end(&fits, TrialOutcome::OutOfDeviceMemory { details: None }, "");
    let done = world.begin(0, Purpose::Train, 64);
    world.step(&done, 96, 5.25);
    for (block_size, perplexity) in [(64, 85.128), (32, 99.0)] {
        let evaluation = Evaluation { block_size, loss: Number(4.4), perplexity: Number(perplexity), scored_tokens: 1, seconds: 0.1 };
        world.say(&done, MessageKind::Eval { step: 96, evaluation });
    }
    store::write_json(&world.folder.attempt(&done, 1).result(), &result(&done)).expect("written");
    world.end(&done, TrialOutcome::Done, "");
    let failed = world.begin(1, Purpose::Train, 128);
    world.step(&failed, 3, f64::NAN);
    world.end(&failed, TrialOutcome::Diverged { reason: "the loss is NaN".into() }, "rank 0 says\n\u{1b}[31mNaN\u{1b}[0m\n");
    let nothing = EventKind::BlockSizeFound {
        configuration: ConfigurationId("third".into()),
        label: "third".into(),
        block_size: None,
        limited_by: LimitedBy::Memory,
    };
    world.event(60, nothing);
    world.event(112, EventKind::RunEnded { exit_code: 100, done: 2, failed: 1, outstanding: 0 });
    fs::create_dir(world.folder.report()).expect("created");
    let (code, text) = world.status();
    assert_eq!(code, Some(0));
    assert_eq!(
        text,
        "demo  RUN
ended after 1:52 with exit code 100: at least one trial failed
2 trials done, 1 failed, 0 running

State         Block size max  Steps    Loss  Perplexity  Method
done                      64  96/96  5.2500       85.13  first
failed                   128   3/96     NaN              second
nothing fits                                             third

Failed trials:
  train  block 128  second: diverged: the loss is NaN
    RUN/trials/second-train-128/attempt-1
    | rank 0 says
    | NaN

Report: RUN/report
"
    );
}

/// CASES 5: a damaged line is named, the trials' own folders still tell how they stand.
#[test]
fn a_cut_off_run_with_damaged_events_is_shown() {
    let mut world = World::new();
    let done = world.begin(0, Purpose::Probe, 64);
    world.end(&done, TrialOutcome::Done, "");
    let begun = world.begin(0, Purpose::Train, 64);
    world.step(&begun, 5, 6.0);
    let text = fs::read_to_string(world.folder.events()).expect("readable");
    fs::write(world.folder.events(), format!("{text}{{\"at\":\n")).expect("written");
    world.event(30, EventKind::Notice { text: "late".into() });
    let (code, text) = world.status();
    assert_eq!(code, Some(0));
    assert!(text.contains("\ncut off after 0:30: "), "{text}");
    assert!(text.contains("\n1 trial done, 0 failed, 0 running\n"), "{text}");
    assert!(text.contains("\nunfinished              64   5/96  6.0000              first\n"), "{text}");
    assert!(text.contains("\nCannot be read:\n  events.jsonl, line 2: "), "{text}");
    fs::remove_file(world.folder.events()).expect("removed");
    assert!(world.status().1.contains("\n1 trial done, 0 failed, 0 running\n"));
}

#[test]
fn without_a_run_the_command_says_where_it_looked() {
    let results = tempfile::tempdir().expect("temporary folder");
    let output = sweep_status(results.path());
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(stderr, format!("error: there is no run in {}\nhint: `--results DIR` says where results are looked for\n", results.path().display()));
}

/// CASES 40.
#[test]
fn a_run_of_a_newer_format_is_refused_by_name() {
    let world = World::new();
    fs::write(world.folder.manifest(), r#"{"format_version": 99, "sweep_version": "7.1.0"}"#).expect("written");
    let (code, text) = world.status();
    assert_eq!(code, Some(2));
    assert_eq!(text, "error: RUN has results format 99, this sweep reads up to 1; use sweep 7.1.0 or newer\n");
}
