//! `sweep run --launcher slurm`: against programs that play SLURM's, and, where `.ci/slurm` has started one, against a real cluster.

mod fakes;
mod real;

use std::fs;

use crate::world::World;

/// The `[slurm]` table of the tests: nothing is waited for longer than it takes.
const QUICK: &str = "[slurm]\npoll_interval = \"200ms\"\nfile_delay = \"1s\"\n";

/// A sweep with a quick `[slurm]` table before its first `table`, where tables that are not lists belong.
fn quick(sweep: &str, more: &str) -> String {
    let place = sweep.find("[limits]").unwrap();
    format!("{}{QUICK}{more}{}", &sweep[..place], &sweep[place..])
}

/// Numbers of the job arrays that were submitted.
fn batches(world: &World) -> Vec<String> {
    let entries = fs::read_dir(world.newest().slurm()).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).filter(|name| name.parse::<u32>().is_ok()).collect();
    names.sort();
    names
}

/// The id of the array of a batch, once it is on record.
fn array(world: &World, batch: &str) -> Option<String> {
    let record: serde_json::Value = serde_json::from_slice(&fs::read(world.newest().slurm().join(batch).join("job.json")).ok()?).unwrap();
    Some(record["job"].as_str()?.to_owned())
}

fn ends(world: &World) -> usize {
    world.log().iter().filter(|line| line[0] == "end").count()
}
