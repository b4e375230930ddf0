//! Time to make the report of a run of 1,000 trials: 200 rows with four probes and one training each. To be kept under 3 s in the everyday profile.
#![expect(clippy::print_stdout, reason = "a bench prints its measurement")]

use std::time::Instant;

use sweep::event::LimitedBy;

#[path = "../tests/it/report/builder.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod builder;

const ROWS: usize = 200;

fn main() {
    let folder = tempfile::tempdir().expect("a folder for the run");
    let rows = (0..ROWS).map(|index| builder::row(&format!("configuration-{index:03}"), &format!("row {index}"), builder::settings())).collect();
    let mut run = builder::Run::begin(folder.path(), rows);
    let training = builder::Training { steps: 300, telemetry_samples: 600, ..builder::Training::default() };
    for row in 0..ROWS {
        for (block_size, fits) in [(64, true), (128, true), (256, true), (512, false)] {
            run.probe(row, block_size, fits);
        }
        run.found(row, Some(256), LimitedBy::Memory);
        run.train(row, 256, 0, &training);
    }
    run.end(0, 0);
    for what in ["first", "again"] {
        let begin = Instant::now();
        let summary = sweep::report::generate(&run.folder).expect("a report");
        println!("report of {} trials, {what}: {:.2} s, {} files", 5 * ROWS, begin.elapsed().as_secs_f64(), summary.files.len());
    }
}
