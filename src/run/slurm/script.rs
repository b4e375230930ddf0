//! The batch script of a job array: what SLURM is asked for, and what each of its tasks does. Pure text.

use std::path::Path;
use std::time::Duration;

use crate::spec::slurm::SlurmSettings;

/// What each task of an array needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Needs {
    pub(super) nodes: usize,
    pub(super) cpus_per_task: usize,
    pub(super) gpus_per_node: Option<usize>,
}

/// An array, as far as the sweep file does not say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Array<'a> {
    /// Name of its jobs, by which they are found again.
    pub(super) name: &'a str,
    /// How many tasks it has.
    pub(super) tasks: usize,
    pub(super) needs: Needs,
    /// Its folder: the logs of its tasks go there, and `tasks.txt` has the attempt's folder of each on a line.
    pub(super) folder: &'a Path,
    /// What is started for each attempt.
    pub(super) program: &'a Path,
}

/// The script.
pub(super) fn script(array: &Array<'_>, settings: &SlurmSettings) -> String {
    let setup: String = settings.setup.iter().map(|line| format!("{line}\n")).collect();
    let setup = if setup.is_empty() { setup } else { format!("\n# What the sweep file asks for.\n{setup}") };
    let Needs { nodes, cpus_per_task, .. } = array.needs;
    // One process on each node holds the ranks of that node; only where there are several must be said whose line a line is.
    let label = if nodes > 1 { " --label" } else { "" };
    let head = directives(array, settings).into_iter().map(|directive| format!("#SBATCH {directive}\n")).collect::<String>();
    format!(
        r#"#!/bin/bash
{head}
# Written by sweep. Each task runs one attempt of a trial, and leaves its exit code in the attempt's folder.

say() {{ echo "sweep: $*" >&2; }}
attempt=$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {tasks})
say "task ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)) of $attempt on $SLURM_JOB_NODELIST"

# A task comes back after its node was lost or its time was over. Where its attempt has ended, or another has taken its place, nothing is left to do.
if [ -d "${{attempt%-*}}-$((${{attempt##*-}} + 1))" ]; then
    say "another attempt has taken its place"
    exit 0
fi
if [ -e "$attempt/exit.json" ]; then
    grep -q '"final":true' "$attempt/exit.json" && exit 0
    rm -f "$attempt/exit.json"
fi

# The warning ahead of the time limit reaches this shell alone and is passed on, so that the trial saves its state. TERM reaches the trial by itself.
child=
warned=
terminated=
trap 'warned=1; interrupted=1; [ -z "$child" ] || kill -USR2 "$child" 2>/dev/null' USR2
trap 'terminated=1; interrupted=1' TERM
{setup}
export CUDA_DEVICE_ORDER=PCI_BUS_ID
steps() {{ grep -c '"kind":"step"' "$attempt/messages.jsonl" 2>/dev/null; }}
before=$(steps)
code=75
if [ -z "$warned$terminated" ]; then
    srun --nodes={nodes} --ntasks={nodes} --cpus-per-task={cpus_per_task} --kill-on-bad-exit=1 --unbuffered{label} --open-mode=append \
        --output="${{attempt//%/%%}}/stdout.log" --error="${{attempt//%/%%}}/stderr.log" {program} trial "$attempt/request.json" &
    child=$!
    # A signal ends a wait early: only one that was not disturbed tells how the trial ended. 127 says that it was told before.
    code=127
    interrupted=1
    while [ -n "$interrupted" ]; do
        interrupted=
        wait "$child"
        status=$?
        [ "$status" -eq 127 ] || code=$status
    done
fi

# A trial that saved its state goes on where it was when its turn comes again, as long as it gets anywhere at all.
requeue_failed=false
after=$(steps)
if [ "$code" -eq 75 ] && [ -z "$terminated" ] && [ "${{after:-0}}" -gt "${{before:-0}}" ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" && exit 75
    say "scontrol cannot put the task back into the queue; sweep submits it again"
    requeue_failed=true
fi
# What the trial came to by itself is final; where it was ended from outside SLURM may still put the task back into the queue.
case "$code" in
0 | 2 | 3 | 4) final=true ;;
75) final=false ;;
*) [ "$code" -le 128 ] && [ -z "$terminated" ] && final=true || final=false ;;
esac
[ -n "$terminated" ] && terminated=true || terminated=false
printf '{{"exit_code":%d,"final":%s,"terminated":%s,"requeue_failed":%s,"seconds":%d}}\n' \
    "$code" "$final" "$terminated" "$requeue_failed" "$SECONDS" >"$attempt/.exit.json" &&
    mv "$attempt/.exit.json" "$attempt/exit.json"
exit "$code"
"#,
        tasks = shell_quoted(&array.folder.join("tasks.txt").to_string_lossy()),
        program = shell_quoted(&array.program.to_string_lossy()),
    )
}

/// Options of `sbatch`: sweep's own first, then those of the sweep file.
pub(super) fn directives(array: &Array<'_>, settings: &SlurmSettings) -> Vec<String> {
    let throttle = settings.array_limit.map(|limit| format!("%{limit}")).unwrap_or_default();
    let log = array.folder.join("%a.log").to_string_lossy().into_owned();
    let folder = array.folder.to_string_lossy().replace('%', "%%");
    let log = log.replacen(&*array.folder.to_string_lossy(), &folder, 1);
    let mut directives = vec![
        format!("--job-name={}", array.name),
        format!("--array=1-{}{throttle}", array.tasks),
        format!("--output={}", quoted(&log)),
        "--open-mode=append".to_owned(),
        "--requeue".to_owned(),
        format!("--signal=B:USR2@{}", settings.signal_before.as_secs().max(1)),
        format!("--nodes={}", array.needs.nodes),
        "--ntasks-per-node=1".to_owned(),
        format!("--cpus-per-task={}", array.needs.cpus_per_task),
    ];
    let mut option = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            directives.push(format!("--{name}={}", quoted(&value)));
        }
    };
    option("gpus-per-node", array.needs.gpus_per_node.map(|gpus| gpus.to_string()));
    // SLURM's M is a MiB.
    option("mem", settings.mem.map(|bytes| format!("{}M", bytes.div_ceil(1 << 20))));
    option("time", settings.time.map(time));
    option("partition", settings.partition.clone());
    option("account", settings.account.clone());
    option("qos", settings.qos.clone());
    option("constraint", settings.constraint.clone());
    for more in &settings.options {
        directives.push(match &more.value {
            Some(value) => format!("--{}={}", more.name, quoted(value)),
            None => format!("--{}", more.name),
        });
    }
    directives
}

/// A time as SLURM writes it: days-hours:minutes:seconds.
fn time(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes, seconds) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{days}-{hours:02}:{minutes:02}:{seconds:02}")
}

/// A value of a `#SBATCH` line, in quotes where it needs them.
fn quoted(value: &str) -> String {
    let plain = |character: char| character.is_alphanumeric() || "@%_+=:,./-&|*()[]".contains(character);
    if !value.is_empty() && value.chars().all(plain) { value.to_owned() } else { format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"")) }
}

/// A word of a shell script.
fn shell_quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::slurm::SbatchOption;

    fn array() -> Array<'static> {
        Array {
            name: "sweep-20261130T154932.123456Z-abcdef-4",
            tasks: 1,
            needs: Needs { nodes: 1, cpus_per_task: 4, gpus_per_node: None },
            folder: Path::new("/home/ada/results/night/20261130T154932.123456Z-abcdef/slurm/4"),
            program: Path::new("/home/ada/bin/sweep"),
        }
    }

    fn settings() -> SlurmSettings {
        SlurmSettings { nodes: 1, signal_before: Duration::from_secs(120), ..SlurmSettings::default() }
    }

    /// The whole text: what we send to others changes only in plain sight.
    #[test]
    fn the_shortest_script() {
        insta::assert_snapshot!(script(&array(), &settings()));
    }

    #[test]
    fn every_key_has_its_place_in_the_script() {
        let option = |name: &str, value: Option<&str>| SbatchOption { name: name.to_owned(), value: value.map(str::to_owned) };
        let settings = SlurmSettings {
            partition: Some("a100".into()),
            account: Some("lab".into()),
            qos: Some("long".into()),
            constraint: Some("nvlink&80gb".into()),
            time: Some(Duration::from_secs(36 * 3600 + 61)),
            mem: Some(1_000_000_000),
            setup: vec!["module load cuda".into(), "export X='a b'".into()],
            array_limit: Some(3),
            signal_before: Duration::from_secs(300),
            options: vec![option("exclusive", None), option("comment", Some("night \"run\"")), option("nice", Some("100"))],
            ..settings()
        };
        let array = Array {
            tasks: 12,
            needs: Needs { nodes: 2, cpus_per_task: 16, gpus_per_node: Some(4) },
            folder: Path::new("/home/ada/my results/100%/slurm/5"),
            program: Path::new("/home/ada's/sweep"),
            ..array()
        };
        insta::assert_snapshot!(script(&array, &settings));
    }

    #[test]
    fn times_are_written_as_slurm_reads_them() {
        let table = [(60, "0-00:01:00"), (3599, "0-00:59:59"), (86_400, "1-00:00:00"), (30 * 86_400 + 3_661, "30-01:01:01")];
        for (seconds, expected) in table {
            assert_eq!(time(Duration::from_secs(seconds)), expected);
        }
    }
}
