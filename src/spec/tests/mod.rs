//! Sweep files as users write them, right and wrong.

mod checks;
mod expansion;
mod identity;
mod mistakes;
mod overlays;
mod slurm;

use super::plan::{Row, SweepPlan};
use super::*;

/// The shortest file that can be run.
const BASE: &str = "[model]\nid = \"gpt2-tiny\"\n";

fn load_with(text: &str, sets: &[&str]) -> Result<SweepPlan, SpecErrors> {
    let overlays = Overlays { profile: None, sets: sets.iter().map(|set| (*set).to_owned()).collect() };
    load("night.toml", text, &overlays, &Surroundings::default())
}

/// The plan of a file without mistakes.
fn plan(text: &str) -> SweepPlan {
    plan_with(text, &[])
}

fn plan_with(text: &str, sets: &[&str]) -> SweepPlan {
    load_with(text, sets).unwrap_or_else(|errors| panic!("{errors}"))
}

/// The plan of [`BASE`] and more.
fn base_and(text: &str) -> SweepPlan {
    plan(&format!("{BASE}{text}"))
}

fn only_row(plan: &SweepPlan) -> Row {
    assert_eq!(plan.rows.len(), 1, "{:?}", labels(plan));
    plan.rows.get(0).expect("one row")
}

fn errors_with(text: &str, sets: &[&str]) -> SpecErrors {
    match load_with(text, sets) {
        Ok(plan) => panic!("accepted as {:?}", labels(&plan)),
        Err(errors) => errors,
    }
}

/// Messages of the mistakes, each with its place: `line:column: message`.
fn mistakes_in(text: &str) -> Vec<String> {
    mistakes_with(text, &[])
}

fn mistakes_with(text: &str, sets: &[&str]) -> Vec<String> {
    let place = |place: &Place| match place {
        Place::File { line, column, .. } => format!("{line}:{column}"),
        Place::Argument(argument) => format!("--set {argument}"),
        Place::Whole => "file".to_owned(),
    };
    errors_with(text, sets).errors.iter().map(|error| format!("{}: {}", place(&error.place), error.message)).collect()
}

fn labels(plan: &SweepPlan) -> Vec<String> {
    plan.rows.iter().map(|row| row.label).collect()
}
