//! `sweep run` against real processes: the fake trial program in place of training.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use rustix::process::Signal;
use serde_json::json;
use sweep::event::{Event, EventKind, LimitedBy};
use sweep::protocol::Timestamp;
use sweep::store::{JsonLines, RunState, read_json_lines};
use sweep::trial::{Purpose, TrialId, TrialOutcome};

use crate::world::{Ended, TWO_CASES, World, lives, signal, trainings, wait_until};

fn found(world: &World) -> Vec<(String, Option<usize>, LimitedBy)> {
    let events = read_json_lines::<Event>(&world.newest().events()).unwrap().records;
    let found = |event: Event| match event.kind {
        EventKind::BlockSizeFound { label, block_size, limited_by, .. } => Some((label, block_size, limited_by)),
        _ => None,
    };
    events.into_iter().filter_map(found).collect()
}

fn notices(world: &World) -> Vec<String> {
    world.state().notices
}

fn remarks(world: &World) -> Vec<String> {
    world.state().remarks
}

/// Case 36 among them: 2048 is above the model's positions and never probed.
#[test]
fn a_sweep_finds_block_sizes_and_trains_at_them() {
    let world = World::new(TWO_CASES);
    world.run(&[]).with_code(0);
    let expected = [("plain".to_owned(), Some(512), LimitedBy::Memory), ("checkpointed".to_owned(), Some(1024), LimitedBy::Model)];
    assert_eq!(found(&world), expected);
    let outcomes = world.outcomes();
    let trained: Vec<_> = outcomes.iter().filter(|trial| trial.1 == Purpose::Train).map(|trial| (trial.0.as_str(), trial.2, &trial.3)).collect();
    assert_eq!(trained, [("checkpointed", 1024, &TrialOutcome::Done), ("plain", 512, &TrialOutcome::Done)]);
    assert!(outcomes.iter().all(|trial| trial.2 <= 1024), "{outcomes:?}");
    let run = world.newest();
    assert_eq!(fs::read_link(run.0.with_file_name("latest")).unwrap().to_string_lossy(), run.name());
    assert_eq!(fs::read(run.sweep_file()).unwrap(), fs::read(world.path("sweep.toml")).unwrap());
    for trial in world.state().trials.values() {
        let attempt = run.attempt(&trial.record.id, 1);
        assert!(fs::read_to_string(attempt.telemetry()).unwrap().starts_with("elapsed_s,source,"));
        assert!(attempt.stdout().exists() && attempt.stderr().exists() && attempt.outcome().exists());
    }
}

/// Case 37: a training needs more than its probe did.
#[test]
fn a_training_that_runs_out_of_memory_takes_the_next_smaller_block_size() {
    let mut world = World::new(TWO_CASES);
    world.need(&json!({"base": 1 << 20, "per_token": 1 << 10, "training_extra": 600 << 10}));
    world.run(&["--only", "plain"]).with_code(0);
    let plain = |block_size| ("plain".to_owned(), Some(block_size), LimitedBy::Memory);
    assert_eq!(found(&world), [plain(512), plain(256)]);
    assert!(notices(&world).iter().any(|text| text.contains("training at block size 512 ran out of device memory")), "{:?}", notices(&world));
    assert_eq!(world.begun()[world.begun().len() - 2..], ["train 512 #1", "train 256 #1"]);
}

/// Case 6, second half: running out of memory again and again is a result, and not even the smallest candidate fits.
#[test]
fn where_nothing_fits_the_row_stays_and_nothing_failed() {
    let mut world = World::new(TWO_CASES);
    world.need(&json!({"base": 1 << 30}));
    world.run(&[]).with_code(0);
    let nothing = |label: &str| (label.to_owned(), None, LimitedBy::Memory);
    assert_eq!(found(&world), [nothing("plain"), nothing("checkpointed")]);
    assert!(world.outcomes().iter().all(|trial| matches!(trial.3, TrialOutcome::OutOfDeviceMemory { details: Some(_) })));
}

/// Case 6, first half: a child that dies at once, always.
#[test]
fn a_machine_that_starts_nothing_stops_the_sweep() {
    let mut world = World::new(&trainings(8).replace("[limits]", "[limits]\nmax_consecutive_infra_failures = 3\nretries = 1"));
    world.behave(&json!([{"do": {"exit_at_once": 127, "stderr": "libcuda.so.1: cannot open shared object file"}}]));
    let ended = world.run(&[]).with_code(75);
    assert!(ended.stderr.contains("3 attempts in a row"), "{}", ended.stderr);
    assert!(ended.stderr.contains("libcuda.so.1: cannot open shared object file"), "{}", ended.stderr);
    assert_eq!(world.begun().len(), 3);
}

/// Case 1, and 13 by the way: `sweep` is killed before the child's first message. The child dies with it, and the trial runs once more.
#[test]
fn a_run_killed_before_the_first_message_runs_that_trial_once() {
    let mut world = World::new(&trainings(2));
    world.behave(&json!([{"do": {"wait_before_first_message": ""}}]));
    let mut killed = world.start(&[]);
    wait_until("the first trial begins", || world.log().len() == 1);
    let process: u32 = world.log()[0][5].parse().unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    wait_until("its child is gone", || !lives(process));

    world.behave(&json!([]));
    let ended = world.run(&[]).with_code(0);
    assert!(ended.stdout.contains("The unfinished run"), "{}", ended.stdout);
    assert_eq!(world.begun(), ["train 64 #1", "train 64 #2", "train 64 #1"]);
    assert_eq!(world.log().iter().filter(|line| line[0] == "end").count(), 2);
    assert_eq!(fs::read_dir(world.newest().0.parent().unwrap()).unwrap().count(), 2, "one run and the link to it");
}

/// `sweep` is killed in the middle of a search: only what ran is lost.
#[test]
fn a_run_killed_in_the_middle_loses_only_what_ran() {
    let mut world = World::new(TWO_CASES);
    world.behave(&json!([{"when": {"purpose": "train"}, "do": {"wait_for": ""}}]));
    let mut killed = world.start(&[]);
    wait_until("the first training begins", || world.log().iter().any(|line| line[2] == "train"));
    killed.kill().unwrap();
    killed.wait().unwrap();
    let probes = world.begun().len() - 1;
    world.behave(&json!([]));
    world.run(&["--resume"]).with_code(0);
    assert_eq!(world.begun()[probes + 1], "train 512 #2");
    let ids: Vec<_> = world.log().into_iter().filter(|line| line[0] == "end").map(|line| line[1].clone()).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "a trial ended twice");
}

/// Case 2, for every trial of a finished run in turn.
#[test]
fn a_deleted_trial_runs_again_and_no_other() {
    let world = World::new(TWO_CASES);
    world.run(&[]).with_code(0);
    world.run(&["--resume"]).with_code(4);
    for trial in world.state().trials.keys() {
        fs::remove_dir_all(world.newest().trial(trial)).unwrap();
        world.forget_log();
        world.run(&["--resume"]).with_code(0);
        let begun: Vec<_> = world.log().into_iter().filter(|line| line[0] == "begin").map(|line| line[1].clone()).collect();
        assert_eq!(begun, std::slice::from_ref(&trial.0));
    }
}

/// Case 3.
#[test]
fn failed_trials_run_again_one_at_a_time_and_the_others_are_left_alone() {
    let mut world = World::new(&trainings(10));
    world.behave(&json!([{"when": {"label": "t1"}, "do": {}}, {"when": {"label": "t2"}, "do": {}}, {"do": {"exit": 3}}]));
    let ended = world.run(&[]).with_code(100);
    assert!(ended.stderr.contains("8 trials failed:"), "{}", ended.stderr);
    let failed = world.state().trials.into_values().filter(|trial| trial.outcome() != Some(&TrialOutcome::Done)).map(|trial| trial.record.id.0);
    let failed: BTreeSet<String> = failed.collect();
    assert_eq!(failed.len(), 8);
    world.forget_log();
    world.behave(&json!([]));
    world.run(&["--rerun", "failed", "--jobs", "1"]).with_code(0);
    let log = world.log();
    assert_eq!(log.iter().map(|line| line[1].clone()).collect::<BTreeSet<_>>(), failed);
    for pair in log.chunks(2) {
        assert_eq!((pair[0][0].as_str(), pair[1][0].as_str()), ("begin", "end"));
        assert_eq!(pair[0][1], pair[1][1], "two trials were alive at once");
    }
    world.run(&["--rerun", "failed"]).with_code(4);
}

/// Case 4.
#[test]
fn an_interrupted_run_goes_on_where_it_stopped() {
    let mut world = World::new(&trainings(3));
    let go = world.path("go");
    world.behave(&json!([{"when": {"attempts_up_to": 1}, "do": {"wait_for": go}}]));
    let interrupted = world.start(&[]);
    wait_until("the first trial begins", || world.log().len() == 1);
    fs::write(&go, "").unwrap();
    wait_until("the first trial ended", || world.log().len() > 2);
    fs::remove_file(&go).unwrap();
    let before = world.state();
    signal(&interrupted, Signal::INT);
    let ended = Ended::of(interrupted.wait_with_output().unwrap());
    if ended.code == Some(5) {
        assert!(ended.stderr.contains("outstanding"), "{}", ended.stderr);
    }
    fs::write(&go, "").unwrap();
    world.run(&[]);
    let after = world.state();
    assert!(before.trials.keys().all(|id| after.trials.contains_key(id)), "ids changed");
    assert_eq!(after.trials.len(), 3);
    assert!(after.trials.values().all(|trial| trial.outcome() == Some(&TrialOutcome::Done)));
    let ids: Vec<_> = world.log().into_iter().filter(|line| line[0] == "end").map(|line| line[1].clone()).collect();
    assert_eq!((ids.len(), ids.iter().collect::<BTreeSet<_>>().len()), (3, 3));
}

/// A second Ctrl-C kills what ignores the first, and its whole process group (case 12).
#[test]
fn a_second_signal_kills_the_group_that_ignored_the_first() {
    let mut world = World::new(&trainings(1));
    let grandchild = world.path("grandchild.json");
    world.behave(&json!([{"do": {"ignore_term": true, "grandchild": grandchild, "wait_for": ""}}]));
    let run = world.start(&[]);
    wait_until("the grandchild runs", || grandchild.exists());
    let processes: [u32; 2] = [world.log()[0][5].parse().unwrap(), fs::read_to_string(&grandchild).unwrap().trim().parse().unwrap()];
    assert!(processes.iter().all(|process| lives(*process)));
    let asked = || {
        read_json_lines::<Event>(&world.newest().events()).unwrap().records.iter().any(|event| matches!(event.kind, EventKind::StopRequested { .. }))
    };
    signal(&run, Signal::INT);
    wait_until("the first signal is on record", asked);
    assert!(processes.iter().all(|process| lives(*process)));
    signal(&run, Signal::INT);
    Ended::of(run.wait_with_output().unwrap()).with_code(5);
    wait_until("all are gone", || processes.iter().all(|process| !lives(*process)));
}

/// Case 12: after the grace period nothing survives.
#[test]
fn the_grace_period_ends_what_ignores_the_request() {
    let mut world = World::new(&trainings(1).replace("60s", "20ms"));
    world.behave(&json!([{"do": {"ignore_term": true, "wait_for": ""}}]));
    let run = world.start(&[]);
    wait_until("the trial begins", || world.log().len() == 1);
    let process: u32 = world.log()[0][5].parse().unwrap();
    signal(&run, Signal::TERM);
    Ended::of(run.wait_with_output().unwrap()).with_code(5);
    assert!(!lives(process));
}

#[test]
fn a_trial_that_saves_its_state_is_run_again() {
    let mut world = World::new(&trainings(1));
    world.behave(&json!([{"when": {"attempts_up_to": 1}, "do": {"checkpoint_on_term": true, "wait_for": ""}}]));
    let run = world.start(&[]);
    wait_until("the trial trains", || world.first_messages().is_some_and(|text| text.contains("\"step\"")));
    signal(&run, Signal::INT);
    Ended::of(run.wait_with_output().unwrap()).with_code(5);
    assert_eq!(world.outcomes()[0].3, TrialOutcome::Preempted);
    world.run(&[]).with_code(0);
    assert_eq!(world.begun(), ["train 64 #1", "train 64 #2"]);
}

/// `sweep` is killed after the last trial and before the report: the next one runs nothing and makes it.
#[test]
fn a_run_killed_before_its_report_gets_it_from_the_next() {
    let world = World::new(&trainings(2));
    world.run(&[]).with_code(0);
    let run = world.newest();
    let page = run.report().join("report.html");
    let whole = fs::read(&page).unwrap();
    let events = fs::read_to_string(run.events()).unwrap();
    let cut = events.trim_end().rfind('\n').unwrap() + 1;
    for (cut, report) in [(cut, true), (cut, false), (events.len(), false)] {
        fs::write(run.events(), &events[..cut]).unwrap();
        if !report {
            fs::remove_dir_all(run.report()).unwrap();
        }
        world.run(&[]).with_code(0);
        assert_eq!((world.newest(), world.begun().len()), (run.clone(), 2));
        assert_eq!(fs::read(&page).unwrap(), whole);
    }
    world.run(&["--resume"]).with_code(4);
}

/// Case 5: the last two records cut at every byte. Whatever is left of them, every trial is known to be finished.
#[test]
fn events_cut_at_any_byte_lose_no_trial() {
    let world = World::new(&trainings(2));
    world.run(&[]).with_code(0);
    let events = world.newest().events();
    let whole = fs::read(&events).unwrap();
    let lines: Vec<usize> = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(place, _)| place).collect();
    let from = lines[lines.len() - 3] + 1;
    for length in from..=whole.len() {
        fs::write(&events, &whole[..length]).unwrap();
        let state = world.state();
        assert!(state.trials.values().all(|trial| trial.settled() == Some(&TrialOutcome::Done)), "cut at {length}");
        assert_eq!(state.unreadable_events, [], "cut at {length}");
    }
    // The next sweep completes the record, glues nothing to it, and runs nothing.
    fs::write(&events, &whole[..from + 10]).unwrap();
    world.run(&[]).with_code(0);
    assert_eq!(world.begun().len(), 2);
    let state = world.state();
    assert_eq!((state.unreadable_events, state.exit_code, state.ended_events.len()), (vec![], Some(0), 2));
}

/// Case 5: events cut to nothing, and a record damaged in the middle.
#[test]
fn lost_events_lose_no_trial() {
    let world = World::new(&trainings(3));
    world.run(&[]).with_code(0);
    let events = world.newest().events();
    let whole = fs::read_to_string(&events).unwrap();
    fs::write(&events, "").unwrap();
    world.run(&["--resume"]).with_code(4);
    assert_eq!(world.begun().len(), 3);

    // One trial is missing now, so the run goes on and puts the others on record again.
    let first = world.state().trials.keys().next().unwrap().clone();
    fs::remove_dir_all(world.newest().trial(&first)).unwrap();
    world.run(&["--resume"]).with_code(0);
    assert_eq!(world.begun().len(), 4);
    assert_eq!(world.state().ended_events.len(), 3);

    fs::write(&events, whole.replacen("{\"at\"", "{at", 2).replacen("{at", "{\"at\"", 1)).unwrap();
    fs::remove_dir_all(world.newest().trial(&first)).unwrap();
    world.run(&["--resume"]).with_code(0);
    assert!(remarks(&world).iter().any(|text| text.starts_with("events.jsonl line 2 cannot be read")), "{:?}", remarks(&world));
    assert_eq!(world.begun().len(), 5);
}

/// Case 5, for the trials' own folders: a description that was cut to nothing when the machine went down is written again, and its trial runs again.
#[test]
fn a_damaged_trial_folder_runs_again_in_an_attempt_of_its_own() {
    let world = World::new(&trainings(2));
    world.run(&[]).with_code(0);
    let run = world.newest();
    let damaged = world.state().trials.keys().next().unwrap().clone();
    fs::write(run.trial_record(&damaged), "").unwrap();
    let ended = world.run(&["--resume"]).with_code(0);
    assert!(ended.stdout.contains("A trial runs again, its folder is damaged:"), "{}", ended.stdout);
    assert_eq!(world.begun().len(), 3);
    assert_eq!(world.begun()[2], "train 64 #2");
    assert_eq!(world.state().trials[&damaged].attempts, 2);
    world.run(&["--resume"]).with_code(4);
}

/// Case 7: the disk is full in the middle of a run.
#[test]
fn a_full_disk_stops_the_run_and_names_the_path() {
    let mut world = World::new(&trainings(2));
    world.behave(&json!([{"do": {"wait_for": ""}}]));
    let mut killed = world.start(&[]);
    wait_until("the first trial begins", || world.log().len() == 1);
    killed.kill().unwrap();
    killed.wait().unwrap();
    // A limit on the size of files stands for a full disk, which would need a disk of its own: the next write to the events is refused, others are not.
    let events = world.newest().events();
    let long = Event { at: Timestamp::now(), kind: EventKind::Notice { text: "x".repeat(2 << 20) } };
    JsonLines::append_to(&events).unwrap().push(&long).unwrap();
    let before = fs::read(&events).unwrap();
    let mut limited = world.command(&[]);
    let sweep = limited.get_program().to_owned();
    let environment: Vec<_> = limited.get_envs().map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned))).collect();
    limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 1024; exec \"$0\" run sweep.toml --resume"]).arg(sweep).current_dir(world.path("")).env_clear();
    limited.envs(environment.into_iter().filter_map(|(name, value)| Some((name, value?))));
    let ended = Ended::of(limited.output().unwrap()).with_code(75);
    assert!(ended.stderr.contains("cannot write") && ended.stderr.contains("events.jsonl"), "{}", ended.stderr);
    assert_eq!(fs::read(&events).unwrap(), before);
    assert_eq!(world.log().len(), 1, "nothing runs that cannot be recorded");
}

/// Case 7: a results folder that cannot be written, before anything runs.
#[test]
fn a_results_folder_that_takes_nothing_is_refused_at_once() {
    let world = World::new(&trainings(1));
    fs::write(world.path("file"), "").unwrap();
    let ended = world.run(&["--results", "file/below"]).with_code(2);
    assert!(ended.stderr.contains("the results folder cannot be written: cannot create file/below"), "{}", ended.stderr);
    // A file system that refuses everybody, root included.
    let ended = world.run(&["--results", "/proc/self/results"]);
    assert!(matches!(ended.code, Some(2 | 75)), "{ended:?}");
    assert!(ended.stderr.contains("/proc/self/results"), "{}", ended.stderr);
    assert_eq!(world.log().len(), 0);
}

/// A trial that failed by itself starts afresh when it is run again; one that was killed goes on from its checkpoints.
#[test]
fn failed_trials_start_afresh_and_killed_ones_go_on() {
    let mut world = World::new(&trainings(2));
    world.behave(&json!([{"when": {"label": "t1"}, "do": {"diverge_at": 2}}, {"do": {"signal": 9}}]));
    world.run(&[]).with_code(100);
    let run = world.newest();
    for trial in world.state().trials.keys() {
        fs::create_dir_all(run.checkpoints(trial).join("step-1")).unwrap();
    }
    world.behave(&json!([]));
    world.run(&["--rerun", "failed"]).with_code(0);
    for (id, trial) in world.state().trials {
        assert_eq!(trial.attempts, 2);
        assert_eq!(run.checkpoints(&id).exists(), trial.record.label == "t2", "{}", trial.record.label);
    }
}

/// Case 8.
#[test]
fn a_failed_trial_is_shown_when_it_fails_and_named_at_the_end() {
    let mut world = World::new(TWO_CASES);
    world.behave(&json!([{"when": {"label": "plain"}, "do": {"stderr": "first line\nrank 1: the disk is gone", "exit": 3}}]));
    let ended = world.run(&[]).with_code(100);
    assert!(ended.stdout.contains("rank 1: the disk is gone"), "{}", ended.stdout);
    assert!(ended.stderr.contains("1 trial failed:\n  plain, probe at block size 512 ("), "{}", ended.stderr);
    assert!(ended.stderr.contains("failed: rank 1: the disk is gone"), "{}", ended.stderr);
    assert_eq!(found(&world), [("checkpointed".to_owned(), Some(1024), LimitedBy::Model)]);
}

/// Case 9.
#[test]
fn eight_runs_begun_at_once_have_eight_folders() {
    let world = World::new(&trainings(1));
    let runs: Vec<_> = (0..8).map(|_| world.start(&["--new"])).collect();
    for run in runs {
        Ended::of(run.wait_with_output().unwrap()).with_code(0);
    }
    let results = world.newest().0.parent().unwrap().to_owned();
    let folders: Vec<_> = fs::read_dir(results).unwrap().map(|entry| entry.unwrap().path()).filter(|path| !path.is_symlink()).collect();
    assert_eq!(folders.len(), 8);
    for folder in folders {
        let state = RunState::read(&sweep::store::RunFolder(folder)).unwrap();
        assert_eq!(state.exit_code, Some(0));
        assert_eq!(state.trials.len(), 1);
    }
}

/// Cases 15 and 16: stuck, and killed by somebody else.
#[test]
fn stuck_and_killed_children_are_told_apart() {
    let mut world = World::new(&trainings(4).replace("[limits]", "[limits]\nstall_timeout = \"200ms\""));
    world.behave(&json!([
        {"when": {"label": "t1"}, "do": {"wait_for": ""}},
        {"when": {"label": "t2"}, "do": {"signal": 9}},
        {"when": {"label": "t3"}, "do": {"diverge_at": 2}},
        {"when": {"label": "t4"}, "do": {"tear_result": true}},
    ]));
    let ended = world.run(&[]).with_code(100);
    let outcomes = world.outcomes();
    assert!(matches!(&outcomes[0].3, TrialOutcome::Stalled { phase: Some(phase), .. } if phase == "train"), "{outcomes:?}\n{}", ended.stderr);
    let stalled = world.log().iter().find(|line| line[0] == "begin").map(|line| (line[1].clone(), line[5].clone())).unwrap();
    let stacks = fs::read_to_string(world.newest().attempt(&TrialId(stalled.0), 1).stacks()).unwrap();
    assert!(stacks.starts_with("No progress for ") && stacks.contains("Last phase: train. Last step: 4 of 4."), "{stacks}");
    assert!(stacks.contains(&format!("\nprocess {}: sweep trial ", stalled.1)) && stacks.contains(&format!("  thread {}", stalled.1)), "{stacks}");
    assert_eq!(outcomes[1].3, TrialOutcome::Crashed { code: None, signal: Some(9) });
    assert_eq!(outcomes[2].3, TrialOutcome::Diverged { reason: "the loss is NaN at step 2".to_owned() });
    assert!(matches!(&outcomes[3].3, TrialOutcome::ProtocolBroken { reason } if reason.contains("cannot be read")), "{outcomes:?}");
}

#[test]
fn floods_and_damaged_messages_do_not_harm_a_trial() {
    let mut world = World::new(&trainings(1));
    world.behave(&json!([{"do": {"flood_stderr": 8 << 20, "garble_messages": true}}]));
    world.run(&[]).with_code(0);
    assert!(notices(&world).iter().any(|text| text.contains("messages.jsonl line 8 cannot be read")), "{:?}", notices(&world));
    let trial = world.state().trials.into_keys().next().unwrap();
    let log = fs::read_to_string(world.newest().attempt(&trial, 1).stderr()).unwrap();
    assert_eq!((log.lines().count(), log.lines().last()), (2049, Some("the flood is over")));
}

/// Case 19.
#[test]
fn a_program_that_cannot_be_started_is_classed_and_the_sweep_goes_on() {
    let mut world = World::new(&trainings(2).replace("[limits]", "[limits]\nretries = 0\nmax_consecutive_infra_failures = 10"));
    for (program, reason) in [("no-such-program", "No such file or directory"), ("sweep.toml", "Permission denied")] {
        world.program = world.path(program);
        world.run(&["--new"]).with_code(75);
        let outcomes = world.outcomes();
        assert_eq!(outcomes.len(), 2);
        assert!(
            outcomes.iter().all(|trial| matches!(&trial.3, TrialOutcome::Infrastructure { reason: text } if text.contains(reason))),
            "{outcomes:?}"
        );
    }
}

/// Case 20: two trials at once share nothing.
#[test]
fn trials_at_once_share_no_core() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return;
    }
    let mut world = World::new(&trainings(2));
    let go = world.path("go");
    world.behave(&json!([{"do": {"wait_for": go}}]));
    let run = world.start(&["--jobs", "2"]);
    wait_until("both trials run", || world.log().len() == 2);
    fs::write(&go, "").unwrap();
    Ended::of(run.wait_with_output().unwrap()).with_code(0);
    let cores = |line: &Vec<String>| line[6].split(',').map(str::to_owned).collect::<BTreeSet<String>>();
    let log = world.log();
    assert!(cores(&log[0]).is_disjoint(&cores(&log[1])), "{log:?}");
    let port = |line: &Vec<String>| line[9].parse::<u16>().unwrap();
    assert_ne!(port(&log[0]), port(&log[1]), "a fixed port is shared");
}

#[test]
fn a_run_in_use_is_left_alone() {
    let mut world = World::new(&trainings(1));
    let go = world.path("go");
    world.behave(&json!([{"do": {"wait_for": go}}]));
    let first = world.start(&[]);
    wait_until("the trial begins", || world.log().len() == 1);
    for force in [&[][..], &["--force-unlock"]] {
        let ended = world.run(&[&["--resume"], force].concat()).with_code(75);
        assert!(ended.stderr.contains(&format!("is in use by another sweep (process {} on ", first.id())), "{}", ended.stderr);
    }
    fs::write(&go, "").unwrap();
    Ended::of(first.wait_with_output().unwrap()).with_code(0);
    assert_eq!(world.begun().len(), 1);
}

/// A run that another machine holds is taken over by force alone; one whose owner died on this machine without any.
#[test]
fn a_run_of_another_machine_is_taken_over_by_force_alone() {
    let mut world = World::new(&trainings(1));
    world.behave(&json!([{"when": {"attempts_up_to": 1}, "do": {"wait_for": ""}}]));
    let mut killed = world.start(&[]);
    wait_until("the trial begins", || world.log().len() == 1);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let lock = world.newest().lock();
    let mut owner: serde_json::Value = serde_json::from_str(&fs::read_to_string(&lock).unwrap()).unwrap();
    assert_eq!(owner["pid"], killed.id());
    owner["host"] = json!("elsewhere.example");
    fs::write(&lock, owner.to_string()).unwrap();
    for arguments in [&[][..], &["--resume"]] {
        let ended = world.run(arguments).with_code(75);
        assert!(ended.stderr.contains("on elsewhere.example") && ended.stderr.contains("--force-unlock"), "{}", ended.stderr);
    }
    assert_eq!(world.begun().len(), 1);
    world.run(&["--force-unlock"]).with_code(0);
    assert_eq!(world.begun().len(), 2);
    let cut_off = format!("The sweep that worked on it before was cut off (process {} on elsewhere.example", killed.id());
    assert!(remarks(&world).iter().any(|text| text.starts_with(&cut_off)), "{:?}", remarks(&world));
    assert_eq!(fs::read_to_string(&lock).unwrap(), "", "nobody works in it");
}

#[test]
fn a_changed_sweep_says_what_differs() {
    let mut world = World::new(TWO_CASES);
    world.behave(&json!([{"when": {"label": "checkpointed"}, "do": {"exit": 3}}]));
    world.run(&[]).with_code(100);
    let changed = TWO_CASES.replace("max_steps = 4", "max_steps = 5").replace("label = \"checkpointed\"", "label = \"other\"");
    fs::write(world.path("sweep.toml"), changed).unwrap();
    let ended = world.run(&["--resume"]).with_code(2);
    for line in ["row \"checkpointed\" is gone", "row \"other\" is new", "row \"plain\": train.duration.max_steps was 4 and is 5"] {
        assert!(ended.stderr.contains(line), "{}", ended.stderr);
    }
    let old = world.newest();
    world.run(&[]).with_code(0);
    assert!(remarks(&world)[0].starts_with("Another run starts, because the sweep differs"), "{:?}", remarks(&world));
    assert_ne!(world.newest(), old);

    fs::write(world.path("sweep.toml"), format!("{TWO_CASES}# a remark\n")).unwrap();
    world.run(&["--resume", "--set", "train.max_steps=5"]).with_code(2);
}

#[test]
fn a_selection_runs_what_it_names() {
    let world = World::new(&trainings(3));
    let ended = world.run(&["--only", "nonsense"]).with_code(2);
    assert!(ended.stderr.contains("labels: "), "{}", ended.stderr);
    world.run(&["--only", "t2"]).with_code(0);
    assert_eq!(world.outcomes().len(), 1);
    world.run(&["--resume"]).with_code(0);
    assert_eq!((world.outcomes().len(), world.begun().len()), (3, 3));
    let id = world.state().trials.keys().next().unwrap().0.clone();
    world.run(&["--rerun", &id]).with_code(0);
    assert_eq!(world.begun().last().map(String::as_str), Some("train 64 #2"));
    world.run(&["--rerun", "nonsense"]).with_code(2);
}

#[test]
fn the_first_failure_ends_an_eager_run() {
    let mut world = World::new(&trainings(3));
    world.behave(&json!([{"do": {"exit": 3}}]));
    world.run(&["--fail-fast"]).with_code(100);
    assert_eq!(world.begun().len(), 1);
}

/// The sweep's time limit lets what runs end well, and the run goes on later.
#[test]
fn a_time_limit_finishes_what_runs_and_the_rest_runs_later() {
    let mut world = World::new(&trainings(2).replace("[limits]", "[limits]\nsweep_timeout = \"1ms\""));
    let go = world.path("go");
    world.behave(&json!([{"do": {"wait_for": go}}]));
    let run = world.start(&[]);
    let announced = || {
        let events = read_json_lines::<Event>(&world.newest().events()).unwrap().records;
        events.iter().any(|event| matches!(&event.kind, EventKind::Remark { text } if text.contains("its sweep_timeout is over")))
    };
    wait_until("the first trial runs and the time is over", || world.log().len() == 1 && announced());
    fs::write(&go, "").unwrap();
    let ended = Ended::of(run.wait_with_output().unwrap()).with_code(5);
    assert!(ended.stderr.contains("outstanding"), "{}", ended.stderr);
    assert_eq!(world.outcomes().into_iter().map(|trial| trial.3).collect::<Vec<_>>(), [TrialOutcome::Done]);
    // Each run lasts for one trial at least, so that it gets somewhere.
    world.run(&[]).with_code(0);
    assert_eq!(world.begun(), ["train 64 #1", "train 64 #1"]);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let world = World::new(&trainings(1));
    let output = world.command(&["run", "sweep.toml", "--launcher", "slurm"]).env("PATH", "/nonexistent").output().unwrap();
    let ended = Ended::of(output).with_code(2);
    assert!(ended.stderr.contains("--launcher slurm: sbatch is not on PATH"), "{}", ended.stderr);
    world.run(&["--resume"]).with_code(2);
    let ended = world.run(&["--jobs", "0"]).with_code(2);
    assert!(ended.stderr.contains("--jobs 0"), "{}", ended.stderr);
}

/// The token for the hub is passed on to children and written nowhere.
#[test]
fn the_hubs_token_is_written_nowhere() {
    let world = World::new(&trainings(1));
    let secret = "hf_thisIsTheSecret";
    let output = world.command(&["run", "sweep.toml"]).env("HF_TOKEN", secret).output().unwrap();
    Ended::of(output).with_code(0);
    let mut folders = vec![world.path("results")];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_symlink() {
                continue;
            } else if path.is_dir() {
                folders.push(path);
            } else {
                files += 1;
                assert!(!String::from_utf8_lossy(&fs::read(&path).unwrap()).contains(secret), "{}", path.display());
            }
        }
    }
    assert!(files > 5);
}
