//! TERM and USR2: a trial that is asked to end saves its state at the next optimiser step and exits with code 75, to be run again.
//!
//! While there is nothing to lose it exits at once. A second TERM ends it as any process ends by TERM, but not under SLURM: `scancel` sends TERM to the step and
//! to the batch script, whose srun passes it on, and KILL follows by itself.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGTERM, SIGUSR2};
use signal_hook::flag;

use crate::trial::child_exit;

/// Whether this process was asked to end, and what it does then.
#[derive(Debug, Default)]
pub struct Preemption {
    requested: Arc<AtomicBool>,
    /// There is nothing to save: the handler itself ends the process.
    at_once: Arc<AtomicBool>,
}

impl Preemption {
    /// Watches for the signals from here on. Until [`Self::await_next_step`] they end the process at once.
    ///
    /// # Errors
    /// The system refuses to tell of signals.
    pub fn watch() -> io::Result<Self> {
        let of_slurm = std::env::var_os("SLURM_JOB_ID").is_some();
        let preemption = Self { requested: Arc::default(), at_once: Arc::new(AtomicBool::new(true)) };
        let terminated = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGUSR2] {
            flag::register_conditional_shutdown(signal, child_exit::CHECKPOINTED, Arc::clone(&preemption.at_once))?;
            flag::register(signal, Arc::clone(&preemption.requested))?;
        }
        // USR2 is a warning that TERM may follow while state is being saved, so only TERM itself counts as the first of two. Actions run in the order of
        // their registration: the first TERM finds the flag not yet set.
        if !of_slurm {
            flag::register_conditional_default(SIGTERM, Arc::clone(&terminated))?;
            flag::register(SIGTERM, terminated)?;
        }
        Ok(preemption)
    }

    /// From here on there is something to lose: a request waits until [`Self::is_requested`] is asked.
    pub fn await_next_step(&self) {
        self.at_once.store(false, Ordering::SeqCst);
    }

    /// Whether this process was asked to end.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }
}
