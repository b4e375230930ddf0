//! A rank's communication thread: collectives run on it in the order in which they are issued, while the rank's own thread computes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::ranks::panic_text;
use crate::train::error::TrainError;

type Job = Box<dyn FnOnce() + Send>;

/// Hands collectives to a rank's communication thread. The thread ends when the last handle goes and everything issued is done.
#[derive(Clone, Debug)]
pub struct Communicator {
    jobs: Sender<Job>,
}

impl Communicator {
    /// A communicator, and the loop that its thread must run.
    pub(super) fn new() -> (Self, impl FnOnce() + Send) {
        let (jobs, queue) = channel::<Job>();
        (Self { jobs }, move || queue.into_iter().for_each(|job| job()))
    }

    /// Issues a collective.
    pub(super) fn issue<T: Send + 'static>(&self, collective: impl FnOnce() -> Result<T, TrainError> + Send + 'static) -> Work<T> {
        let outcome = Arc::new(Outcome::default());
        let done = outcome.clone();
        let job = Box::new(move || {
            let result = catch_unwind(AssertUnwindSafe(collective)).unwrap_or_else(|panic| Err(TrainError::Failed(panic_text(&*panic))));
            done.set(result);
        });
        if self.jobs.send(job).is_err() {
            outcome.set(Err(TrainError::Failed("the communication thread has ended".to_owned())));
        }
        Work(outcome)
    }
}

/// A collective that was issued: PyTorch's `Work`.
#[derive(Debug)]
pub(super) struct Work<T>(Arc<Outcome<T>>);

#[derive(Debug)]
struct Outcome<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
enum State<T> {
    Running,
    Done(Result<T, TrainError>),
    Taken,
}

impl<T> Default for Outcome<T> {
    fn default() -> Self {
        Self { state: Mutex::new(State::Running), changed: Condvar::new() }
    }
}

impl<T> Outcome<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, result: Result<T, TrainError>) {
        *self.lock() = State::Done(result);
        self.changed.notify_all();
    }

    fn wait(&self) -> MutexGuard<'_, State<T>> {
        self.changed.wait_while(self.lock(), |state| matches!(state, State::Running)).unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Work<T> {
    /// Waits for the collective to end and takes its result.
    pub(super) fn wait(self) -> Result<T, TrainError> {
        match std::mem::replace(&mut *self.0.wait(), State::Taken) {
            State::Done(result) => result,
            State::Running | State::Taken => Err(TrainError::Failed("a collective's result was taken twice".to_owned())),
        }
    }
}

/// Whether a collective has ended, whoever takes its result.
pub(super) trait Progress: Send + Sync {
    /// Whether it has ended.
    fn is_done(&self) -> bool;
    /// Waits until it has.
    fn wait_until_done(&self);
}

impl<T: Send> Progress for Outcome<T> {
    fn is_done(&self) -> bool {
        !matches!(*self.lock(), State::Running)
    }

    fn wait_until_done(&self) {
        drop(self.wait());
    }
}

impl<T: Send + 'static> Work<T> {
    /// A view of its progress.
    pub(super) fn progress(&self) -> Arc<dyn Progress> {
        self.0.clone()
    }
}
