//! A world of its own for each test that starts `sweep`: a folder, a clean environment, the fake trial program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sweep::store::{RunFolder, RunState, newest_run};
use sweep::trial::{Purpose, TrialOutcome};
use tempfile::TempDir;

/// A sweep of two configurations on two ranks of 2 MiB. The fake trial program needs 512 KiB and 2 KiB for each token of a block, or half of that with
/// activation checkpointing: the first case fits up to 512 tokens, the second up to the 1024 positions of the model.
pub(crate) const TWO_CASES: &str = r#"
[sweep]
name = "two"
[model]
id = "gpt2-tiny"
init = "random"
[data]
dataset = { synthetic = { vocab = 64, train_tokens = 65536, eval_tokens = 4096 } }
[train]
per_device_train_batch_size = 2
max_steps = 4
[device]
kind = "cpu"
world_size = 2
memory = "2MiB"
[limits]
grace_period = "60s"
[search.block_size]
candidates = [128, 256, 512, 1024, 2048]
[[case]]
label = "plain"
[[case]]
label = "checkpointed"
fsdp.activation_checkpointing = true
"#;

/// A sweep of `count` trainings without a search, labelled `t1`, `t2` ...
pub(crate) fn trainings(count: usize) -> String {
    let shared = TWO_CASES.split("[search.block_size]").next().unwrap_or_default().replace("\"two\"", "\"trainings\"");
    let mut text = shared.replace("max_steps = 4", "max_steps = 4\nblock_size = 64");
    for number in 1..=count {
        text.push_str(&format!("[[case]]\nlabel = \"t{number}\"\ntrain.learning_rate = {number}e-5\n"));
    }
    text
}

pub(crate) struct World {
    folder: TempDir,
    fake: Value,
    pub(crate) program: PathBuf,
}

impl World {
    /// A world with a sweep file.
    pub(crate) fn new(sweep: &str) -> Self {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("sweep.toml"), sweep).unwrap();
        let mut world = Self { folder, fake: Value::Null, program: env!("CARGO_BIN_EXE_fake-trial").into() };
        world.behave(&json!([]));
        world
    }

    /// Trials behave by these rules from now on.
    pub(crate) fn behave(&mut self, rules: &Value) {
        self.fake = json!({"log": self.path("trials.log"), "rules": rules});
    }

    /// Trials need this memory from now on.
    pub(crate) fn need(&mut self, memory: &Value) {
        self.fake["memory"] = memory.clone();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `sweep` with these arguments, not yet started.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sweep"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("SWEEP_TRIAL_PROGRAM", &self.program)
            .env("SWEEP_FAKE", self.fake.to_string())
            .env("SWEEP_CACHE", self.path("cache"))
            .env("HF_HOME", self.path("hub"))
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null());
        command
    }

    /// Runs `sweep run sweep.toml` with more arguments to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ended {
        Ended::of(self.command(&[&["run", "sweep.toml"], arguments].concat()).output().unwrap())
    }

    /// Starts `sweep run sweep.toml` with more arguments.
    pub(crate) fn start(&self, arguments: &[&str]) -> Child {
        let mut command = self.command(&[&["run", "sweep.toml"], arguments].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// What trials logged, line by line, each split at its blanks: `begin|end`, id, purpose, block size, attempt, process,
    /// cores, `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER`, `MASTER_PORT`.
    pub(crate) fn log(&self) -> Vec<Vec<String>> {
        let text = fs::read_to_string(self.path("trials.log")).unwrap_or_default();
        text.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
    }

    /// How often trials of any id began, by what `line` makes of the log's lines.
    pub(crate) fn begun(&self) -> Vec<String> {
        self.log().into_iter().filter(|line| line[0] == "begin").map(|line| format!("{} {} #{}", line[2], line[3], line[4])).collect()
    }

    pub(crate) fn forget_log(&self) {
        fs::remove_file(self.path("trials.log")).unwrap();
    }

    /// The newest run of the only sweep.
    pub(crate) fn newest(&self) -> RunFolder {
        newest_of(&self.path("results"))
    }

    /// The messages of the first attempt of any trial, if there are any yet.
    pub(crate) fn first_messages(&self) -> Option<String> {
        let id = self.log().first()?.get(1)?.clone();
        fs::read_to_string(self.newest().attempt(&sweep::trial::TrialId(id), 1).messages()).ok()
    }

    pub(crate) fn state(&self) -> RunState {
        RunState::read(&self.newest()).unwrap()
    }

    /// How trials ended: label, purpose, block size, outcome, sorted.
    pub(crate) fn outcomes(&self) -> Vec<(String, Purpose, usize, TrialOutcome)> {
        let state = self.state();
        let trials = state.trials.into_values().filter_map(|trial| {
            let outcome = trial.outcome()?.clone();
            Some((trial.record.label, trial.record.purpose, trial.record.block_size, outcome))
        });
        let mut outcomes: Vec<_> = trials.collect();
        outcomes.sort_by_key(|(label, purpose, block_size, _)| (label.clone(), *purpose == Purpose::Train, *block_size));
        outcomes
    }
}

/// The newest run of the only sweep in a results folder.
pub(crate) fn newest_of(results: &Path) -> RunFolder {
    let sweep = fs::read_dir(results).unwrap().next().unwrap().unwrap().file_name();
    newest_run(results, &sweep.to_string_lossy()).unwrap().unwrap()
}

/// A process of `sweep` that ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn of(output: Output) -> Self {
        Self { code: output.status.code(), stdout: String::from_utf8(output.stdout).unwrap(), stderr: String::from_utf8(output.stderr).unwrap() }
    }

    /// Asserts the exit code, and shows everything where it is another.
    #[track_caller]
    pub(crate) fn with_code(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }
}

/// Waits until `condition` holds.
#[track_caller]
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < limit, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Sends a signal to a process of ours.
pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
}

/// Whether a process lives: it exists and is no zombie.
pub(crate) fn lives(process: u32) -> bool {
    let Ok(stat) = fs::read_to_string(Path::new("/proc").join(process.to_string()).join("stat")) else { return false };
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']))
}
