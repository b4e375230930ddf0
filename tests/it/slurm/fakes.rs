//! Against programs that play SLURM's: what a real cluster does seldom, or not on demand.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sweep::trial::TrialOutcome;

use super::{array, batches, ends, quick};
use crate::world::{Ended, World, trainings, wait_until};

/// A world with a SLURM in it.
fn with_slurm(sweep: &str) -> World {
    let world = World::new(sweep);
    fs::create_dir(world.path("bin")).unwrap();
    fs::create_dir(world.path("slurm")).unwrap();
    for program in ["sbatch", "squeue", "scancel", "sacct", "srun", "scontrol"] {
        let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakes/slurm");
        symlink(fake, world.path("bin").join(program)).unwrap();
    }
    world
}

/// The fakes before everything else.
fn path(world: &World) -> OsString {
    let mut path: OsString = world.path("bin").into();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    path
}

fn start(world: &World, arguments: &[&str]) -> Child {
    let arguments = [&["run", "sweep.toml", "--launcher", "slurm"], arguments].concat();
    let mut command = world.command(&arguments);
    command.env("PATH", path(world)).env("FAKE_SLURM", world.path("slurm"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn run(world: &World, arguments: &[&str]) -> Ended {
    Ended::of(start(world, arguments).wait_with_output().unwrap())
}

fn set(world: &World, name: &str, contents: &str) {
    fs::write(world.path("slurm").join(name), contents).unwrap();
}

/// How often a program was called with these first words.
fn calls(world: &World, words: &str) -> usize {
    fs::read_to_string(world.path("slurm/calls")).unwrap_or_default().lines().filter(|line| line.starts_with(words)).count()
}

fn only_outcome(world: &World) -> TrialOutcome {
    let [(.., outcome)] = &world.outcomes()[..] else { panic!("{:?}", world.outcomes()) };
    outcome.clone()
}

#[test]
fn what_slurm_would_not_take_is_refused_before_anything_starts() {
    let world = with_slurm(&quick(&trainings(1), ""));
    set(&world, "refuse", "sbatch: error: invalid partition specified: gpuu\n");
    let ended = run(&world, &[]).with_code(2);
    assert!(ended.stderr.contains("SLURM would not take the jobs: sbatch: sbatch: error: invalid partition specified: gpuu"), "{}", ended.stderr);
    assert!(!world.path("results").exists());
    set(&world, "refuse", "sbatch: error: Unable to contact slurm controller (connect failure)\n");
    run(&world, &[]).with_code(75);
}

/// The trainer runs all ranks in one process; a program that can do more is asked in our place.
#[test]
fn several_nodes_are_refused_by_name() {
    let world = with_slurm(&quick(&trainings(1), "nodes = 2\n"));
    let mut command = world.command(&["run", "sweep.toml", "--launcher", "slurm"]);
    let output = command.env_remove("SWEEP_TRIAL_PROGRAM").env("PATH", path(&world)).env("FAKE_SLURM", world.path("slurm")).output().unwrap();
    let ended = Ended::of(output).with_code(2);
    assert!(ended.stderr.contains("slurm.nodes = 2: sweep's own trainer runs all ranks of a trial on one node"), "{}", ended.stderr);
    assert_eq!(calls(&world, "sbatch"), 0);
    run(&world, &[]).with_code(0);
    let trial = world.state().trials.into_keys().next().unwrap();
    let request = fs::read_to_string(world.newest().attempt(&trial, 1).request()).unwrap();
    let request: serde_json::Value = serde_json::from_str(&request).unwrap();
    assert_eq!(request["placement"], json!({"nodes": 2, "ranks_per_node": 1}));
}

/// The submitter dies between SLURM's taking the jobs and its own record of them: the name of the jobs tells.
#[test]
fn a_submission_without_a_record_is_found_by_its_name() {
    let world = with_slurm(&quick(&trainings(2), ""));
    set(&world, "kill", "");
    assert_eq!(run(&world, &[]).code, None);
    assert_eq!(array(&world, "1"), None);
    wait_until("the trials end", || ends(&world) == 2);
    run(&world, &[]).with_code(0);
    assert_eq!((world.begun().len(), batches(&world).len(), calls(&world, "sbatch --parsable")), (2, 1, 1));
    assert_eq!(array(&world, "1").as_deref(), Some("41"));
}

/// Without `scontrol` on the nodes a trial that saved its state is submitted again, and the user hears of it.
#[test]
fn where_scontrol_is_absent_the_next_attempt_is_submitted() {
    let mut world = with_slurm(&quick(&trainings(1), ""));
    world.behave(&json!([{"when": {"attempts_up_to": 1}, "do": {"wait_for": "", "checkpoint_on_term": true}}]));
    let sweep = start(&world, &[]);
    wait_until("the trial waits", || world.first_messages().is_some_and(|text| text.contains("\"step\"")));
    let process: i32 = world.log()[0][5].parse().unwrap();
    kill_process(Pid::from_raw(process).unwrap(), Signal::USR2).unwrap();
    Ended::of(sweep.wait_with_output().unwrap()).with_code(0);
    assert_eq!(world.begun(), ["train 64 #1", "train 64 #2"]);
    let notices = world.state().notices;
    assert!(notices.iter().any(|text| text.contains("SLURM job 41_1 saved its state and could not go back into the queue by itself")), "{notices:?}");
}

/// The queue may be deaf for a while: how trials end is read from their files.
#[test]
fn a_deaf_queue_stops_nothing() {
    let world = with_slurm(&quick(&trainings(2), ""));
    set(&world, "deaf", "");
    run(&world, &[]).with_code(0);
    let notices = world.state().notices;
    assert!(notices.iter().any(|text| text.contains("The queue cannot be asked: squeue: slurm_load_jobs error")), "{notices:?}");
    assert_eq!(ends(&world), 2);
}

#[test]
fn what_the_queue_says_of_an_end_becomes_an_outcome() {
    let world = with_slurm(&quick(&trainings(1), "").replace("[limits]", "[limits]\nretries = 0"));
    set(&world, "idle", "NODE_FAIL");
    run(&world, &[]).with_code(75);
    assert!(matches!(only_outcome(&world), TrialOutcome::Infrastructure { reason } if reason == "SLURM job 41_1 lost its node"));
    set(&world, "idle", "OUT_OF_MEMORY");
    run(&world, &[]).with_code(100);
    assert!(matches!(only_outcome(&world), TrialOutcome::OutOfHostMemory { .. }));
}

/// A job that the queue has forgotten is looked up in the accounting, where that works.
#[test]
fn a_forgotten_job_is_looked_up_in_the_accounting() {
    let world = with_slurm(&quick(&trainings(1), "").replace("[limits]", "[limits]\nretries = 0"));
    set(&world, "forget", "");
    run(&world, &[]).with_code(75);
    assert!(matches!(only_outcome(&world), TrialOutcome::Infrastructure { reason } if reason.contains("is no longer known to SLURM")));
    set(&world, "sacct", "TIMEOUT\n");
    run(&world, &[]).with_code(100);
    assert!(matches!(only_outcome(&world), TrialOutcome::TimedOut { .. }));
}

/// A run that has jobs with SLURM does not go on without it: its trials could run twice.
#[test]
fn jobs_that_run_are_not_forgotten_by_another_launcher() {
    let mut world = with_slurm(&quick(&trainings(1), ""));
    let go = world.path("go");
    world.behave(&json!([{"do": {"wait_for": go}}]));
    let mut killed = start(&world, &[]);
    wait_until("the trial runs", || world.begun().len() == 1 && array(&world, "1").is_some());
    killed.kill().unwrap();
    killed.wait().unwrap();
    let mut command = world.command(&["run", "sweep.toml", "--resume"]);
    let output = command.env("PATH", path(&world)).env("FAKE_SLURM", world.path("slurm")).output().unwrap();
    let ended = Ended::of(output).with_code(2);
    fs::write(&go, "").unwrap();
    assert!(ended.stderr.contains("go on with --launcher slurm"), "{}", ended.stderr);
    run(&world, &[]).with_code(0);
    assert_eq!(world.begun(), ["train 64 #1"]);
}
