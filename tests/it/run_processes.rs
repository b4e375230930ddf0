//! Nothing of a trial survives it, and nothing ends a trial that should not: `sweep run` and the processes of its trials.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sweep::trial::TrialOutcome;

use crate::world::{Ended, World, lives, signal, trainings, wait_until};

fn number(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Field `field` of `/proc/<process>/stat`, numbered as in proc(5).
fn stat(process: u32, field: usize) -> u32 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_ascii_whitespace().nth(field - 3).unwrap().parse().unwrap()
}

fn parent(process: u32) -> u32 {
    stat(process, 4)
}

fn kill(process: u32) {
    kill_process(Pid::from_raw(process.try_into().unwrap()).unwrap(), Signal::KILL).unwrap();
}

/// A world with one trial that waits for ever with a grandchild of its group and a daemon, all deaf to TERM.
struct Family {
    world: World,
    grandchild: PathBuf,
    daemon: PathBuf,
}

impl Family {
    fn new(daemon_drops_environment: bool) -> Self {
        let mut world = World::new(&trainings(1).replace("60s", "20ms"));
        let (grandchild, daemon) = (world.path("grandchild"), world.path("daemon"));
        world.behave(&json!([{"when": {"attempts_up_to": 1}, "do": {
            "ignore_term": true, "grandchild": grandchild, "daemon": daemon, "daemon_drops_environment": daemon_drops_environment, "wait_for": "",
        }}]));
        Self { world, grandchild, daemon }
    }

    /// Starts `sweep run`; returns it and its supervisor, trial, grandchild and daemon.
    fn start(&self) -> (Child, [u32; 4]) {
        let run = self.world.start(&[]);
        let trains = || self.world.first_messages().is_some_and(|text| text.contains("\"step\""));
        wait_until("the family is complete", || self.grandchild.exists() && number(&self.daemon).is_some() && trains());
        let trial = self.world.log()[0][5].parse().unwrap();
        let family = [parent(trial), trial, number(&self.grandchild).unwrap(), number(&self.daemon).unwrap()];
        assert!(family.iter().all(|process| lives(*process)), "{family:?}");
        assert_eq!(parent(family[0]), run.id());
        let sessions: Vec<u32> = family.iter().map(|process| stat(*process, 6)).collect();
        assert_eq!((sessions[1], sessions[2]), (trial, trial), "the trial has a session of its own, its child is in it");
        assert_ne!(sessions[3], trial, "the daemon has left it");
        assert_ne!(stat(family[0], 5), stat(run.id(), 5), "Ctrl-C reaches the run alone");
        (run, family)
    }
}

fn gone(family: &[u32]) -> bool {
    family.iter().all(|process| !lives(*process))
}

/// Cases 11 and 12: a daemon that left the trial's session and keeps its log open, and a process that ignores TERM. The run waits for neither.
#[test]
fn an_ended_trial_takes_its_whole_family_with_it() {
    for drops_environment in [false, true] {
        let family = Family::new(drops_environment);
        let (run, processes) = family.start();
        signal(&run, Signal::TERM);
        Ended::of(run.wait_with_output().unwrap()).with_code(5);
        assert!(gone(&processes), "{processes:?}");
        assert_eq!(family.world.outcomes()[0].3, TrialOutcome::KilledByUser);
    }
}

/// Case 11 where nobody ends the trial: it ends well and leaves a daemon behind that holds its log open.
#[test]
fn a_trial_that_ends_well_leaves_nothing_behind() {
    let mut world = World::new(&trainings(2));
    let (grandchild, daemon) = (world.path("grandchild"), world.path("daemon"));
    world.behave(&json!([{"when": {"label": "t1"}, "do": {"grandchild": grandchild, "daemon": daemon, "daemon_drops_environment": true}}]));
    world.run(&[]).with_code(0);
    assert!(gone(&[number(&grandchild).unwrap(), number(&daemon).unwrap()]));
    assert_eq!(world.log().iter().filter(|line| line[0] == "end").count(), 2);
}

/// Case 12, word for word.
#[test]
fn a_shell_that_waits_for_its_worker_and_ignores_term_is_ended_with_it() {
    let mut world = World::new(&trainings(1).replace("60s", "20ms"));
    let script = "#!/bin/sh\ntrap '' TERM\nsh -c 'trap \"\" TERM; echo $$ > worker; while :; do sleep 0.01; done' &\necho $$ > shell\nwait\n";
    world.program = world.path("program");
    fs::write(&world.program, script).unwrap();
    fs::set_permissions(&world.program, fs::Permissions::from_mode(0o755)).unwrap();
    let run = world.start(&[]);
    let family = || [number(&world.path("shell")), number(&world.path("worker"))];
    wait_until("the worker runs", || family().iter().all(Option::is_some));
    let family = family().map(Option::unwrap);
    signal(&run, Signal::TERM);
    Ended::of(run.wait_with_output().unwrap()).with_code(5);
    assert!(gone(&family), "{family:?}");
}

/// Case 13, second half: nothing outlives a `sweep` that is killed, whatever it did to get away.
#[test]
fn nothing_outlives_a_killed_run() {
    let family = Family::new(true);
    let (mut run, processes) = family.start();
    run.kill().unwrap();
    run.wait().unwrap();
    wait_until("supervisor, trial, grandchild and daemon are gone", || gone(&processes));
}

/// A supervisor that is killed takes the trial with it; the machine is to blame, so the trial is tried again.
#[test]
fn a_killed_supervisor_loses_its_trial_and_no_more() {
    let family = Family::new(false);
    let (run, processes) = family.start();
    kill(processes[0]);
    Ended::of(run.wait_with_output().unwrap()).with_code(0);
    assert!(gone(&processes), "{processes:?}");
    assert_eq!(family.world.begun(), ["train 64 #1", "train 64 #2"]);
}

/// Where the supervisor is killed together with `sweep`, the kernel ends the trial, and the next run ends the rest by its mark.
#[test]
fn what_outlives_run_and_supervisor_is_ended_by_the_next_run() {
    let family = Family::new(false);
    let (mut run, processes) = family.start();
    // Stopped, neither can do anything about the other's end.
    for process in [run.id(), processes[0]] {
        kill_process(Pid::from_raw(process.try_into().unwrap()).unwrap(), Signal::STOP).unwrap();
    }
    run.kill().unwrap();
    kill(processes[0]);
    run.wait().unwrap();
    wait_until("the trial is gone", || gone(&processes[..2]));
    family.world.run(&[]).with_code(0);
    assert!(gone(&processes), "{processes:?}");
    assert!(family.world.state().remarks.iter().any(|text| text.starts_with("Processes that the last sweep")), "{:?}", family.world.state().remarks);
}

/// Case 13, first half: the trial depends on no thread, only on the other end of the socket.
#[test]
fn a_trial_lives_on_when_the_thread_that_started_it_ends() {
    let world = World::new(&trainings(1));
    let (socket, other) = UnixStream::pair().unwrap();
    let process = world.path("process");
    let script = format!("echo $$ > {0}.partial; mv {0}.partial {0}; while :; do sleep 0.01; done", process.display());
    let order = json!({"Start": {
        "program": {"Unix": "/bin/sh".as_bytes()},
        "arguments": [{"Unix": "-c".as_bytes()}, {"Unix": script.as_bytes()}],
        "environment": [],
        "stdout": {"Unix": world.path("out").to_str().unwrap().as_bytes()},
        "stderr": {"Unix": world.path("err").to_str().unwrap().as_bytes()},
        "cores": [],
    }});
    let start = || {
        let supervisor =
            Command::new(env!("CARGO_BIN_EXE_sweep")).arg("supervise").stdin(OwnedFd::from(other)).stdout(Stdio::null()).spawn().unwrap();
        (&socket).write_all(format!("{order}\n").as_bytes()).unwrap();
        supervisor
    };
    let mut supervisor = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
    wait_until("the process runs", || number(&process).is_some());
    let process = number(&process).unwrap();
    assert!(lives(process) && lives(supervisor.id()));
    drop(socket);
    assert!(supervisor.wait().unwrap().success());
    assert!(!lives(process));
}
