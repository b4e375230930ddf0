//! Expands grids of growing size to rows, labels and settings included. Run with `cargo bench --profile dev --no-default-features --bench expand`; the
//! time per point should stay level and a million points should take under a second.
#![expect(clippy::print_stdout, reason = "a benchmark prints its measurements")]

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

use sweep::spec::{self, Overlays, Surroundings};

fn main() {
    for digits in 3..=6 {
        let text = grid(digits);
        let start = Instant::now();
        let plan = match spec::load("bench.toml", &text, &Overlays::default(), &Surroundings::default()) {
            Ok(plan) => plan,
            Err(errors) => {
                println!("{errors}");
                return;
            }
        };
        let planned = start.elapsed();
        let rows = plan.rows.iter().map(black_box).count();
        let seconds = start.elapsed().as_secs_f64();
        println!("{rows:>9} points: {seconds:.3} s, {:.0} ns a point, of that read and counted in {planned:.1?}", seconds * 1e9 / rows as f64);
    }
}

/// A grid of ten to the power of `digits` points.
fn grid(digits: usize) -> String {
    let keys = ["learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "seed"];
    let mut text =
        "[model]\nid = \"gpt2-tiny\"\n[fsdp]\nauto_wrap_policy = \"TRANSFORMER_BASED_WRAP\"\n[device]\nworld_size = 2\n[grid]\n".to_owned();
    for (place, key) in keys.iter().enumerate().take(digits) {
        let values: Vec<String> = (1..=10).map(|value| if place < 4 { format!("{value}e-5") } else { value.to_string() }).collect();
        let _ = writeln!(text, "{key} = [{}]", values.join(", "));
    }
    text
}
