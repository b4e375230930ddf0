//! What carries out the dispatcher's commands: the seam between the run loop and whatever starts attempts.

use super::executor::ExecutorOptions;
use super::leases::Place;
use super::slurm::SlurmOptions;
use crate::spec::settings::DeviceKind;
use crate::store::AttemptFolder;
use crate::trial::TrialId;

/// An attempt whose folder and request are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub(super) trial: TrialId,
    pub(super) attempt: u32,
    pub(super) folder: AttemptFolder,
    /// Where it may compute; names nothing where another decides.
    pub(super) place: Place,
    /// How many ranks it has, and what they compute on.
    pub(super) ranks: usize,
    pub(super) device: DeviceKind,
}

/// What starts the attempts of a run.
#[derive(Clone, Debug)]
pub enum LauncherOptions {
    /// This machine.
    Local(ExecutorOptions),
    /// A SLURM cluster.
    Slurm(Box<SlurmOptions>),
}

impl From<ExecutorOptions> for LauncherOptions {
    fn from(options: ExecutorOptions) -> Self {
        Self::Local(options)
    }
}

/// Starts attempts and ends them. None of its calls waits for anything; what comes of them goes to the run loop's inbox.
pub(super) trait Launcher {
    /// Starts an attempt, at the latest with the next [`Launcher::flush`]. Whatever comes of it, an input that says that it ended is the last word on it.
    fn spawn(&mut self, launch: Launch);
    /// Every attempt that could be started for now has been given to [`Launcher::spawn`].
    fn flush(&mut self) {}
    /// Records what an attempt is doing beside its logs, under `last_words`, as far as that can be seen from here.
    fn examine(&mut self, trial: &TrialId, last_words: &str) {
        let _ = (trial, last_words);
    }
    /// Asks an attempt to end, if it still runs.
    fn terminate(&mut self, trial: &TrialId);
    /// Ends an attempt at once, if it still runs.
    fn kill(&mut self, trial: &TrialId);
    /// Gives back what is left when the run is over; every attempt has ended, or is none of this run's business any more.
    fn join(self: Box<Self>);
}
