//! Grid, cases, excludes, labels, and switches that cannot matter.

use std::collections::HashSet;

use proptest::prelude::*;

use super::super::settings::*;
use super::*;
use crate::spec::ids::{ContentHashes, configuration_id};

#[test]
fn a_file_without_grid_and_cases_is_one_configuration_with_every_default() {
    let plan = plan(BASE);
    let row = only_row(&plan);
    assert_eq!(row.label, "night");
    assert_eq!(row.block_size, Some(1024));
    assert_eq!(plan.search, None);
    assert_eq!(row.settings.train.seed, 42);
    assert_eq!(row.settings.train.duration, TrainDuration::NumTrainEpochs(3.0));
    assert_eq!(row.settings.model.init, Init::Random);
    assert_eq!(row.settings.fsdp.sharding_strategy, ShardingStrategy::FullShard);
    assert_eq!(row.settings.fsdp.backward_prefetch, BackwardPrefetch::BackwardPre);
    assert_eq!(row.settings.data.dataset, Dataset::Synthetic { vocab: 1024, train_tokens: 262_144, eval_tokens: 16_384 });
}

/// Case 21: values that are equal once typed are one value, however they were written.
#[test]
fn equal_values_of_an_axis_are_one() {
    for axis in ["weight_decay = [1, 1.0]", "learning_rate = [0.1, 1e-1]", "seed = [7, 7]", "weight_decay = [0.0, -0.0]"] {
        assert_eq!(base_and(&format!("[grid]\n{axis}\n")).rows.len(), 1, "{axis}");
    }
}

#[test]
fn axes_multiply_in_the_order_of_the_file() {
    let plan = base_and("[grid]\nlearning_rate = [1e-5, 2e-5]\ndevice.world_size = [2, 4]\n\"fsdp.cpu_offload\" = [true]\n");
    assert_eq!(
        labels(&plan),
        [
            "learning_rate=1e-5, world_size=2",
            "learning_rate=1e-5, world_size=4",
            "learning_rate=2e-5, world_size=2",
            "learning_rate=2e-5, world_size=4"
        ]
    );
    assert!(plan.rows.iter().all(|row| row.settings.fsdp.cpu_offload));
}

#[test]
fn cases_are_sub_grids_beside_the_grid() {
    let plan = base_and("[grid]\nseed = [1, 2]\n[[case]]\nlabel = \"big\"\nper_device_train_batch_size = [16, 32]\n[[case]]\nmax_steps = 5\n");
    assert_eq!(labels(&plan), ["seed=1", "seed=2", "big, per_device_train_batch_size=16", "big, per_device_train_batch_size=32", "max_steps=5"]);
    let last = plan.rows.get(4).expect("five rows");
    assert_eq!(last.settings.train.duration, TrainDuration::MaxSteps(5));
    assert_eq!(plan.rows.get(5), None);
}

#[test]
fn a_point_of_grid_and_cases_is_one_row_under_the_cases_label() {
    let plan = base_and("[grid]\nseed = [1, 2]\nweight_decay = [0.0, 0.1]\n[[case]]\nlabel = \"mine\"\nseed = 2\n");
    assert_eq!(labels(&plan), ["seed=1, weight_decay=0", "seed=1, weight_decay=0.1", "seed=2, weight_decay=0.1", "mine"]);
    assert_eq!(plan.notices, ["Points of [grid] that are also cases, and keep the case's row: 1."]);
}

#[test]
fn excludes_drop_points_that_match_all_of_their_keys() {
    let grid = "[grid]\nseed = [1, 2]\nuse_orig_params = [true, false]\n";
    let plan = base_and(&format!("{grid}[[exclude]]\nseed = 1\nuse_orig_params = false\n"));
    assert_eq!(labels(&plan), ["seed=1, use_orig_params=true", "seed=2, use_orig_params=true", "seed=2, use_orig_params=false"]);
    assert_eq!(plan.notices, ["Excluded: 1 of 4 points."]);
    // A key that is no axis matches by its value, given or default.
    let plan = base_and(&format!(
        "{grid}[[exclude]]\nseed = 1\nsharding_strategy = \"FULL_SHARD\"\n[[exclude]]\nseed = 2\nsharding_strategy = \"NO_SHARD\"\n"
    ));
    assert_eq!(plan.rows.len(), 2);
    assert_eq!(plan.notices, ["Excluded: 2 of 4 points.", "The [[exclude]] on line 9 matches no point."]);
}

#[test]
fn block_sizes_are_fixed_or_searched_for() {
    let plan = base_and("[grid]\nblock_size = [128, 64]\n");
    assert_eq!(plan.rows.iter().map(|row| row.block_size).collect::<Vec<_>>(), [Some(128), Some(64)]);
    assert!(plan.rows.iter().all(|row| row.settings.train.eval_block_size == 64));
    let plan = base_and("[search.block_size]\ncandidates = [256, 64, 256, 128]\n");
    assert_eq!(plan.search.as_ref().map(|search| search.candidates.clone()), Some(vec![64, 128, 256]));
    let row = only_row(&plan);
    assert_eq!((row.block_size, row.settings.train.eval_block_size), (None, 64));
    let row = only_row(&base_and("config = { n_positions = 256 }\n"));
    assert_eq!(row.block_size, Some(256));
}

/// Case 10: labels stay readable and unique whatever the values; folders are named by ids, which are hexadecimal digits.
#[test]
fn twelve_axes_with_awkward_values_make_unique_labels_and_safe_ids() {
    let long = "very/long, path=of #some kind ".repeat(6);
    let plan = base_and(&format!(
        "[grid]\nmodel.revision = [\"{long}a\", \"{long}b\", \"a/b, c=d #e\"]\nlearning_rate = [1e-5, 2e-5]\nweight_decay = [0.0, 0.1]\nadam_beta1 = [0.8, 0.9]\n\
         adam_epsilon = [1e-8, 1e-7]\nmax_grad_norm = [0.5, 1.0]\nper_device_train_batch_size = [8, 16]\ngradient_accumulation_steps = [1, 2]\n\
         warmup_steps = [0, 10]\nlr_scheduler_type = [\"linear\", \"cosine\"]\nauto_wrap_policy = [\"NO_WRAP\", \"TRANSFORMER_BASED_WRAP\"]\nseed = [1, 2]\n"
    ));
    let rows: Vec<Row> = plan.rows.iter().collect();
    let labels: HashSet<&str> = rows.iter().map(|row| row.label.as_str()).collect();
    assert_eq!(labels.len(), 3 << 11);
    assert!(labels.iter().all(|label| label.chars().count() <= 200), "{:?}", labels.iter().max_by_key(|label| label.len()));
    let id = configuration_id(&rows[0].effective, &ContentHashes::default()).0;
    assert!(id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
}

/// Case 23: what cannot matter is set to one value, with a sentence that says so.
#[test]
fn switches_that_cannot_matter_are_collapsed() {
    let distinct = |text: &str| {
        let plan = base_and(text);
        let ids: HashSet<_> = plan.rows.iter().map(|row| configuration_id(&row.effective, &ContentHashes::default())).collect();
        (plan.rows.len(), ids.len())
    };
    let cases = [
        ("world_size = 2\n[grid]\nmin_num_params = [1000, 2000]\n", (2, 1)),
        ("world_size = 2\n[grid]\nmin_num_params = [1000, 2000]\nauto_wrap_policy = [\"SIZE_BASED_WRAP\"]\n", (2, 2)),
        (
            "world_size = 2\n[grid]\nsharding_strategy = [\"NO_SHARD\"]\nbackward_prefetch = [\"BACKWARD_PRE\", \"NO_PREFETCH\"]\nlimit_all_gathers = [true, false]\n",
            (4, 1),
        ),
        ("world_size = 2\n[grid]\nsharding_strategy = [\"FULL_SHARD\", \"SHARD_GRAD_OP\", \"NO_SHARD\"]\n", (3, 2)),
        (
            "world_size = 2\n[grid]\nauto_wrap_policy = [\"TRANSFORMER_BASED_WRAP\"]\nsharding_strategy = [\"FULL_SHARD\", \"SHARD_GRAD_OP\", \"NO_SHARD\"]\n",
            (3, 3),
        ),
        (
            "world_size = 2\n[grid]\nauto_wrap_policy = [\"TRANSFORMER_BASED_WRAP\"]\nsharding_strategy = [\"SHARD_GRAD_OP\"]\nbackward_prefetch = [\"BACKWARD_PRE\", \"BACKWARD_POST\"]\n",
            (2, 1),
        ),
        ("world_size = 1\n[grid]\nsharding_strategy = [\"FULL_SHARD\", \"SHARD_GRAD_OP\", \"NO_SHARD\"]\nforward_prefetch = [true, false]\n", (6, 1)),
        ("world_size = 2\n[grid]\nstate_dict_type = [\"FULL_STATE_DICT\", \"SHARDED_STATE_DICT\"]\n", (2, 1)),
        ("world_size = 2\n[checkpoint]\nsave_steps = 5\n[grid]\nstate_dict_type = [\"FULL_STATE_DICT\", \"SHARDED_STATE_DICT\"]\n", (2, 2)),
        ("world_size = 2\n[grid]\ninitial_loss_scale = [1024.0, 2048.0]\nmixed_precision = [\"no\", \"fp16\"]\n", (4, 3)),
        ("world_size = 2\n[grid]\nsync_each_batch = [true, false]\ngradient_accumulation_steps = [1, 2]\n", (4, 3)),
    ];
    for (text, expected) in cases {
        assert_eq!(distinct(&format!("[device]\n{text}")), expected, "{text}");
    }
}

#[test]
fn collapsing_says_why_and_keeps_what_was_written() {
    let row = only_row(&base_and("[fsdp]\nmin_num_params = 2000\nsharding_strategy = \"SHARD_GRAD_OP\"\n[device]\nworld_size = 2\n"));
    assert_eq!(row.settings.fsdp.min_num_params, 2000);
    assert_eq!(row.effective.fsdp.sharding_strategy, ShardingStrategy::FullShard);
    assert_eq!(
        row.collapsed,
        [
            "NO_WRAP makes one unit, which stays gathered from forward to backward: SHARD_GRAD_OP is FULL_SHARD",
            "min_num_params has no effect without SIZE_BASED_WRAP",
        ]
    );
    let row = only_row(&base_and("[device]\nworld_size = 2\n"));
    assert_eq!(row.collapsed, Vec::<String>::new());
    assert_eq!(row.effective, row.settings);
}

/// A shard group of the whole world is plain sharding.
#[test]
fn a_hybrid_group_of_the_whole_world_is_no_hybrid() {
    let mut settings = only_row(&base_and("[fsdp]\nauto_wrap_policy = \"TRANSFORMER_BASED_WRAP\"\n[device]\nworld_size = 4\n")).settings;
    for (written, group, effective) in [
        (ShardingStrategy::HybridShard, Some(4), ShardingStrategy::FullShard),
        (ShardingStrategy::HybridShard, Some(2), ShardingStrategy::HybridShard),
        (ShardingStrategy::HybridShardZero2, Some(4), ShardingStrategy::ShardGradOp),
    ] {
        settings.fsdp.sharding_strategy = written;
        settings.fsdp.hybrid_shard_size = group;
        assert_eq!(collapse(&settings).0.fsdp.sharding_strategy, effective, "{written:?} {group:?}");
    }
}

/// Case 23: a grid over FSDP1's switches and both versions has one trial of version 2 for each way to reshard.
#[test]
fn version_2_has_its_own_switches_only() {
    let plan = base_and(
        "[fsdp]\nauto_wrap_policy = \"TRANSFORMER_BASED_WRAP\"\n[device]\nworld_size = 4\n[grid]\nfsdp_version = [1, 2]\nbackward_prefetch = [\"BACKWARD_PRE\", \"NO_PREFETCH\"]\nreshard_after_forward = [true, false, 1, 2, 4]\n",
    );
    let of = |version: u8| {
        let rows = plan.rows.iter().filter(|row| row.settings.fsdp.fsdp_version == version);
        rows.map(|row| (row.effective.fsdp.backward_prefetch, row.effective.fsdp.reshard_after_forward)).collect::<Vec<_>>()
    };
    let (keep, free) = (Some(ReshardAfterForward::Flag(false)), Some(ReshardAfterForward::Flag(true)));
    let each = [free, keep, keep, Some(ReshardAfterForward::Ranks(2)), free];
    assert_eq!(of(2), [each, each].concat().into_iter().map(|reshard| (BackwardPrefetch::BackwardPre, reshard)).collect::<Vec<_>>());
    assert!(of(1).iter().all(|(_, reshard)| reshard.is_none()));
}

/// Case 22: a grid of a billion points is counted, not built.
#[test]
fn a_billion_points_are_refused_with_their_count() {
    let values = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]";
    let keys = ["seed", "warmup_steps", "eval_steps", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"];
    let mut text = format!("{BASE}[grid]\n");
    for key in keys.iter().chain(&["learning_rate", "weight_decay", "max_grad_norm"]) {
        text.push_str(&format!("{key} = {values}\n"));
    }
    let errors = errors_with(&text, &[]);
    assert_eq!(errors.errors[0].message, "[grid] makes 1,000,000,000 points, at most 1,000,000 can be planned");
    assert!(errors.errors[0].help[0].starts_with("values of each axis: seed (10) x warmup_steps (10) x"), "{errors}");
}

/// Every key's default is of its own kind, and going into a plan every field is overwritten by one.
#[test]
fn every_default_of_the_schema_is_accepted() {
    let plan = plan(BASE);
    let row = only_row(&plan);
    assert!(
        row.settings.train.adam_beta2 > 0.9 && row.settings.train.per_device_eval_batch_size == 8 && row.settings.fsdp.min_num_params == 100_000_000
    );
    assert_eq!(plan.limits.grace_period.as_secs(), 10);
    assert_eq!(plan.telemetry_interval.as_millis(), 200);
}

proptest! {
    #[test]
    fn a_grid_has_the_product_of_its_axes(lengths in prop::collection::vec(1_usize..6, 1..5), dropped in 0_usize..5) {
        let keys = ["seed", "warmup_steps", "per_device_train_batch_size", "gradient_accumulation_steps"];
        let mut text = format!("{BASE}[grid]\n");
        for (key, length) in keys.iter().zip(&lengths) {
            let values: Vec<String> = (1..=*length).map(|value| value.to_string()).collect();
            text.push_str(&format!("{key} = [{}]\n", values.join(", ")));
        }
        let product: usize = lengths.iter().product();
        prop_assert_eq!(plan(&text).rows.len(), product);
        // Dropping one value of the first axis drops its share, unless nothing would be left.
        if dropped < lengths[0] && lengths[0] > 1 {
            text.push_str(&format!("[[exclude]]\nseed = {}\n", dropped + 1));
            let plan = plan(&text);
            prop_assert_eq!(plan.rows.len(), product - product / lengths[0]);
            let unique: HashSet<String> = labels(&plan).into_iter().collect();
            prop_assert_eq!(unique.len(), plan.rows.len());
            let by_index: Vec<Row> = (0..plan.rows.len()).filter_map(|index| plan.rows.get(index)).collect();
            prop_assert!(plan.rows.iter().eq(by_index));
        }
    }
}
