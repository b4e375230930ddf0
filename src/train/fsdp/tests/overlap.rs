//! Collectives beside computation: how many are in flight, and that nothing depends on how fast they are.

use super::*;

/// A process group whose gathers take a while.
struct Slow(Arc<dyn ProcessGroup>);

impl ProcessGroup for Slow {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn subgroup(&self, ranks: &[usize]) -> Arc<dyn ProcessGroup> {
        Arc::new(Self(self.0.subgroup(ranks)))
    }

    fn all_gather(&self, full: Buffer, shard: Arc<Buffer>, cut: &Cut) -> Result<Buffer, TrainError> {
        std::thread::sleep(std::time::Duration::from_millis(5 + 5 * self.0.rank() as u64));
        self.0.all_gather(full, shard, cut)
    }

    fn reduce_scatter(&self, shard: Buffer, full: Arc<Buffer>, cut: &Cut) -> Result<Buffer, TrainError> {
        std::thread::sleep(std::time::Duration::from_millis(1));
        self.0.reduce_scatter(shard, full, cut)
    }

    fn all_reduce(&self, buffer: Buffer) -> Result<Buffer, TrainError> {
        self.0.all_reduce(buffer)
    }

    fn broadcast(&self, buffer: Option<Arc<Buffer>>, root: usize) -> Result<Buffer, TrainError> {
        self.0.broadcast(buffer, root)
    }

    fn scatter(&self, buffers: Option<Vec<Buffer>>, root: usize) -> Result<Buffer, TrainError> {
        self.0.scatter(buffers, root)
    }

    fn all_reduce_numbers(&self, numbers: &[f64]) -> Result<Vec<f64>, TrainError> {
        self.0.all_reduce_numbers(numbers)
    }

    fn barrier(&self) -> Result<(), TrainError> {
        self.0.barrier()
    }

    fn poison(&self, message: &str) {
        self.0.poison(message);
    }
}

/// With `limit_all_gathers` two gathers are in flight at most, and without it more, where units are nested and gathered ahead; neither this nor the speed of
/// the communication threads changes a bit of the result or a byte of what is held.
#[test]
fn gathers_in_flight_are_limited() {
    let (weights, ids) = (File::open("tiny-gpt2.safetensors"), File::open("fsdp/batches.safetensors").ids("batches"));
    let run = |slow: bool, limit_all_gathers: bool| {
        let settings = FsdpSettings { auto_wrap_policy: AutoWrapPolicy::SizeBasedWrap, forward_prefetch: true, limit_all_gathers, ..defaults() };
        let accounts = memory::Accounts::new(2).unwrap();
        let of_rank = accounts.ranks().to_vec();
        let body = |mut context: RankContext| {
            let rank = context.rank;
            if slow {
                context.group = Arc::new(Slow(context.group));
            }
            let mut engine = engine(context, tiny_model(), &settings, &weights);
            let mut losses = Vec::new();
            for step in 0..2 {
                losses.push(engine.forward_backward(&batch(&ids, step, rank * 4..rank * 4 + 4), 1.0, true)?);
            }
            let gradients: Vec<_> = engine.shards().iter().map(|shard| shard.gradient.clone()).collect();
            Ok((engine.most_gathers_in_flight(), losses, gradients, memory::current().unwrap().usage().peak))
        };
        run_ranks(&RankOptions::new(2, 1), move |rank| of_rank[rank].adopt_thread(), body).unwrap().swap_remove(0)
    };
    let (limited, free, quick) = (run(true, true), run(true, false), run(false, true));
    assert_eq!(limited.0, 2);
    assert!(free.0 > 2, "{} in flight", free.0);
    assert!(quick.0 <= 2);
    assert_eq!((&limited.1, &limited.2), (&free.1, &free.2));
    assert_eq!((&limited.1, &limited.2), (&quick.1, &quick.2));
    // The autodiff graph's own tables grow as they please; a unit is larger than that.
    assert!(limited.3.abs_diff(quick.3) < 8 * 1024 && limited.3.abs_diff(free.3) < 8 * 1024, "{} {} {}", limited.3, quick.3, free.3);
}
