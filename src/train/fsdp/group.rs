//! Collectives between ranks: the trait, and its implementation for ranks that are threads of one process.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::buffer::Buffer;
use super::layout::Cut;
use crate::train::error::TrainError;

/// How long a rank waits in a collective while none of those that it waits for computes anything before it gives up.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// How often a waiting rank looks whether those that it waits for compute.
const LOOK: Duration = Duration::from_millis(500);

/// What one rank says to the other ranks of its group. Every rank must call the same collectives in the same order.
///
/// Sums run in ascending order of rank, so every rank gets the same bits, run after run. A rank that fails poisons the group: the others get
/// [`TrainError::Rank`] from the collective they wait in, and from every later one.
pub trait ProcessGroup: Send + Sync {
    /// This rank, below the world size.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn world_size(&self) -> usize;

    /// A group of these ranks of this group, in ascending order, this rank among them. Every rank must call it equally often. It fails when this group does.
    fn subgroup(&self, ranks: &[usize]) -> Arc<dyn ProcessGroup>;

    /// The whole buffer of which all ranks have a shard, put into `full`, which is empty and has room for it.
    fn all_gather(&self, full: Buffer, shard: Arc<Buffer>, cut: &Cut) -> Result<Buffer, TrainError>;

    /// This rank's shard of the element-wise sum over ranks, put into `shard`, which is empty and has room for it. The sum has the data type of `full`.
    fn reduce_scatter(&self, shard: Buffer, full: Arc<Buffer>, cut: &Cut) -> Result<Buffer, TrainError>;

    /// The element-wise sum over ranks, in place.
    fn all_reduce(&self, buffer: Buffer) -> Result<Buffer, TrainError>;

    /// The buffer of `root`; the other ranks pass `None`.
    fn broadcast(&self, buffer: Option<Arc<Buffer>>, root: usize) -> Result<Buffer, TrainError>;

    /// This rank's buffer of those that `root` has, one for each rank; the other ranks pass `None`.
    fn scatter(&self, buffers: Option<Vec<Buffer>>, root: usize) -> Result<Buffer, TrainError>;

    /// The element-wise sum of a few host numbers over ranks: losses, squared norms, overflow flags.
    fn all_reduce_numbers(&self, numbers: &[f64]) -> Result<Vec<f64>, TrainError>;

    /// Returns once every rank has called it.
    fn barrier(&self) -> Result<(), TrainError>;

    /// Makes the other ranks fail: this rank cannot go on, because of `message`. Only the first failure of a group counts.
    fn poison(&self, message: &str);
}

/// Where ranks that are threads of one process meet.
struct Meeting {
    stall_timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// System ids of the threads on which each rank of the world computes.
    threads: Vec<Mutex<Vec<i32>>>,
}

#[derive(Default)]
struct State {
    /// Collectives in progress.
    slots: HashMap<SlotKey, Slot>,
    failure: Option<(usize, String)>,
}

/// Which collective: that of which group, its how manieth.
type SlotKey = (Arc<[u64]>, u64);

/// One collective: what each rank brought, and how many ranks have fetched it and are done with it.
struct Slot {
    name: &'static str,
    brought: Vec<Option<Arc<dyn Any + Send + Sync>>>,
    arrived: usize,
    finished: usize,
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panicking rank poisons the group by name; the data under the lock stays consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Processor time that a rank's threads have taken so far, in clock ticks; `None` where the system does not tell.
    fn processor_time(&self, rank: usize) -> Option<u64> {
        let threads = self.threads[rank].lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().map(|thread| processor_time(*thread)).sum()
    }

    fn fail(&self, mut guard: MutexGuard<'_, State>, rank: usize, message: &str) -> TrainError {
        let (rank, message) = guard.failure.get_or_insert_with(|| (rank, message.to_owned())).clone();
        self.changed.notify_all();
        TrainError::Rank { rank, message }
    }
}

/// User and system time of a thread of this process, in clock ticks: fields 14 and 15 of its `stat`, of which the second may hold spaces.
fn processor_time(thread: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// One rank's end of a group.
pub struct LocalProcessGroup {
    rank: usize,
    /// The ranks of the world that are in the group.
    members: Arc<[usize]>,
    /// Names the group: which subgroup of which group it is.
    path: Arc<[u64]>,
    meeting: Arc<Meeting>,
    /// Number of this rank's next collective.
    next: AtomicU64,
    subgroups: AtomicU64,
}

impl LocalProcessGroup {
    /// The ends of a new group of `world_size` ranks, in order of rank.
    pub fn new_group(world_size: usize, stall_timeout: Duration) -> Vec<Arc<Self>> {
        let threads = (0..world_size).map(|_| Mutex::default()).collect();
        let meeting = Arc::new(Meeting { stall_timeout, state: Mutex::default(), changed: Condvar::new(), threads });
        let members: Arc<[usize]> = (0..world_size).collect();
        (0..world_size).map(|rank| Arc::new(Self::end(rank, members.clone(), Arc::from([]), meeting.clone()))).collect()
    }

    fn end(rank: usize, members: Arc<[usize]>, path: Arc<[u64]>, meeting: Arc<Meeting>) -> Self {
        Self { rank, members, path, meeting, next: AtomicU64::new(0), subgroups: AtomicU64::new(0) }
    }

    /// Says that this rank computes on the calling thread. A rank that has said so is not waited for when its threads are blocked.
    pub(super) fn adopt_thread(&self) {
        let mut threads = self.meeting.threads[self.in_world()].lock().unwrap_or_else(PoisonError::into_inner);
        threads.push(rustix::thread::gettid().as_raw_nonzero().get());
    }

    /// This rank in the world.
    fn in_world(&self) -> usize {
        self.members[self.rank]
    }

    /// Hands `mine` to the other ranks, waits for theirs, and computes this rank's result from all of them, in order of rank.
    ///
    /// Each rank computes its own result on its own thread: the memory it takes is counted as its own. No rank goes on before all are done, so that
    /// whoever owns what was brought may free or overwrite it at once.
    fn exchange<T: Send + Sync + 'static, R>(&self, name: &'static str, mine: T, result: impl FnOnce(&[Arc<T>]) -> R) -> Result<R, TrainError> {
        let key = (self.path.clone(), self.next.fetch_add(1, Ordering::Relaxed));
        let world_size = self.members.len();
        let mut guard = self.meeting.lock();
        let slot = guard.slots.entry(key.clone()).or_insert_with(|| Slot { name, brought: vec![None; world_size], arrived: 0, finished: 0 });
        if slot.name != name {
            let message = format!("rank {} calls {name} where another rank calls {}", self.in_world(), slot.name);
            return Err(self.meeting.fail(guard, self.in_world(), &message));
        }
        slot.brought[self.rank] = Some(Arc::new(mine));
        slot.arrived += 1;
        if slot.arrived == world_size {
            self.meeting.changed.notify_all();
        }
        let guard = self.wait(&key, name, guard, |slot| slot.is_none_or(|slot| slot.arrived == world_size))?;
        let brought: Option<Vec<Arc<T>>> =
            guard.slots.get(&key).and_then(|slot| slot.brought.iter().map(|item| item.clone().and_then(|item| item.downcast::<T>().ok())).collect());
        drop(guard);
        let brought = brought.ok_or_else(|| TrainError::Failed(format!("rank {} and the others disagree about what {name} exchanges", self.rank)))?;
        let result = result(&brought);
        drop(brought);
        let mut guard = self.meeting.lock();
        if let Some(slot) = guard.slots.get_mut(&key) {
            slot.finished += 1;
            if slot.finished == world_size {
                guard.slots.remove(&key);
                self.meeting.changed.notify_all();
            }
        }
        drop(self.wait(&key, name, guard, |slot| slot.is_none())?);
        Ok(result)
    }

    /// Waits until `ready`, or until some rank fails before that. A rank that has not arrived and whose threads take no processor time for too long has failed, too.
    fn wait<'a>(
        &'a self,
        key: &SlotKey,
        name: &str,
        mut guard: MutexGuard<'a, State>,
        ready: impl Fn(Option<&Slot>) -> bool,
    ) -> Result<MutexGuard<'a, State>, TrainError> {
        let mut quiet = Duration::ZERO;
        let mut seen = None;
        let look = LOOK.min(self.meeting.stall_timeout);
        loop {
            // A collective that all ranks have taken part in has succeeded, whatever became of them since.
            let slot = guard.slots.get(key);
            if ready(slot) {
                return Ok(guard);
            }
            if let Some((rank, message)) = &guard.failure {
                return Err(TrainError::Rank { rank: *rank, message: message.clone() });
            }
            let missing = |slot: &Slot| slot.brought.iter().position(Option::is_none);
            let missing = slot.and_then(missing).map(|rank| self.members[rank]);
            let began = Instant::now();
            let (woken, timeout) = self.meeting.changed.wait_timeout(guard, look).unwrap_or_else(PoisonError::into_inner);
            guard = woken;
            let Some(missing) = missing.filter(|_| timeout.timed_out()) else { continue };
            let now = Some((missing, self.meeting.processor_time(missing)));
            if now != seen || matches!(now, Some((_, None))) {
                (quiet, seen) = (Duration::ZERO, now);
                continue;
            }
            // A machine that was suspended, or a process that was stopped, is no stalled rank: no look counts for more than twice its time.
            quiet += began.elapsed().min(2 * look);
            if quiet >= self.meeting.stall_timeout {
                let message = format!("has been blocked for {} s while rank {} waits for it in {name}", quiet.as_secs(), self.in_world());
                return Err(self.meeting.fail(guard, missing, &message));
            }
        }
    }

    /// What `buffer` would be where it is this group's own memory again: no other rank holds what went through an exchange.
    fn own(&self, buffer: Arc<Buffer>) -> Buffer {
        Arc::try_unwrap(buffer).unwrap_or_else(|shared| (*shared).clone())
    }
}

impl ProcessGroup for LocalProcessGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn subgroup(&self, ranks: &[usize]) -> Arc<dyn ProcessGroup> {
        let number = self.subgroups.fetch_add(1, Ordering::Relaxed);
        let first = ranks.first().copied().unwrap_or(self.rank) as u64;
        let path: Arc<[u64]> = self.path.iter().copied().chain([number, first]).collect();
        let members: Arc<[usize]> = ranks.iter().map(|rank| self.members[*rank]).collect();
        let rank = ranks.iter().position(|rank| *rank == self.rank).unwrap_or(0);
        Arc::new(Self::end(rank, members, path, self.meeting.clone()))
    }

    fn all_gather(&self, full: Buffer, shard: Arc<Buffer>, cut: &Cut) -> Result<Buffer, TrainError> {
        self.exchange("all_gather", shard, |shards| {
            let mut full = full;
            for (rank, piece) in cut.in_full_order() {
                full.extend_from(&shards[rank], piece.shard.clone())?;
            }
            Ok(full)
        })?
    }

    fn reduce_scatter(&self, shard: Buffer, full: Arc<Buffer>, cut: &Cut) -> Result<Buffer, TrainError> {
        let result = self.exchange("reduce_scatter", full, |all| {
            let mut shard = shard;
            for piece in &cut.pieces[self.rank] {
                shard.extend_zeros(piece.shard.start.saturating_sub(shard.len()));
                shard.extend_with_sum(all.iter().map(|full| &***full), piece.full.clone())?;
            }
            shard.extend_zeros(cut.shard_numel[self.rank].saturating_sub(shard.len()));
            Ok(shard)
        });
        result?
    }

    fn all_reduce(&self, buffer: Buffer) -> Result<Buffer, TrainError> {
        // Each rank sums one part, and then all exchange their parts.
        let cut = Cut::even(buffer.len(), self.world_size());
        let numel = buffer.len();
        let part = |rank: usize| cut.pieces[rank][0].full.start.min(numel)..cut.pieces[rank][0].full.end.min(numel);
        let mine = Buffer::with_capacity(buffer.dtype(), part(self.rank).len());
        let buffer = Arc::new(buffer);
        let sum = self.exchange("all_reduce", buffer.clone(), |all| {
            let mut mine = mine;
            mine.extend_with_sum(all.iter().map(|full| &***full), part(self.rank))?;
            Ok::<_, TrainError>(mine)
        })??;
        let mut buffer = self.own(buffer);
        self.exchange("all_reduce", sum, |sums| {
            for (rank, sum) in sums.iter().enumerate() {
                buffer.overwrite(part(rank).start, sum)?;
            }
            Ok(buffer)
        })?
    }

    fn broadcast(&self, buffer: Option<Arc<Buffer>>, root: usize) -> Result<Buffer, TrainError> {
        self.exchange("broadcast", buffer, |all| match &*all[root] {
            Some(buffer) => Ok((**buffer).clone()),
            None => Err(TrainError::Failed(format!("rank {root} broadcasts nothing"))),
        })?
    }

    fn scatter(&self, buffers: Option<Vec<Buffer>>, root: usize) -> Result<Buffer, TrainError> {
        self.exchange("scatter", buffers, |all| match all[root].as_ref().as_ref().and_then(|buffers| buffers.get(self.rank)) {
            Some(buffer) => Ok(buffer.clone()),
            None => Err(TrainError::Failed(format!("rank {root} has nothing for rank {}", self.rank))),
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
        let guard = self.meeting.lock();
        self.meeting.fail(guard, self.in_world(), message);
    }
}

#[cfg(test)]
mod tests {
    use super::super::ranks::{RankContext, RankOptions, run_ranks};
    use super::*;

    fn run<T: Send>(world_size: usize, body: impl Fn(RankContext) -> Result<T, TrainError> + Sync) -> Result<Vec<T>, TrainError> {
        run_ranks(&RankOptions::new(world_size, 1), |_| {}, body)
    }

    fn room(numel: usize) -> Buffer {
        Buffer::with_capacity(crate::spec::settings::DType::Fp32, numel)
    }

    /// Every collective on three ranks, repeated, so that late ranks of one meet early ranks of the next.
    #[test]
    fn collectives_combine_all_ranks() {
        run(3, |context| {
            let group = &context.group;
            for round in 0..200 {
                let mine = |length: usize| Buffer::F32((0..length).map(|index| (100 * context.rank + index + round) as f32).collect());
                let round = round as f32;
                let gathered = group.all_gather(room(6), Arc::new(mine(2)), &Cut::even(6, 3))?;
                assert_eq!(gathered, Buffer::F32([0.0, 1.0, 100.0, 101.0, 200.0, 201.0].map(|value| value + round).to_vec()));
                let part = group.reduce_scatter(room(2), Arc::new(mine(6)), &Cut::even(6, 3))?;
                let first = (300 + 6 * context.rank) as f32 + 3.0 * round;
                assert_eq!(part, Buffer::F32(vec![first, first + 3.0]));
                // Four elements on three ranks: the last sums nothing.
                let sums = [0.0, 3.0, 6.0, 9.0].map(|value| value + 300.0 + 3.0 * round);
                assert_eq!(group.all_reduce(mine(4))?, Buffer::F32(sums.to_vec()));
                let from_one = group.broadcast((context.rank == 1).then(|| Arc::new(mine(1))), 1)?;
                assert_eq!(from_one, Buffer::F32(vec![100.0 + round]));
                let dealt = group.scatter((context.rank == 2).then(|| (0..3).map(mine).collect()), 2)?;
                assert_eq!(dealt.len(), context.rank);
                assert_eq!(group.all_reduce_numbers(&[1.0, context.rank as f64])?, [3.0, 3.0]);
                group.barrier()?;
            }
            Ok(())
        })
        .unwrap();
    }

    /// Parameters of 3 x 2 and 1 x 2 elements, cut by rows for two ranks: the second has nothing of the second, and padding.
    #[test]
    fn rows_are_put_together_and_taken_apart() {
        run(2, |context| {
            let cut = Cut::by_rows(&[&[3, 2], &[1, 2]], 2);
            let shard = if context.rank == 0 { vec![0.0, 1.0, 2.0, 3.0, 6.0, 7.0] } else { vec![4.0, 5.0, -1.0, -1.0, -1.0, -1.0] };
            let full = context.group.all_gather(room(8), Arc::new(Buffer::F32(shard)), &cut)?;
            assert_eq!(full, Buffer::F32((0..8).map(|value| value as f32).collect()));
            let part = context.group.reduce_scatter(room(6), Arc::new(full), &cut)?;
            let want = if context.rank == 0 { vec![0.0, 2.0, 4.0, 6.0, 12.0, 14.0] } else { vec![8.0, 10.0, 0.0, 0.0, 0.0, 0.0] };
            assert_eq!(part, Buffer::F32(want));
            Ok(())
        })
        .unwrap();
    }

    /// Subgroups of a 2 x 2 mesh work beside each other and beside their world.
    #[test]
    fn subgroups_sum_their_own_ranks() {
        run(4, |context| {
            let group = &context.group;
            let row = group.subgroup(if context.rank < 2 { &[0, 1] } else { &[2, 3] });
            let column = group.subgroup(&[context.rank % 2, context.rank % 2 + 2]);
            assert_eq!((row.rank(), column.rank()), (context.rank % 2, context.rank / 2));
            for _ in 0..50 {
                let number = [context.rank as f64];
                assert_eq!(row.all_reduce_numbers(&number)?, [if context.rank < 2 { 1.0 } else { 5.0 }]);
                assert_eq!(column.all_reduce_numbers(&number)?, [(context.rank % 2 * 2 + 2) as f64]);
                assert_eq!(group.all_reduce_numbers(&number)?, [6.0]);
            }
            Ok(())
        })
        .unwrap();
    }

    /// CASES 14: a rank that panics, or returns an error, stops the others, in subgroups too, and the error names it.
    #[test]
    fn a_failing_rank_is_named() {
        let panicked = run(3, |context| if context.rank == 1 { panic!("boom") } else { context.group.barrier() });
        assert_eq!(panicked, Err(TrainError::Rank { rank: 1, message: "panicked: boom".to_owned() }));
        let failed = run(3, |context| if context.rank == 2 { Err(TrainError::Failed("no".to_owned())) } else { context.group.barrier() });
        assert_eq!(failed, Err(TrainError::Rank { rank: 2, message: "no".to_owned() }));
        let apart = run(4, |context| {
            let row = context.group.subgroup(if context.rank < 2 { &[0, 1] } else { &[2, 3] });
            if context.rank == 3 {
                Err(TrainError::Failed("no".to_owned()))
            } else {
                (0..2).try_for_each(|_| row.barrier().and(context.group.barrier()))
            }
        });
        assert_eq!(apart, Err(TrainError::Rank { rank: 3, message: "no".to_owned() }));
    }

    /// CASES 14: a rank that is blocked has failed, by name; one that computes is waited for.
    #[test]
    fn a_blocked_rank_is_named() {
        let options = RankOptions { stall_timeout: Duration::from_millis(1500), ..RankOptions::new(3, 1) };
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        let blocked = Mutex::new(blocked);
        let outcome = run_ranks(
            &options,
            |_| {},
            |context| {
                if context.rank == 1 {
                    // Longer than the limit, but busy.
                    let began = Instant::now();
                    while began.elapsed() < 2 * options.stall_timeout {
                        std::hint::spin_loop();
                    }
                }
                context.group.barrier()?;
                if context.rank == 2 {
                    let _ = blocked.lock().unwrap().recv();
                }
                let outcome = context.group.barrier();
                if context.rank == 0 {
                    release.send(()).unwrap();
                }
                outcome
            },
        );
        let error = outcome.unwrap_err();
        assert!(matches!(&error, TrainError::Rank { rank: 2, message } if message.contains("blocked") && message.contains("barrier")), "{error}");
    }

    /// Ranks that call different collectives are told so rather than left waiting.
    #[test]
    fn disagreement_is_an_error() {
        let outcome =
            run(2, |context| if context.rank == 0 { context.group.barrier() } else { context.group.all_reduce_numbers(&[1.0]).map(|_| ()) });
        assert!(outcome.unwrap_err().to_string().contains("where another rank calls"));
    }
}
