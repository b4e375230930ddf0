//! Against a real cluster, one test at a time: `.ci/slurm` starts it. Signals and requeues are sent by the tests themselves, because SLURM's own time limits
//! are minutes.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sweep::event::{Event, EventKind};
use sweep::store::read_json_lines;
use sweep::trial::TrialOutcome;

use super::{array, batches, ends, quick};
use crate::world::{Ended, TWO_CASES, World, lives, signal, trainings, wait_until};

/// Where the cluster lives.
fn cluster() -> PathBuf {
    std::env::var_os("SWEEP_TEST_CLUSTER").expect("SWEEP_TEST_CLUSTER names the folder of a running cluster: see .ci/slurm").into()
}

fn configuration() -> PathBuf {
    cluster().join("slurm.conf")
}

fn start(world: &World, arguments: &[&str]) -> Child {
    let arguments = [&["run", "sweep.toml", "--launcher", "slurm"], arguments].concat();
    let mut command = world.command(&arguments);
    command.env("SLURM_CONF", configuration()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn run(world: &World, arguments: &[&str]) -> Ended {
    Ended::of(start(world, arguments).wait_with_output().unwrap())
}

/// What one of SLURM's programs prints.
fn slurm(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("SLURM_CONF", configuration()).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The task of the only array, once it runs a trial that waits.
fn only_task(world: &World) -> String {
    wait_until("the trial waits", || world.first_messages().is_some_and(|text| text.contains("\"step\"")) && array(world, "1").is_some());
    format!("{}_1", array(world, "1").unwrap())
}

/// Waits until a task that was put back into the queue has begun again: SLURM itself would wait for two minutes, and it takes no task that begins in the
/// second of its requeue.
fn begin_again(world: &World, task: &str) {
    let nudged = Cell::new(false);
    wait_until("the trial begins again", || {
        let waits = || slurm("squeue", &["--noheader", "--array", "--states=all", "--format=%T %r", "--jobs", task]) == "PENDING BeginTime";
        if !nudged.get() && waits() {
            slurm("scontrol", &["update", &format!("jobid={task}"), "StartTime=now+2"]);
            nudged.set(true);
        }
        world.begun().len() == 2
    });
}

fn kill_nine(mut run: Child) {
    run.kill().unwrap();
    run.wait().unwrap();
}

/// Kills what runs of an array, as the loss of its node would: first what would tell of it.
fn kill_processes(array: &str) {
    let daemon = format!("slurmstepd: [{array}.");
    let mark = format!("SLURM_ARRAY_JOB_ID={array}");
    let is_daemon = |process: &Path| fs::read(process.join("cmdline")).is_ok_and(|text| text.starts_with(daemon.as_bytes()));
    let is_marked = |process: &Path| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    let kinds: [&dyn Fn(&Path) -> bool; 2] = [&is_daemon, &is_marked];
    for belongs in kinds {
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(process) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
            if belongs(&entry.path()) {
                let _ = kill_process(Pid::from_raw(process).unwrap(), Signal::KILL);
            }
        }
    }
}

fn all_done(world: &World, count: usize) {
    let outcomes = world.outcomes();
    assert!(outcomes.len() == count && outcomes.iter().all(|trial| trial.3 == TrialOutcome::Done), "{outcomes:?}");
}

#[test]
#[ignore = "needs a SLURM cluster: .ci/slurm starts one"]
fn a_sweep_runs_to_its_end() {
    let world = World::new(&quick(TWO_CASES, "array_limit = 1\nsetup = [\"export SEEN=1\"]\n"));
    let ended = run(&world, &[]).with_code(0);
    assert!(ended.stderr.contains("holds 2 trials") || ended.stdout.contains("holds 2 trials"), "{}{}", ended.stdout, ended.stderr);
    let trained: Vec<_> = world.outcomes().into_iter().filter(|trial| trial.3 == TrialOutcome::Done).map(|trial| (trial.0, trial.2)).collect();
    assert!(trained.contains(&("plain".into(), 512)) && trained.contains(&("checkpointed".into(), 1024)), "{trained:?}");
    assert_eq!(ends(&world), world.begun().len());
    for trial in world.state().trials.keys() {
        let attempt = world.newest().attempt(trial, 1);
        assert!(attempt.exit().exists() && attempt.stdout().exists() && attempt.outcome().exists());
    }
}

/// Twelve trials are one array. The submitter is killed while they run, and again while nobody looks they end: none runs twice.
#[test]
#[ignore = "needs a SLURM cluster: .ci/slurm starts one"]
fn jobs_outlive_the_submitter_and_are_found_again() {
    let mut world = World::new(&quick(&trainings(12), ""));
    let go = world.path("go");
    world.behave(&json!([{"do": {"wait_for": go}}]));
    let first = start(&world, &[]);
    wait_until("all trials run", || world.begun().len() == 12);
    kill_nine(first);
    let second = start(&world, &[]);
    let begun = |event: &Event| matches!(event.kind, EventKind::RunStarted { .. });
    let runs = || read_json_lines::<Event>(&world.newest().events()).unwrap().records.iter().filter(|event| begun(event)).count();
    wait_until("the second run took over", || runs() == 2);
    kill_nine(second);
    fs::write(&go, "").unwrap();
    wait_until("the trials end", || ends(&world) == 12);
    run(&world, &["--resume"]).with_code(0);
    all_done(&world, 12);
    assert_eq!((world.begun().len(), batches(&world).len()), (12, 1));
}

#[test]
#[ignore = "needs a SLURM cluster: .ci/slurm starts one"]
fn a_signal_cancels_the_jobs() {
    let mut world = World::new(&quick(&trainings(3), "array_limit = 2\n"));
    world.behave(&json!([{"do": {"wait_for": ""}}]));
    let interrupted = start(&world, &[]);
    wait_until("two trials run", || world.begun().len() == 2);
    let processes: Vec<u32> = world.log().iter().map(|line| line[5].parse().unwrap()).collect();
    signal(&interrupted, Signal::INT);
    Ended::of(interrupted.wait_with_output().unwrap()).with_code(5);
    let job = array(&world, "1").unwrap();
    let states = slurm("squeue", &["--noheader", "--array", "--states=PENDING,RUNNING", "--format=%i", "--jobs", &job]);
    assert_eq!(states, "");
    wait_until("nothing of the trials is left", || processes.iter().all(|process| !lives(*process)));
    world.behave(&json!([]));
    run(&world, &[]).with_code(0);
    all_done(&world, 3);
}

/// The warning ahead of the time limit, sent by hand to the batch script as SLURM would: the trial saves its state, its task goes back into the queue by
/// itself and goes on as the same attempt.
#[test]
#[ignore = "needs a SLURM cluster: .ci/slurm starts one"]
fn the_warning_makes_a_trial_save_its_state_and_go_on() {
    let mut world = World::new(&quick(&trainings(1), ""));
    let go = world.path("go");
    world.behave(&json!([{"do": {"wait_for": go, "checkpoint_on_term": true}}]));
    let sweep = start(&world, &[]);
    let task = only_task(&world);
    slurm("scancel", &["--batch", "--signal=USR2", &task]);
    begin_again(&world, &task);
    fs::write(&go, "").unwrap();
    let ended = Ended::of(sweep.wait_with_output().unwrap()).with_code(0);
    all_done(&world, 1);
    assert_eq!(world.begun(), ["train 64 #1", "train 64 #1"], "{}{}", ended.stdout, ended.stderr);
    let log = fs::read_to_string(world.newest().slurm().join("1/1.log")).unwrap();
    assert!(log.contains("start 1 of") && log.contains("start 2 of"), "{log}");
}

/// A task that somebody puts back into the queue has not failed, though its processes were killed for it.
#[test]
#[ignore = "needs a SLURM cluster: .ci/slurm starts one"]
fn a_task_that_is_requeued_has_not_failed() {
    let mut world = World::new(&quick(&trainings(1), ""));
    let go = world.path("go");
    world.behave(&json!([{"do": {"wait_for": go}}]));
    let sweep = start(&world, &[]);
    let task = only_task(&world);
    slurm("scontrol", &["requeue", &task]);
    begin_again(&world, &task);
    fs::write(&go, "").unwrap();
    Ended::of(sweep.wait_with_output().unwrap()).with_code(0);
    all_done(&world, 1);
    assert_eq!(world.begun(), ["train 64 #1", "train 64 #1"]);
}

#[test]
#[ignore = "needs a SLURM cluster: .ci/slurm starts one"]
fn a_trial_whose_node_is_lost_runs_on_another() {
    let mut world = World::new(&quick(&trainings(1), ""));
    let go = world.path("go");
    world.behave(&json!([{"do": {"wait_for": go}}]));
    let sweep = start(&world, &[]);
    let task = only_task(&world);
    let node = slurm("squeue", &["--noheader", "--array", "--format=%N", "--jobs", &task]);
    let pid_file = cluster().join(format!("slurmd.{node}.pid"));
    let daemon: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    kill_process(Pid::from_raw(daemon).unwrap(), Signal::KILL).unwrap();
    kill_processes(task.split('_').next().unwrap());
    slurm("scontrol", &["update", &format!("nodename={node}"), "state=down", "reason=test"]);
    begin_again(&world, &task);
    fs::write(&go, "").unwrap();
    let ended = sweep.wait_with_output().unwrap();
    // The other tests want their node back, whatever came of this one.
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/slurm/cluster");
    assert!(Command::new(script).arg("node").arg(cluster()).arg(&node).status().unwrap().success());
    Ended::of(ended).with_code(0);
    all_done(&world, 1);
    assert_eq!(world.begun(), ["train 64 #1", "train 64 #1"]);
}

/// In an allocation trials are steps of it, beside each other as far as it has room, and nothing is submitted. Steps end with the sweep that started them.
#[test]
#[ignore = "needs a SLURM cluster: .ci/slurm starts one"]
fn in_an_allocation_trials_are_steps() {
    let mut world = World::new(&quick(&trainings(3), ""));
    let run_in = |world: &World, arguments: &[&str]| {
        let sweep = world.command(&[&["run", "sweep.toml", "--launcher", "slurm"], arguments].concat());
        let mut command = Command::new("salloc");
        command.args(["--quiet", "--nodes=1", "--ntasks=1", "--cpus-per-task=4"]).arg(sweep.get_program()).args(sweep.get_args());
        command.current_dir(world.path("")).env_clear();
        let variables = sweep.get_envs().filter_map(|(name, value)| Some((name, value?)));
        command.envs(variables).env("SLURM_CONF", configuration()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ended = Ended::of(run_in(&world, &[]).wait_with_output().unwrap()).with_code(0);
    assert!((ended.stdout.clone() + &ended.stderr).contains("Trials run as steps of SLURM job"), "{}{}", ended.stdout, ended.stderr);
    all_done(&world, 3);
    assert_eq!(batches(&world), [""; 0]);
    // Two ranks each: two trials at a time on four cores.
    let alive = |upto: usize| world.log()[..upto].iter().fold(0_i32, |alive, line| alive + if line[0] == "begin" { 1 } else { -1 });
    assert!((1..=world.log().len()).all(|upto| alive(upto) <= 2), "{:?}", world.log());

    world.forget_log();
    world.behave(&json!([{"do": {"wait_for": ""}}]));
    let interrupted = run_in(&world, &["--new"]);
    wait_until("two trials run", || world.begun().len() == 2);
    let processes: Vec<u32> = world.log().iter().map(|line| line[5].parse().unwrap()).collect();
    let sweep = fs::read_to_string(format!("/proc/{0}/task/{0}/children", interrupted.id())).unwrap();
    let sweep: i32 = sweep.split_whitespace().next().unwrap().parse().unwrap();
    kill_process(Pid::from_raw(sweep).unwrap(), Signal::INT).unwrap();
    drop(interrupted.wait_with_output().unwrap());
    wait_until("nothing of the trials is left", || processes.iter().all(|process| !lives(*process)));
}
