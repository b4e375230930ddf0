//! Who reads how much, whose values win, and what it costs in memory.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::tests::{defaults, ranks, tiny, tiny_model};
use super::*;
use crate::protocol::Gpt2Config;
use crate::spec::settings::{AutoWrapPolicy, ShardingStrategy};
use crate::train::fsdp::{EngineOptions, FullyShardedDataParallel, RankOptions, run_ranks};
use crate::train::memory;
use crate::train::model::Model;
use crate::train::model::gpt2::Gpt2;
use crate::train::model::ops::AttentionKind;

/// Numbers that follow from name, place and `rank`; counts what is read.
#[derive(Default)]
struct Counting {
    rank: usize,
    read: AtomicUsize,
}

fn number(rank: usize, name: &str, index: usize) -> f32 {
    (name.len() * 1_000_003 + index + 7 * rank) as f32
}

impl WeightSource for Counting {
    fn read(&self, name: &str, shape: &[usize], elements: Range<usize>) -> Result<Vec<f32>, TrainError> {
        assert!(elements.end <= shape.iter().product());
        self.read.fetch_add(elements.len(), Ordering::Relaxed);
        Ok(elements.map(|index| number(self.rank, name, index)).collect())
    }
}

/// What each rank has read, and whether all of its values are those that `rank` read.
fn loaded(world_size: usize, settings: &FsdpSettings, winner: impl Fn(usize) -> usize + Sync) -> Vec<usize> {
    ranks(world_size, |context| {
        let rank = context.rank;
        let source = Counting { rank, ..Counting::default() };
        let mut engine = FullyShardedDataParallel::new(context, tiny_model(), settings, &EngineOptions::default(), &source)?;
        for shard in engine.shards() {
            for segment in &shard.segments {
                let want: Vec<f32> = segment.parameter_range.clone().map(|index| number(winner(rank), &segment.name, index)).collect();
                assert_eq!(shard.values[segment.range.clone()], want, "rank {rank}: {}", segment.name);
            }
        }
        Ok(source.read.into_inner())
    })
}

const WHOLE: usize = 173_824;

/// With efficient loading rank 0 reads everything once and the others nothing; without, each reads what it keeps.
#[test]
fn one_rank_reads_or_each_reads_its_own() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        for sync_module_states in [true, false] {
            let settings = FsdpSettings { sharding_strategy: strategy, sync_module_states, ..defaults() };
            assert_eq!(loaded(3, &settings, |_| 0), [WHOLE, 0, 0]);
        }
    }
    let alone = FsdpSettings { cpu_ram_efficient_loading: false, sync_module_states: false, ..defaults() };
    assert_eq!(loaded(2, &alone, |rank| rank).iter().sum::<usize>(), WHOLE);
    assert!(loaded(3, &alone, |rank| rank).iter().all(|&read| read.abs_diff(WHOLE / 3) < 64));
    let replicated = FsdpSettings { sharding_strategy: ShardingStrategy::NoShard, ..alone };
    assert_eq!(loaded(2, &replicated, |rank| rank), [WHOLE; 2]);
    assert_eq!(loaded(1, &defaults(), |_| 0), [WHOLE]);
}

/// With `sync_module_states` rank 0's values win, whatever the others have read.
#[test]
fn rank_zeros_values_win_where_states_are_synchronised() {
    let settings = FsdpSettings { cpu_ram_efficient_loading: false, ..defaults() };
    let read = loaded(2, &settings, |_| 0);
    assert_eq!(read[0], WHOLE);
    assert!(read[1].abs_diff(WHOLE / 2) < 64, "rank 1 reads its own part: {read:?}");
}

/// No rank holds more than its shard and a few pieces, rank 0 included, although the whole model is one unit.
#[test]
fn no_rank_ever_holds_the_whole_model() {
    let sizes = Gpt2Config { vocab_size: 8192, n_embd: 256, n_head: 4, n_layer: 4, ..tiny(0.0) };
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(sizes, AttentionKind::Flash));
    let whole = 4 * model.modules().numel() as u64;
    for cpu_ram_efficient_loading in [true, false] {
        let settings = FsdpSettings {
            auto_wrap_policy: AutoWrapPolicy::NoWrap,
            cpu_ram_efficient_loading,
            sync_module_states: cpu_ram_efficient_loading,
            ..defaults()
        };
        let accounts = memory::Accounts::new(4).unwrap();
        let of_rank = accounts.ranks().to_vec();
        let body = |context: RankContext| {
            FullyShardedDataParallel::new(context, model.clone(), &settings, &EngineOptions::default(), &Counting::default())?;
            Ok(memory::current().unwrap().usage().peak)
        };
        let peaks = run_ranks(&RankOptions::new(4, 1), move |rank| of_rank[rank].adopt_thread(), body).unwrap();
        let piece = 4 * PIECE as u64;
        assert!(peaks.iter().all(|&peak| peak >= whole / 4 && peak < whole / 4 + 4 * piece), "{peaks:?}, the whole is {whole}");
    }
}

/// What rank 0 cannot read is told by name, not as another rank's failure.
#[test]
fn what_cannot_be_read_is_named() {
    struct Missing;
    impl WeightSource for Missing {
        fn read(&self, name: &str, _: &[usize], _: Range<usize>) -> Result<Vec<f32>, TrainError> {
            Err(TrainError::Input(format!("no tensor {name}")))
        }
    }
    let body = |context| FullyShardedDataParallel::new(context, tiny_model(), &defaults(), &EngineOptions::default(), &Missing).map(|_| ());
    let error = run_ranks(&RankOptions::new(2, 1), |_| {}, body).unwrap_err();
    assert_eq!(error.to_string(), "no tensor transformer.wte.weight");
}
