//! The `[slurm]` table.

use std::time::Duration;

use super::super::ids::{ContentHashes, configuration_id};
use super::super::slurm::{SbatchOption, SlurmSettings};
use super::*;

const FULL: &str = r#"
[slurm]
partition = "a100"
account = "lab"
qos = "long"
constraint = "nvlink&80gb"
time = "1d 12h"
gpus_per_node = 4
cpus_per_task = 16
mem = "120GiB"
setup = ["module load cuda", "", "ulimit -n 65536"]
array_limit = 3
signal_before = "5m"
poll_interval = "1m"
file_delay = "0s"
[slurm.options]
exclusive = true
mail-type = "END,FAIL"
nice = 100
"#;

#[test]
fn every_key_is_read() {
    let option = |name: &str, value: Option<&str>| SbatchOption { name: name.to_owned(), value: value.map(str::to_owned) };
    let expected = SlurmSettings {
        partition: Some("a100".into()),
        account: Some("lab".into()),
        qos: Some("long".into()),
        constraint: Some("nvlink&80gb".into()),
        time: Some(Duration::from_secs(36 * 3600)),
        nodes: 1,
        gpus_per_node: Some(4),
        cpus_per_task: Some(16),
        mem: Some(120 << 30),
        setup: vec!["module load cuda".into(), String::new(), "ulimit -n 65536".into()],
        array_limit: Some(3),
        signal_before: Duration::from_secs(300),
        poll_interval: Duration::from_secs(60),
        file_delay: Duration::ZERO,
        options: vec![option("exclusive", None), option("mail-type", Some("END,FAIL")), option("nice", Some("100"))],
    };
    assert_eq!(base_and(FULL).slurm, expected);
}

#[test]
fn overlays_reach_it() {
    let text = format!("{BASE}{FULL}[profile.night.slurm]\npartition = \"night\"\n");
    let overlays = Overlays { profile: Some("night".into()), sets: vec!["slurm.options.nice=5".into(), "cpus_per_task=2".into()] };
    let slurm = load("night.toml", &text, &overlays, &Surroundings::default()).unwrap_or_else(|errors| panic!("{errors}")).slurm;
    assert_eq!((slurm.partition.as_deref(), slurm.cpus_per_task), (Some("night"), Some(2)));
    assert_eq!(slurm.options, [SbatchOption { name: "nice".into(), value: Some("5".into()) }]);
}

/// Where a trial runs does not change which trial it is.
#[test]
fn it_is_in_no_id() {
    let id = |text: &str| configuration_id(&only_row(&base_and(text)).effective, &ContentHashes::default());
    assert_eq!(id(""), id(FULL));
}

#[test]
fn mistakes_are_found_at_their_place() {
    let cases: &[(&str, &str)] = &[
        ("partion = \"a\"", "4:1: unknown key `partion` in [slurm]"),
        ("partition = \"a\\nb\"", "4:13: slurm.partition: the text is longer than a line, or holds characters that cannot be seen"),
        ("time = \"30s\"", "4:8: slurm.time: \"30s\" is too short"),
        ("time = 60", "4:8: slurm.time: this is an integer"),
        ("cpus_per_task = 0", "4:17: slurm.cpus_per_task: 0 is too small"),
        ("mem = 4", "4:7: slurm.mem: this is an integer"),
        ("setup = \"module load cuda\"", "4:9: slurm.setup: this is a string"),
        ("setup = [1]", "4:10: slurm.setup: this is an integer"),
        ("options = { mail_type = \"END\" }", "4:13: slurm.options: `mail_type` is not the long name of an option of sbatch"),
        ("options = { partition = \"a\" }", "4:13: slurm.options: `partition` has a key of its own"),
        ("options = { output = \"a\" }", "4:13: slurm.options: `output` is sweep's to set"),
        ("options = { exclusive = false }", "4:25: slurm.options: an option that is not wanted is left out"),
        ("options = { nice = [1] }", "4:20: slurm.options: not the value of an option"),
        ("options = { nice = -1 }", "4:20: slurm.options: -1 is negative"),
    ];
    for (text, expected) in cases {
        assert_eq!(mistakes_in(&format!("{BASE}[slurm]\n{text}\n")), [*expected], "{text}");
    }
}
