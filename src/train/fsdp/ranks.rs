//! The threads that ranks are: each has one that computes, with a private pool of workers, and one that communicates.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use burn::tensor::Device;

use super::communicator::Communicator;
use super::group::{LocalProcessGroup, ProcessGroup, STALL_TIMEOUT};
use crate::train::error::{PANICKED, TrainError};

/// What a rank needs to know of itself.
#[derive(Clone)]
pub struct RankContext {
    /// This rank, below the world size.
    pub rank: usize,
    /// Ranks.
    pub world_size: usize,
    /// The group of all ranks.
    pub group: Arc<dyn ProcessGroup>,
    /// Its communication thread.
    pub communicator: Communicator,
    /// What this rank computes on.
    pub device: Device,
}

/// How ranks are run.
#[derive(Clone)]
pub struct RankOptions<'a> {
    /// Ranks.
    pub world_size: usize,
    /// Worker threads of each.
    pub threads_per_rank: usize,
    /// What they compute on.
    pub device: Device,
    /// See [`STALL_TIMEOUT`].
    pub stall_timeout: Duration,
    /// Called with the error when a rank has failed and another has not ended [`GRACE`] later: a blocked thread cannot be ended, a process can.
    pub on_blocked: &'a (dyn Fn(&TrainError) + Sync),
}

/// How long ranks may take to end once one has failed.
pub const GRACE: Duration = Duration::from_secs(5);

impl RankOptions<'_> {
    /// Ranks on the CPU.
    pub fn new(world_size: usize, threads_per_rank: usize) -> Self {
        Self { world_size, threads_per_rank, device: Device::flex(), stall_timeout: STALL_TIMEOUT, on_blocked: &|_| {} }
    }
}

/// Runs `body` once per rank, each on a thread of its own with a private rayon pool, and returns what each gave, in order of rank. `on_thread` runs first on
/// every thread that works for a rank, with the rank. A rank that panics or returns an error poisons the group; the error returned is that of the rank that
/// failed first.
pub fn run_ranks<T: Send>(
    options: &RankOptions<'_>,
    on_thread: impl Fn(usize) + Clone + Send + Sync + 'static,
    body: impl Fn(RankContext) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, TrainError> {
    let world_size = options.world_size;
    let ends = LocalProcessGroup::new_group(world_size, options.stall_timeout);
    let (ended, outcomes) = channel();
    let body = &body;
    let outcomes: Vec<Result<T, TrainError>> = std::thread::scope(|scope| {
        for group in ends {
            let rank = group.rank();
            let (communicator, communicate) = Communicator::new();
            let context = RankContext { rank, world_size, group: group.clone(), communicator, device: options.device.clone() };
            let named = |name: String| std::thread::Builder::new().name(name);
            let (prepare, prepare_communication) = (on_thread.clone(), on_thread.clone());
            let communication = named(format!("rank {rank} communication")).spawn_scoped(scope, move || {
                prepare_communication(rank);
                communicate();
            });
            let of_rank = ended.clone();
            let computation = communication.and_then(|_| {
                named(format!("rank {rank}")).spawn_scoped(scope, move || {
                    prepare(rank);
                    drop(of_rank.send((rank, run_rank(options.threads_per_rank, context, group, prepare, body))));
                })
            });
            if let Err(error) = computation {
                drop(ended.send((rank, Err(TrainError::Failed(format!("cannot start a thread for a rank: {error}"))))));
            }
        }
        collect(world_size, &outcomes, options.on_blocked)
    });
    let mut values = Vec::with_capacity(world_size);
    let mut failure = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(value) => values.push(value),
            // A rank's own error says more than its neighbours' "rank 1 failed".
            Err(error @ TrainError::Rank { .. }) => failure = failure.or(Some(error)),
            Err(error) if matches!(failure, None | Some(TrainError::Rank { .. })) => {
                failure = Some(if world_size == 1 { error } else { name_rank(rank, error) });
            }
            Err(_) => {}
        }
    }
    failure.map_or(Ok(values), Err)
}

/// Waits for the outcome of every rank, in order of rank; once one has failed, complains about those that do not end.
fn collect<T>(world_size: usize, ended: &Receiver<(usize, Result<T, TrainError>)>, on_blocked: &dyn Fn(&TrainError)) -> Vec<Result<T, TrainError>> {
    let mut outcomes: Vec<Option<Result<T, TrainError>>> = (0..world_size).map(|_| None).collect();
    let mut failure = None;
    while outcomes.iter().any(Option::is_none) {
        let next = match &failure {
            None => ended.recv().ok(),
            Some(error) => ended.recv_timeout(GRACE).ok().or_else(|| {
                on_blocked(error);
                ended.recv().ok()
            }),
        };
        let Some((rank, outcome)) = next else { break };
        if let Err(error) = &outcome {
            failure.get_or_insert_with(|| error.clone());
        }
        outcomes[rank] = Some(outcome);
    }
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|| Err(TrainError::Failed("a rank ended without a word".to_owned())))).collect()
}

/// Names the rank in an error of its training; bad requests are every rank's alike.
fn name_rank(rank: usize, error: TrainError) -> TrainError {
    match error {
        TrainError::Failed(message) => TrainError::Rank { rank, message },
        other => other,
    }
}

fn run_rank<T: Send>(
    threads: usize,
    context: RankContext,
    group: Arc<LocalProcessGroup>,
    on_thread: impl Fn(usize) + Send + Sync + 'static,
    body: &(impl Fn(RankContext) -> Result<T, TrainError> + Sync),
) -> Result<T, TrainError> {
    let of_pool = group.clone();
    let prepare = move |rank| {
        on_thread(rank);
        of_pool.adopt_thread();
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| body_in_pool(threads, context, prepare, body)));
    let outcome = outcome.unwrap_or_else(|panic| Err(TrainError::Failed(panic_text(&*panic))));
    if let Err(error) = &outcome {
        group.poison(&error.to_string());
    }
    outcome
}

fn body_in_pool<T: Send>(
    threads: usize,
    context: RankContext,
    on_thread: impl Fn(usize) + Send + Sync + 'static,
    body: &(impl Fn(RankContext) -> Result<T, TrainError> + Sync),
) -> Result<T, TrainError> {
    let rank = context.rank;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.max(1))
        .thread_name(move |thread| format!("rank {rank} worker {thread}"))
        .start_handler(move |_| on_thread(rank))
        .build()
        .map_err(|error| TrainError::Failed(format!("cannot start the worker threads of rank {rank}: {error}")))?;
    pool.install(|| body(context))
}

pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    format!("{PANICKED}{}", text.unwrap_or_else(|| "no message".to_owned()))
}
