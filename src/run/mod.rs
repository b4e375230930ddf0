//! The only room with threads, clocks and processes: dispatcher, executor, leases, signals, search.
//!
//! [`dispatcher::Dispatcher`] owns all state and is pure; the executor gives each attempt a thread of its own, which reports to the one inbox of the run
//! loop.

mod child;
mod device_memory;
pub mod dispatcher;
mod executor;
mod launcher;
mod leases;
mod log_end;
mod messages;
mod oom_kills;
mod ports;
mod processes;
pub mod resume;
mod run_loop;
pub mod search;
pub mod slurm;
mod stacks;
mod supervisor;
mod work;

pub use child::{TRIAL_PROGRAM, TrialProgram};
pub use executor::{ExecutorOptions, MakeSamplers};
pub use launcher::LauncherOptions;
pub use leases::{Machine, Place};
pub use processes::MARK;
pub use run_loop::{FailedTrial, Observer, RunSummary, run};
pub use supervisor::supervise;
pub use work::{Candidate, Cluster, Configuration, ConfigurationTrials, KnownTrial, PlannedTrial, Selection, Work};
