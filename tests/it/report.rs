//! Reports from results folders: whole tables, every way a run can be incomplete or damaged, and the same bytes every time.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use builder::{MIB, Run, Training};
use sweep::event::LimitedBy;
use sweep::report::{Summary, generate};
use sweep::store::RunFolder;
use sweep::trial::TrialOutcome;
use tempfile::TempDir;

mod builder;

/// A folder of its own for each test.
fn world() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn report_of(run: &Run, file: &str) -> String {
    fs::read_to_string(run.folder.report().join(file)).unwrap()
}

/// Every file of the report with its bytes.
fn all_files(folder: &RunFolder) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for folder in [folder.report(), folder.report().join("plots")] {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                files.insert(path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap());
            }
        }
    }
    files
}

/// The cells of a CSV file without quoted commas, by row.
fn cells(text: &str) -> Vec<Vec<String>> {
    text.lines().skip(1).map(|line| line.split(',').map(str::to_owned).collect()).collect()
}

fn snapshot(name: &str, text: &str) {
    insta::with_settings!({snapshot_path => "report/snapshots", prepend_module_to_snapshot => false, omit_expression => true}, {
        insta::assert_snapshot!(name, text);
    });
}

#[test]
fn the_four_cases_give_whole_tables_and_a_page() {
    let world = world();
    let run = builder::four_cases(world.path());
    let summary = generate(&run.folder).unwrap();
    for file in ["table1.md", "table1.csv", "table1.tex", "table2.md", "table2.csv", "table2.tex", "report.md"] {
        snapshot(file, &report_of(&run, file));
    }
    assert!(summary.complete && summary.failed.is_empty() && summary.unreadable.is_empty(), "{summary:?}");
    assert_eq!(summary.rows.len(), 4);
    assert_eq!((summary.rows[3].block_size_max, summary.rows[3].perplexity), (Some(512), Some(35.09)));
    let plots = ["loss", "max_block_size", "memory", "utilisation"];
    for plot in plots {
        let png = fs::read(run.folder.report().join(format!("plots/{plot}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.len() > 10_000, "{plot}: {} bytes", png.len());
        let svg = report_of(&run, &format!("plots/{plot}.svg"));
        assert!(svg.contains("<svg") && svg.contains("</svg>") && !svg.contains("no samples"), "{plot}");
    }
    let html = report_of(&run, "report.html");
    assert_eq!(html.matches("<svg").count(), plots.len());
    let references = html.replace("http://www.w3.org/2000/svg", "");
    assert!(
        !references.contains("http") && !html.contains("<script") && !html.contains("<link") && !html.contains("src="),
        "the page is self-contained"
    );
}

/// Nothing of a report depends on when, where or how often it is made.
#[test]
fn the_same_folder_gives_the_same_bytes() {
    let (world, elsewhere) = (world(), world());
    let run = builder::four_cases(world.path());
    generate(&run.folder).unwrap();
    let first = all_files(&run.folder);
    assert_eq!(first.len(), 16);
    generate(&run.folder).unwrap();
    assert!(first == all_files(&run.folder), "made again");
    fs::remove_dir_all(run.folder.report()).unwrap();
    generate(&run.folder).unwrap();
    assert!(first == all_files(&run.folder), "made again after it was deleted");
    let other = builder::four_cases(&elsewhere.path().join("deeper"));
    generate(&other.folder).unwrap();
    assert!(first == all_files(&other.folder), "made in another place");
}

/// A plot that an earlier report had and this one has not would be taken for a plot of this run.
#[test]
fn plots_of_an_earlier_report_are_removed_and_other_files_left() {
    let world = world();
    let run = builder::four_cases(world.path());
    let plots = run.folder.report().join("plots");
    fs::create_dir_all(&plots).unwrap();
    for name in ["loss-2.svg", "loss-2.png", "mine.txt"] {
        fs::write(plots.join(name), "x").unwrap();
    }
    generate(&run.folder).unwrap();
    assert!(!plots.join("loss-2.svg").exists() && !plots.join("loss-2.png").exists() && plots.join("mine.txt").exists());
}

/// CASES 39: NaN, inf, failed and stalled trainings, nothing fits, zero telemetry samples, no evaluation split, few steps: rows with their reasons.
#[test]
fn rows_that_went_wrong_stay_with_their_reasons() {
    let world = world();
    let mut rows = builder::four_rows();
    for index in 4..8 {
        rows.push(builder::row(&format!("m{index}"), &format!("more, \"{index}\" | of_it"), builder::settings()));
    }
    rows[6].data.eval = None;
    rows[6].data.eval_tokens = 0;
    rows[6].data.floor_perplexity = None;
    let mut run = Run::begin(world.path(), rows);
    let failing = |outcome: TrialOutcome| Training { perplexity: None, perplexity_common: None, outcome, ..Training::default() };
    run.found(0, Some(64), LimitedBy::Memory);
    run.train(0, 64, 0, &failing(TrialOutcome::Diverged { reason: "the loss became NaN at step 60".into() }));
    run.found(1, Some(64), LimitedBy::Model);
    run.train(1, 64, 0, &Training { perplexity: Some(f64::INFINITY), perplexity_common: Some(f64::NAN), ..Training::default() });
    run.found(2, Some(64), LimitedBy::Data);
    run.train_without_end(2, 64, &failing(TrialOutcome::Done));
    fs::remove_file(run.folder.trials().join("c3-train-64-0/attempt-1/telemetry.csv")).unwrap();
    run.probe(3, 64, false);
    run.found(3, None, LimitedBy::Memory);
    run.found(4, Some(64), LimitedBy::Candidates);
    run.train(4, 64, 0, &failing(TrialOutcome::Stalled { seconds: 61.0, phase: Some("train".into()) }));
    run.found(5, Some(64), LimitedBy::Candidates);
    run.train(5, 64, 0, &Training { steps: 2, telemetry_samples: 0, ..Training::default() });
    run.found(6, Some(64), LimitedBy::Candidates);
    run.train(6, 64, 0, &Training { steps: 12, perplexity: None, perplexity_common: None, ..Training::default() });
    let summary = generate(&run.folder).unwrap();
    snapshot("wrong_rows_table1.md", &report_of(&run, "table1.md"));
    snapshot("wrong_rows_table1.csv", &report_of(&run, "table1.csv"));
    assert!(!summary.complete);
    assert_eq!(summary.failed.len(), 2, "{:?}", summary.failed);
    assert!(summary.failed[1].ends_with("stalled: no progress for 61 s in phase train"), "{:?}", summary.failed);
    let page = report_of(&run, "report.md");
    assert!(page.contains("trials/c1-train-64-0/attempt-1") && page.contains("    error: it went wrong"), "failures are named with their last lines");
    assert!(!page.contains("Largest block size: 64, by FSDP + full_shard."), "a row that diverged wins nothing");
    assert!(report_of(&run, "plots/utilisation.svg").contains("no samples"));
    assert!(report_of(&run, "plots/max_block_size.svg").contains("not even the smallest candidate, 64"));
    assert!(report_of(&run, "plots/loss.svg").contains("(loss is not finite from step 60)"));
}

/// CASES 39: a run whose every trial failed, one with a single trial, and one in which nothing has begun.
#[test]
fn a_run_without_results_still_has_tables_and_plots() {
    let world = world();
    let mut run = Run::begin(&world.path().join("failed"), builder::four_rows());
    for row in 0..4 {
        run.found(row, Some(64), LimitedBy::Memory);
        let outcome = TrialOutcome::Failed { reason: "rank 1 panicked".into() };
        run.train(
            row,
            64,
            0,
            &Training { steps: 0, telemetry_samples: 0, perplexity: None, perplexity_common: None, outcome, ..Training::default() },
        );
    }
    run.end(100, 0);
    let summary = generate(&run.folder).unwrap();
    assert_eq!((summary.failed.len(), summary.complete), (4, true));
    for row in cells(&report_of(&run, "table1.csv")) {
        assert_eq!(&row[1..3], ["64", "memory"], "{row:?}");
        assert!(row[3..10].iter().enumerate().all(|(index, cell)| cell.is_empty() || index == 3), "{row:?}");
        assert!(row[10].contains("failed: rank 1 panicked"), "{row:?}");
    }
    assert!(!report_of(&run, "report.md").contains("What was found"));

    let mut run = Run::begin(&world.path().join("one"), builder::four_rows().into_iter().take(1).collect());
    run.probe(0, 64, true);
    let summary = generate(&run.folder).unwrap();
    assert!(!summary.complete);
    assert!(report_of(&run, "table1.csv").contains("the search has not ended; 64 fits so far (the run is in progress, or was killed)"));
    assert!(report_of(&run, "table1.md").contains("it is in progress, or was killed"));

    let run = Run::begin(&world.path().join("none"), Vec::new());
    assert_eq!(generate(&run.folder).unwrap().rows, []);
    assert_eq!(report_of(&run, "table1.csv").lines().count(), 1);
    assert!(report_of(&run, "plots/memory.svg").contains("the run has no rows"));
}

/// CASES 37: a training that ran out of memory falls back to the next smaller size, and the table says so.
#[test]
fn a_training_that_fell_back_says_so() {
    let world = world();
    let mut run = Run::begin(world.path(), builder::four_rows());
    run.found(0, Some(128), LimitedBy::Candidates);
    let training = Training { outcome: builder::out_of_memory(), perplexity: None, perplexity_common: None, ..Training::default() };
    run.train(0, 128, 0, &training);
    run.train(0, 64, 0, &Training::default());
    run.found(1, Some(64), LimitedBy::Candidates);
    run.train(1, 64, 0, &training);
    run.end(0, 0);
    let summary = generate(&run.folder).unwrap();
    assert!(summary.failed.is_empty(), "{:?}", summary.failed);
    let table = report_of(&run, "table1.csv");
    let fell_back = "training at block size 128 ended out of device memory: rank 1 asked for 6.00 MiB with 45.00 MiB of 48.00 MiB in use (forward); \
                     the next smaller candidate, 64, was taken";
    assert!(table.contains(fell_back), "{table}");
    let rows = cells(&table);
    assert_eq!(&rows[0][1..5], ["64", "memory", "111.875", "85"]);
    assert_eq!(&rows[1][1..5], ["", "memory", "", ""]);
}

/// CASES 5: without `events.jsonl` the trial folders tell nearly everything.
#[test]
fn the_tables_are_rebuilt_from_the_trial_folders() {
    let world = world();
    let run = builder::four_cases(world.path());
    generate(&run.folder).unwrap();
    let whole = report_of(&run, "table1.csv");
    fs::write(run.folder.events(), "").unwrap();
    generate(&run.folder).unwrap();
    assert_eq!(report_of(&run, "table1.csv"), whole);
    assert!(report_of(&run, "table1.md").contains("The end of this run is not on record"));
}

#[test]
fn what_limits_a_search_is_rebuilt_too() {
    let world = world();
    let mut rows = builder::four_rows();
    rows[1].data.train_tokens = 64 * 96 + 10;
    let mut run = Run::begin(world.path(), rows);
    run.manifest.search.as_mut().unwrap().candidates = vec![64, 128, 2048];
    run.write_manifest();
    run.probe(0, 128, true);
    run.train(0, 128, 0, &Training::default());
    run.train(1, 64, 0, &Training::default());
    run.probe(2, 64, true);
    run.probe(2, 128, false);
    run.probe(3, 64, false);
    fs::write(run.folder.events(), "").unwrap();
    generate(&run.folder).unwrap();
    let found: Vec<Vec<String>> = cells(&report_of(&run, "table1.csv")).into_iter().map(|row| row[1..3].to_vec()).collect();
    assert_eq!(found, [["128", "model"], ["64", "data"], ["64", "memory"], ["", "memory"]]);
}

/// Damaged files are named with their line; all that is whole is reported.
#[test]
fn damaged_files_are_named_and_the_rest_is_reported() {
    let world = world();
    let run = builder::four_cases(world.path());
    let trial = |name: &str| run.folder.trials().join(name);
    fs::write(trial("c1-train-64-0/attempt-1/result.json"), "{\n  \"protocol\": 1,\n  \"trial\": }\n").unwrap();
    let messages = trial("c2-train-128-0/attempt-1/messages.jsonl");
    let text = fs::read_to_string(&messages).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines[4] = "{\"at\": \"yesterday\"}";
    let torn = &lines[10][..20];
    lines.truncate(10);
    fs::write(&messages, format!("{}\n{torn}", lines.join("\n"))).unwrap();
    let telemetry = trial("c3-train-256-0/attempt-1/telemetry.csv");
    let text = fs::read_to_string(&telemetry).unwrap();
    fs::write(&telemetry, text.replacen("host", "host,7", 1) + "99.0,ho").unwrap();
    fs::write(trial("c4-probe-64-0/trial.json"), "[]").unwrap();
    let events = fs::read_to_string(run.folder.events()).unwrap();
    fs::write(run.folder.events(), events.replacen("\"kind\":\"trial_started\"", "\"kind\":", 1)).unwrap();
    let summary = generate(&run.folder).unwrap();
    let unreadable = summary.unreadable.join("\n").replace(&world.path().display().to_string(), "RUN");
    snapshot("unreadable.txt", &unreadable);
    let table = report_of(&run, "table1.csv");
    let rows = cells(&table);
    assert_eq!(rows[0][3], "", "{table}");
    assert!(table.contains("its result.json is missing or cannot be read"), "{table}");
    assert!(rows[1..].iter().all(|row| !row[3].is_empty() && !row[4].is_empty()), "{rows:?}");
    assert!(report_of(&run, "report.md").contains("## Files that could not be read"));
}

/// CASES 40: a newer format says which version it needs; an older one is read.
#[test]
fn formats_of_other_versions() {
    let world = world();
    let mut run = builder::four_cases(world.path());
    run.manifest.format_version = 0;
    run.write_manifest();
    generate(&run.folder).unwrap();
    fs::write(run.folder.manifest(), "{\"format_version\": 2, \"sweep_version\": \"3.1.4\", \"unknown\": true}").unwrap();
    let error = generate(&run.folder).unwrap_err().to_string();
    assert!(error.contains("results format 2") && error.contains("use sweep 3.1.4 or newer"), "{error}");
    fs::remove_file(run.folder.manifest()).unwrap();
    let error = generate(&run.folder).unwrap_err().to_string();
    assert!(error.contains("run.json"), "{error}");
}

/// Repeats are means with their spread; a repeat that failed is named; a missing one too.
#[test]
fn repeats_are_means_with_their_spread() {
    let world = world();
    let mut run = Run::begin(world.path(), builder::four_rows());
    run.manifest.repeats = 2;
    run.write_manifest();
    for row in 0..3 {
        run.found(row, Some(64), LimitedBy::Candidates);
        run.train(row, 64, 0, &Training { perplexity: Some(40.0), peak_bytes: 30 * MIB, ..Training::default() });
    }
    run.train(0, 64, 1, &Training { perplexity: Some(42.0), peak_bytes: 31 * MIB, step_seconds: 0.35, ..Training::default() });
    let outcome = TrialOutcome::Crashed { code: None, signal: Some(11) };
    run.train(1, 64, 1, &Training { perplexity: None, perplexity_common: None, outcome, ..Training::default() });
    run.end(100, 0);
    let summary = generate(&run.folder).unwrap();
    let table = report_of(&run, "table1.csv");
    let rows = cells(&table);
    assert_eq!((rows[0][3].as_str(), rows[0][4].as_str(), rows[0][6].as_str()), ("134.25", "41", (31 * MIB).to_string().as_str()));
    assert!(table.contains("perplexity: mean of 2 repeats, standard deviation 1.41"), "{table}");
    assert!(table.contains("time_per_epoch_s: mean of 2 repeats, standard deviation 31.64 s"), "{table}");
    assert!(table.contains("peak_memory_bytes: largest of 2 repeats"), "{table}");
    assert_eq!(rows[1][4], "40");
    assert!(table.contains("repeat 2 of 2 crashed: ended by SIGSEGV"), "{table}");
    assert!(table.contains("1 of 2 repeats have not run"), "{table}");
    assert_eq!(summary.failed.len(), 1);
}

/// Rows with unequal tokens seen are never called better or worse; where they are equal, differences to the control are shown.
#[test]
fn only_rows_with_equal_tokens_seen_are_compared() {
    let world = world();
    let mut run = Run::begin(world.path(), builder::four_rows());
    run.manifest.control = Some("FSDP + full_shard".into());
    run.manifest.report.price_per_device_hour = Some(3.6);
    run.write_manifest();
    for (row, (perplexity, tokens_per_step)) in [(80.0, 6144), (60.0, 6144), (10.0, 12288)].into_iter().enumerate() {
        run.found(row, Some(64), LimitedBy::Candidates);
        let common = Some(perplexity);
        run.train(row, 64, 0, &Training { perplexity: common, perplexity_common: common, tokens_per_step, ..Training::default() });
    }
    run.end(0, 0);
    generate(&run.folder).unwrap();
    let page = report_of(&run, "report.md");
    assert!(page.contains("Perplexities are not ranked, because the rows saw unequal numbers of tokens."), "{page}");
    assert!(!page.contains("Lowest perplexity"), "{page}");
    assert!(page.contains("-25.0 %") && page.contains("not comparable: it saw 737,280 tokens, the control 368,640"), "{page}");
    assert!(report_of(&run, "table1.csv").contains("tokens_seen: rows differ in tokens seen"));
    // 0.25 s a step, 447.5 steps an epoch, 4 devices at 3.6 an hour.
    assert!(report_of(&run, "table1.csv").lines().next().unwrap().ends_with(",notes,cost_per_epoch"));
    assert!(report_of(&run, "table1.md").contains("| Cost per epoch |") && report_of(&run, "table1.md").contains("| 0.4475"));
}

/// Rows that share a configuration, because their differences cannot matter, both show its numbers; a fixed block size is not a search result.
#[test]
fn collapsed_rows_share_their_numbers() {
    let world = world();
    let mut rows = builder::four_rows();
    rows.truncate(2);
    rows[1].configuration = rows[0].configuration.clone();
    rows[1].row.collapsed = vec!["world size 1 makes TRANSFORMER_BASED_WRAP irrelevant".into()];
    for row in &mut rows {
        row.row.block_size = Some(64);
    }
    let mut run = Run::begin(world.path(), rows);
    run.manifest.search = None;
    run.write_manifest();
    run.train(0, 64, 0, &Training::default());
    run.end(0, 0);
    generate(&run.folder).unwrap();
    let table = report_of(&run, "table1.csv");
    let rows = cells(&table);
    assert_eq!(rows[0][1..10], rows[1][1..10]);
    assert_eq!(&rows[0][1..3], ["64", ""]);
    assert!(table.contains("limited_by: the block size is fixed by the sweep file, not searched"), "{table}");
    assert!(rows[1][10].starts_with("\"world size 1 makes TRANSFORMER_BASED_WRAP irrelevant"), "{table}");
    assert!(report_of(&run, "table2.md").contains("- [1] world size 1 makes TRANSFORMER_BASED_WRAP irrelevant"));
}

/// Thirty rows are spread over pages, and every row is drawn.
#[test]
fn many_rows_are_spread_over_pages() {
    let world = world();
    let rows = (0..30).map(|index| builder::row(&format!("c{index:02}"), &format!("row number {index}"), builder::settings())).collect();
    let mut run = Run::begin(world.path(), rows);
    run.found(29, Some(64), LimitedBy::Candidates);
    run.train(29, 64, 0, &Training { steps: 2_000, telemetry_samples: 3_000, ..Training::default() });
    let summary = generate(&run.folder).unwrap();
    assert_eq!(summary.files.len(), 8 + 2 * (2 + 5 + 5 + 5));
    assert!(report_of(&run, "plots/memory-5.svg").contains("AD: row number 29"));
    assert!(report_of(&run, "plots/max_block_size-2.svg").contains("64, limited by candidates"));
    assert!(fs::metadata(run.folder.report().join("plots/loss-5.svg")).unwrap().len() < 60_000, "thousands of points are thinned");
}

fn sweep(folder: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_sweep")).args(arguments).current_dir(folder).env_clear().output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// `sweep report` without arguments takes the newest run, writes its report and shows Table 1 in brief.
#[test]
fn the_command_reports_the_newest_run() {
    let world = world();
    let (code, _, stderr) = sweep(world.path(), &["report"]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("there is no run in results"), "{stderr}");
    let folder = world.path().join("results/gpt2_blocksize/20261130T120000Z-abcdef");
    let run = builder::four_cases(&folder);
    let (code, stdout, stderr) = sweep(world.path(), &["report"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    snapshot("command.txt", &stdout);
    assert!(run.folder.report().join("table1.md").exists());
    fs::write(run.folder.manifest(), "{\"format_version\": 9, \"sweep_version\": \"9.0.0\"}").unwrap();
    let (code, _, stderr) = sweep(world.path(), &["report", "results/gpt2_blocksize"]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("use sweep 9.0.0 or newer"), "{stderr}");
}

/// The summary's type is what the run command shows at its end.
#[test]
fn the_summary_says_where_the_report_lies() {
    let world = world();
    let run = builder::four_cases(world.path());
    let summary: Summary = generate(&run.folder).unwrap();
    assert_eq!(summary.folder, run.folder.report());
    assert!(summary.files.iter().all(|file| file.is_file()));
}
