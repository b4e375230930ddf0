//! A sweep that is killed at random moments, again and again, and goes on each time: the report is an undisturbed run's, and every trial ran to its end once.
//!
//! `SWEEP_CHAOS_ROUNDS` sets how many sweeps are tormented, `SWEEP_CHAOS_SEED` when. A failure names the seed of its round.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sweep::store::{RunFolder, RunState};
use sweep::trial::TrialOutcome;

use crate::world::{World, wait_until};

/// Thirty-two trials: eight configurations, each with three probes and its training.
const SWEEP: &str = r#"
[sweep]
name = "chaos"
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
[search.block_size]
candidates = [64, 96, 128, 192, 256, 384, 512, 768, 1024]
[grid]
train.learning_rate = [1e-5, 2e-5]
fsdp.activation_checkpointing = [false, true]
fsdp.use_orig_params = [false, true]
"#;

/// A small generator of numbers (xorshift), so that a seed says everything.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit.max(1)
    }
}

fn number_of(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Every file of a report that says what the trials came to, by name: the tables and the plots. What tells of the run itself is left out: how long it took, how often
/// it was cut off, and what the machine's memory looked like meanwhile.
fn report(run: &RunFolder) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    for folder in [run.report(), run.report().join("plots")] {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let text = path.extension().is_some_and(|extension| ["csv", "md", "tex", "svg"].iter().any(|known| extension == *known));
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if text && name != "report.md" && !name.starts_with("memory") {
                files.insert(name, fs::read_to_string(&path).unwrap());
            }
        }
    }
    files
}

/// How many attempts of each trial wrote a result or ran out of memory, by the trial's id.
fn ends(world: &World) -> BTreeMap<String, usize> {
    let run = world.newest();
    let ended = |id: &sweep::trial::TrialId, attempt: u32| {
        let attempt = run.attempt(id, attempt);
        attempt.result().exists() || fs::read_to_string(attempt.messages()).is_ok_and(|text| text.contains("\"kind\":\"oom\""))
    };
    let state = world.state();
    state.trials.iter().map(|(id, trial)| (id.0.clone(), (1..=trial.attempts).filter(|attempt| ended(id, *attempt)).count())).collect()
}

/// Whether any process still carries the mark of a trial of this world.
fn haunted(world: &Path) -> bool {
    let mark = format!("SWEEP_ATTEMPT={}", world.display());
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok).filter_map(|entry| fs::read(entry.path().join("environ")).ok());
    processes.into_iter().any(|environment| environment.split(|byte| *byte == 0).any(|variable| variable.starts_with(mark.as_bytes())))
}

#[test]
fn killing_the_run_at_any_moment_loses_nothing() {
    let undisturbed = World::new(SWEEP);
    let began = Instant::now();
    undisturbed.run(&["--jobs", "2"]).with_code(0);
    // Three at a time take longer than one alone.
    let length = began.elapsed() * 2;
    let expected = report(&undisturbed.newest());
    let trials = ends(&undisturbed);
    assert_eq!(trials.len(), 32);
    assert!(expected.len() >= 8, "{:?}", expected.keys());

    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let first_seed = number_of("SWEEP_CHAOS_SEED").unwrap_or(now);
    let rounds = number_of("SWEEP_CHAOS_ROUNDS").unwrap_or(50);
    let next = AtomicU64::new(0);
    let torment = || {
        loop {
            let round = next.fetch_add(1, Ordering::Relaxed);
            if round >= rounds {
                return;
            }
            torment(first_seed.wrapping_add(round), length, &trials, &expected);
        }
    };
    // A round waits more than it computes.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(torment);
        }
    });
}

/// One sweep that would take `length`, killed a few times and then left alone.
fn torment(seed: u64, length: Duration, trials: &BTreeMap<String, usize>, expected: &BTreeMap<String, String>) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let world = World::new(SWEEP);
    let jobs = ["1", "2"][random.below(2) as usize];
    for _ in 0..1 + random.below(4) {
        let mut run = world.start(&["--jobs", jobs]);
        std::thread::sleep(Duration::from_micros(random.below(length.as_micros() as u64)));
        let _ = run.kill();
        run.wait_with_output().unwrap();
    }
    let ended = world.run(&["--jobs", jobs]);
    // The last kill may have come after the last trial, so that nothing but the report was missing.
    assert_eq!(ended.code, Some(0), "SWEEP_CHAOS_SEED={seed}: {ended:?}");
    assert_eq!(ends(&world), *trials, "SWEEP_CHAOS_SEED={seed}: how often each trial ran to its end");
    assert!(world.outcomes().iter().all(|trial| matches!(trial.3, TrialOutcome::Done | TrialOutcome::OutOfDeviceMemory { .. })));
    // The same run goes on, unless it was finished when the kill came.
    let newest = world.newest();
    let runs = fs::read_dir(world.path("results").join("chaos")).unwrap().filter_map(Result::ok).map(|run| RunFolder(run.path()));
    for earlier in runs.filter(|run| !run.0.is_symlink() && run.manifest().exists() && run.name() != newest.name()) {
        let state = RunState::read(&earlier).unwrap();
        assert_eq!(state.exit_code, Some(0), "SWEEP_CHAOS_SEED={seed}: {} was left unfinished", earlier.name());
    }
    for (name, contents) in report(&world.newest()) {
        let differing: Vec<&str> = contents.lines().filter(|line| !expected[&name].lines().any(|other| other == *line)).collect();
        assert!(contents == expected[&name], "SWEEP_CHAOS_SEED={seed}: {name} differs: {differing:#?}");
    }
    wait_until("nothing is left of the trials", || !haunted(&world.path("")));
}
