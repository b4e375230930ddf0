//! The command line as typed. Nothing here is resolved or checked beyond its form.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Decides by measurement how to fine-tune language models with fully sharded data parallelism.
#[derive(Debug, Parser)]
#[command(version, about, max_term_width = 120)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Commands, one module of `commands/` each.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Expand a sweep file, run every trial in a child process, measure, write tables and plots
    Run(RunArguments),
    /// Print every configuration and trial of a sweep file, and what was collapsed or refused and why
    Plan(PlanArguments),
    /// Write tables and plots again from the results folder alone
    Report(ReportArguments),
    /// Show a run from its folder
    Status(StatusArguments),
    /// Compare two runs and flag regressions
    Compare(CompareArguments),
    /// List devices and what can be measured on them
    Devices(DevicesArguments),
    /// Run one trial; what `sweep run` starts
    #[command(hide = true)]
    Trial(TrialArguments),
    /// Look after the processes of trials; what `sweep run` starts
    #[command(hide = true)]
    Supervise,
}

/// Where a sweep file comes from and what is laid over it.
#[derive(Debug, Clone, Args)]
pub struct SweepFileArguments {
    /// The sweep file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Lay [profile.NAME] over the file; "cpu" is applied by itself where there is no CUDA device
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// Set a key after profiles, as TOML: --set train.max_steps=100; may be given more than once
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// `sweep run`
#[derive(Debug, Clone, Args)]
pub struct RunArguments {
    /// The sweep file and its overlays.
    #[command(flatten)]
    pub sweep: SweepFileArguments,
    /// Where results go
    #[arg(long, value_name = "DIR", default_value = "results")]
    pub results: PathBuf,
    /// Go on with the newest run of this sweep; the default where that run is unfinished
    #[arg(long, conflicts_with = "new")]
    pub resume: bool,
    /// Start a new run even where the newest is unfinished
    #[arg(long)]
    pub new: bool,
    /// Take over a run that another machine holds; only where it does not run there any more
    #[arg(long)]
    pub force_unlock: bool,
    /// Run only rows with this label, or this trial or configuration id; may be given more than once
    #[arg(long, value_name = "LABEL|ID")]
    pub only: Vec<String>,
    /// Run trials of the newest run again: those that failed, all, or one by its id
    #[arg(long, value_name = "failed|all|ID")]
    pub rerun: Option<String>,
    /// Trials at a time
    #[arg(long, value_name = "N")]
    pub jobs: Option<usize>,
    /// Stop at the first failed trial
    #[arg(long)]
    pub fail_fast: bool,
    /// What starts the children
    #[arg(long, value_enum, default_value_t = Launcher::Local)]
    pub launcher: Launcher,
    /// Print events as JSON lines instead of progress
    #[arg(long)]
    pub json: bool,
}

/// What starts the children.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Launcher {
    /// This machine
    Local,
    /// A SLURM cluster
    Slurm,
}

/// `sweep plan`
#[derive(Debug, Clone, Args)]
pub struct PlanArguments {
    /// The sweep file and its overlays.
    #[command(flatten)]
    pub sweep: SweepFileArguments,
    /// Print JSON with every resolved value
    #[arg(long)]
    pub json: bool,
}

/// Which run, for commands that read one.
#[derive(Debug, Clone, Args)]
pub struct RunChoice {
    /// A run folder, or a sweep's folder; the newest run by default
    #[arg(value_name = "RUN")]
    pub run: Option<PathBuf>,
    /// Where results are looked for
    #[arg(long, value_name = "DIR", default_value = "results")]
    pub results: PathBuf,
}

/// `sweep report`
#[derive(Debug, Clone, Args)]
pub struct ReportArguments {
    /// Which run.
    #[command(flatten)]
    pub run: RunChoice,
}

/// `sweep status`
#[derive(Debug, Clone, Args)]
pub struct StatusArguments {
    /// Which run.
    #[command(flatten)]
    pub run: RunChoice,
}

/// `sweep compare`
#[derive(Debug, Clone, Args)]
pub struct CompareArguments {
    /// The run compared with
    pub base: PathBuf,
    /// The run that is judged
    pub head: PathBuf,
}

/// `sweep devices`
#[derive(Debug, Clone, Args)]
pub struct DevicesArguments {
    /// Check that what is listed can really be measured
    #[arg(long)]
    pub self_test: bool,
}

/// `sweep trial`
#[derive(Debug, Clone, Args)]
pub struct TrialArguments {
    /// The request; answers are written beside it
    pub request: PathBuf,
}
