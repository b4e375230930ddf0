//! Collectives between ranks, and the threads that ranks are: the trait, its local implementation, and `run_ranks`.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn::tensor::Device;

use super::buffer::Buffer;
use crate::train::error::{PANICKED, TrainError};

/// How long a rank waits for the others in a collective before it gives up.
pub const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// What one rank says to the other ranks of its group. Every rank must call the same collectives in the same order.
///
/// Sums run in ascending order of rank, so every rank gets the same bits, run after run. A rank that fails poisons the group: the others get
/// [`TrainError::Rank`] from the collective they wait in, and from every later one.
pub trait ProcessGroup: Send + Sync {
    /// This rank, below the world size.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn world_size(&self) -> usize;

    /// The shards of all ranks, equally long, one after another. The result lies in memory of the calling rank.
    fn all_gather(&self, shard: Arc<Buffer>) -> Result<Buffer, TrainError>;

    /// This rank's part of the element-wise sum over ranks; the length of `full` is a multiple of the world size. The sum has the data type of `full`.
    fn reduce_scatter(&self, full: Arc<Buffer>) -> Result<Buffer, TrainError>;

    /// The element-wise sum over ranks.
    fn all_reduce(&self, full: Arc<Buffer>) -> Result<Buffer, TrainError>;

    /// The buffer of `root`; the other ranks pass `None`.
    fn broadcast(&self, buffer: Option<Arc<Buffer>>, root: usize) -> Result<Buffer, TrainError>;

    /// The element-wise sum of a few host numbers over ranks: losses, squared norms, overflow flags.
    fn all_reduce_numbers(&self, numbers: &[f64]) -> Result<Vec<f64>, TrainError>;

    /// Returns once every rank has called it.
    fn barrier(&self) -> Result<(), TrainError>;

    /// Makes the other ranks fail: this rank cannot go on, because of `message`. Only the first failure of a group counts.
    fn poison(&self, message: &str);
}

/// What a rank needs to know of itself.
#[derive(Clone)]
pub struct RankContext {
    /// This rank, below the world size.
    pub rank: usize,
    /// Ranks.
    pub world_size: usize,
    /// The group of all ranks.
    pub group: Arc<dyn ProcessGroup>,
    /// What this rank computes on.
    pub device: Device,
}

/// Where ranks that are threads of one process meet.
struct Rendezvous {
    world_size: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Collectives in progress, by their number.
    slots: HashMap<u64, Slot>,
    failure: Option<(usize, String)>,
}

/// One collective: what each rank brought, and how many ranks have fetched it and are done with it.
struct Slot {
    name: &'static str,
    brought: Vec<Option<Arc<dyn Any + Send + Sync>>>,
    arrived: usize,
    finished: usize,
}

impl Rendezvous {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panicking rank poisons the group by name; the data under the lock stays consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &'a self,
        rank: usize,
        deadline: Instant,
        name: &str,
        guard: MutexGuard<'a, State>,
        ready: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'a, State>, TrainError> {
        let mut guard = guard;
        loop {
            if let Some((rank, message)) = &guard.failure {
                return Err(TrainError::Rank { rank: *rank, message: message.clone() });
            }
            if ready(&guard) {
                return Ok(guard);
            }
            let now = Instant::now();
            if now >= deadline {
                let message = format!("rank {rank} waited {} s in {name} for the other ranks", self.timeout.as_secs());
                guard.failure = Some((rank, message.clone()));
                self.changed.notify_all();
                return Err(TrainError::Failed(message));
            }
            guard = self.changed.wait_timeout(guard, deadline - now).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// One rank's end of a [`Rendezvous`].
pub struct LocalProcessGroup {
    rank: usize,
    meeting: Arc<Rendezvous>,
    /// Number of this rank's next collective.
    next: Mutex<u64>,
}

impl LocalProcessGroup {
    /// The ends of a new group of `world_size` ranks, in order of rank.
    pub fn new_group(world_size: usize, timeout: Duration) -> Vec<Arc<Self>> {
        let meeting = Arc::new(Rendezvous { world_size, timeout, state: Mutex::default(), changed: Condvar::new() });
        (0..world_size).map(|rank| Arc::new(Self { rank, meeting: meeting.clone(), next: Mutex::new(0) })).collect()
    }

    /// Hands `mine` to the other ranks, waits for theirs, and computes this rank's result from all of them, in order of rank.
    ///
    /// Each rank computes its own result on its own thread: the memory it takes is counted as its own. No rank goes on before all are done, so that
    /// whoever owns what was brought may free or overwrite it at once.
    fn exchange<T: Send + Sync + 'static, R>(&self, name: &'static str, mine: T, result: impl FnOnce(&[Arc<T>]) -> R) -> Result<R, TrainError> {
        let number = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            *next += 1;
            *next
        };
        let world_size = self.meeting.world_size;
        let deadline = Instant::now() + self.meeting.timeout;
        let mut guard = self.meeting.lock();
        let slot = guard.slots.entry(number).or_insert_with(|| Slot { name, brought: vec![None; world_size], arrived: 0, finished: 0 });
        if slot.name != name {
            let message = format!("rank {} calls {name} where another rank calls {}", self.rank, slot.name);
            guard.failure.get_or_insert((self.rank, message.clone()));
            self.meeting.changed.notify_all();
            return Err(TrainError::Failed(message));
        }
        slot.brought[self.rank] = Some(Arc::new(mine));
        slot.arrived += 1;
        if slot.arrived == world_size {
            self.meeting.changed.notify_all();
        }
        let guard =
            self.meeting.wait(self.rank, deadline, name, guard, |state| state.slots.get(&number).is_none_or(|slot| slot.arrived == world_size))?;
        let brought: Option<Vec<Arc<T>>> = guard
            .slots
            .get(&number)
            .and_then(|slot| slot.brought.iter().map(|item| item.clone().and_then(|item| item.downcast::<T>().ok())).collect());
        drop(guard);
        let brought = brought.ok_or_else(|| TrainError::Failed(format!("rank {} and the others disagree about what {name} exchanges", self.rank)))?;
        let result = result(&brought);
        drop(brought);
        let mut guard = self.meeting.lock();
        if let Some(slot) = guard.slots.get_mut(&number) {
            slot.finished += 1;
            if slot.finished == world_size {
                guard.slots.remove(&number);
                self.meeting.changed.notify_all();
            }
        }
        drop(self.meeting.wait(self.rank, deadline, name, guard, |state| !state.slots.contains_key(&number))?);
        Ok(result)
    }
}

impl ProcessGroup for LocalProcessGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.meeting.world_size
    }

    fn all_gather(&self, shard: Arc<Buffer>) -> Result<Buffer, TrainError> {
        self.exchange("all_gather", shard, |shards| Buffer::concatenate(shards.iter().map(|shard| &***shard)))?
    }

    fn reduce_scatter(&self, full: Arc<Buffer>) -> Result<Buffer, TrainError> {
        let part = full.len() / self.world_size();
        let range = self.rank * part..(self.rank + 1) * part;
        self.exchange("reduce_scatter", full, |all| Buffer::sum(all.iter().map(|full| &***full), range))?
    }

    fn all_reduce(&self, full: Arc<Buffer>) -> Result<Buffer, TrainError> {
        let range = 0..full.len();
        self.exchange("all_reduce", full, |all| Buffer::sum(all.iter().map(|full| &***full), range))?
    }

    fn broadcast(&self, buffer: Option<Arc<Buffer>>, root: usize) -> Result<Buffer, TrainError> {
        self.exchange("broadcast", buffer, |all| match &*all[root] {
            Some(buffer) => Ok((**buffer).clone()),
            None => Err(TrainError::Failed(format!("rank {root} broadcasts nothing"))),
        })?
    }

    fn all_reduce_numbers(&self, numbers: &[f64]) -> Result<Vec<f64>, TrainError> {
        self.exchange("all_reduce_numbers", numbers.to_vec(), |all| {
            (0..numbers.len()).map(|index| all.iter().map(|numbers| numbers[index]).sum()).collect()
        })
    }

    fn barrier(&self) -> Result<(), TrainError> {
        self.exchange("barrier", (), |_| ())
    }

    fn poison(&self, message: &str) {
        let mut guard = self.meeting.lock();
        guard.failure.get_or_insert((self.rank, message.to_owned()));
        self.meeting.changed.notify_all();
    }
}

/// Runs `body` once per rank, each on a thread of its own with a private rayon pool of `threads_per_rank` threads, and returns what each gave, in order of
/// rank. `on_thread` runs first on every thread that works for a rank, with the rank. A rank that panics or returns an error poisons the group; the error
/// returned is that of the rank that failed first.
pub fn run_ranks<T: Send>(
    world_size: usize,
    threads_per_rank: usize,
    device: &Device,
    on_thread: impl Fn(usize) + Clone + Send + Sync + 'static,
    body: impl Fn(RankContext) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, TrainError> {
    let ends = LocalProcessGroup::new_group(world_size, COLLECTIVE_TIMEOUT);
    let body = &body;
    let outcomes: Vec<Result<T, TrainError>> = std::thread::scope(|scope| {
        let handles: Vec<_> = ends
            .into_iter()
            .map(|group| {
                let device = device.clone();
                let rank = group.rank();
                let on_thread = on_thread.clone();
                std::thread::Builder::new().name(format!("rank {rank}")).spawn_scoped(scope, move || {
                    on_thread(rank);
                    run_rank(group, threads_per_rank, device, on_thread, body)
                })
            })
            .collect();
        handles
            .into_iter()
            .map(|handle| match handle {
                Ok(handle) => handle.join().unwrap_or_else(|panic| Err(TrainError::Failed(panic_text(&*panic)))),
                Err(error) => Err(TrainError::Failed(format!("cannot start a thread for a rank: {error}"))),
            })
            .collect()
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

/// Names the rank in an error of its training; bad requests are every rank's alike.
fn name_rank(rank: usize, error: TrainError) -> TrainError {
    match error {
        TrainError::Failed(message) => TrainError::Rank { rank, message },
        other => other,
    }
}

fn run_rank<T: Send>(
    group: Arc<LocalProcessGroup>,
    threads: usize,
    device: Device,
    on_thread: impl Fn(usize) + Send + Sync + 'static,
    body: &(impl Fn(RankContext) -> Result<T, TrainError> + Sync),
) -> Result<T, TrainError> {
    let context = RankContext { rank: group.rank(), world_size: group.world_size(), group: group.clone(), device };
    let outcome = catch_unwind(AssertUnwindSafe(|| body_in_pool(threads, context, on_thread, body)));
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

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    format!("{PANICKED}{}", text.unwrap_or_else(|| "no message".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T: Send>(world_size: usize, body: impl Fn(RankContext) -> Result<T, TrainError> + Sync) -> Result<Vec<T>, TrainError> {
        run_ranks(world_size, 1, &Device::flex(), |_| {}, body)
    }

    /// Every collective on three ranks, repeated, so that late ranks of one meet early ranks of the next.
    #[test]
    fn collectives_combine_all_ranks() {
        run(3, |context| {
            for round in 0..200 {
                let mine = |length: usize| Arc::new(Buffer::F32((0..length).map(|index| (100 * context.rank + index + round) as f32).collect()));
                let round = round as f32;
                let gathered = context.group.all_gather(mine(2))?;
                assert_eq!(gathered, Buffer::F32([0.0, 1.0, 100.0, 101.0, 200.0, 201.0].map(|value| value + round).to_vec()));
                let part = context.group.reduce_scatter(mine(6))?;
                let first = (300 + 6 * context.rank) as f32 + 3.0 * round;
                assert_eq!(part, Buffer::F32(vec![first, first + 3.0]));
                assert_eq!(context.group.all_reduce(mine(1))?, Buffer::F32(vec![300.0 + 3.0 * round]));
                let from_one = context.group.broadcast((context.rank == 1).then(|| mine(1)), 1)?;
                assert_eq!(from_one, Buffer::F32(vec![100.0 + round]));
                assert_eq!(context.group.all_reduce_numbers(&[1.0, context.rank as f64])?, [3.0, 3.0]);
                context.group.barrier()?;
            }
            Ok(())
        })
        .unwrap();
    }

    /// A rank that panics, or returns an error, stops the others, and the error names it.
    #[test]
    fn a_failing_rank_is_named() {
        let panicked = run(3, |context| if context.rank == 1 { panic!("boom") } else { context.group.barrier() });
        assert_eq!(panicked, Err(TrainError::Rank { rank: 1, message: "panicked: boom".to_owned() }));
        let failed = run(3, |context| if context.rank == 2 { Err(TrainError::Failed("no".to_owned())) } else { context.group.barrier() });
        assert_eq!(failed, Err(TrainError::Rank { rank: 2, message: "no".to_owned() }));
    }

    /// A rank that never comes is waited for only so long.
    #[test]
    fn waiting_ends() {
        let ends = LocalProcessGroup::new_group(2, Duration::from_millis(20));
        let error = ends[0].barrier().unwrap_err();
        assert!(error.to_string().contains("barrier"), "{error}");
        assert!(ends[1].barrier().is_err());
    }

    /// Ranks that call different collectives are told so rather than left waiting.
    #[test]
    fn disagreement_is_an_error() {
        let outcome =
            run(2, |context| if context.rank == 0 { context.group.barrier() } else { context.group.all_reduce_numbers(&[1.0]).map(|_| ()) });
        assert!(outcome.unwrap_err().to_string().contains("where another rank calls"));
    }
}
