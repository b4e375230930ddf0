//! Tables 1 and 2: what each row measured, and which switches it had. Headings and CSV columns are a contract.

use crate::event::LimitedBy;
use crate::format;
use crate::spec::settings::{AutoWrapPolicy, BackwardPrefetch, DType, FsdpSettings, MixedPrecision, ReshardAfterForward, ShardingStrategy};

use super::read::{Progress, RunContents};
use super::rows::{Field, ReportRow};
use super::table::{Cell, Table, csv};

/// Columns of `table1.csv`.
const TABLE_1_COLUMNS: [&str; 11] = [
    "method",
    "block_size_max",
    "limited_by",
    "time_per_epoch_s",
    "perplexity",
    "eval_perplexity_common",
    "peak_memory_bytes",
    "tokens_per_s",
    "optimizer_steps",
    "tokens_seen",
    "notes",
];

/// Columns of `table2.csv`.
const TABLE_2_COLUMNS: [&str; 10] = [
    "method",
    "block_size_max",
    "full_sharding",
    "wrapping_strategy",
    "prefetch",
    "forward_fetch",
    "use_orig_params",
    "cpu_offload_efficient_loading",
    "mixed_precision",
    "activation_checkpointing",
];

/// Table 1 for readers.
pub(super) fn table_1(contents: &RunContents, rows: &[ReportRow<'_>]) -> Table {
    let price = contents.manifest.report.price_per_device_hour;
    let mut headings = vec![
        ("Method", false),
        ("Block size max", true),
        ("Time per epoch (min)", true),
        ("Perplexity", true),
        ("Limited by", false),
        ("Perplexity at common block size", true),
        ("Peak memory", true),
        ("Tokens/s", true),
        ("Optimizer steps", true),
        ("Tokens seen", true),
        ("Evaluation + checkpoints (s)", true),
    ];
    if price.is_some() {
        headings.push(("Cost per epoch", true));
    }
    let mut table = Table {
        headings: headings.iter().map(|(heading, _)| (*heading).to_owned()).collect(),
        numeric: headings.iter().map(|(_, numeric)| *numeric).collect(),
        ..Table::default()
    };
    for row in rows {
        let means = &row.means;
        let whole = |value: f64| format::count(value.round() as u64);
        let mut cells = vec![
            (Field::Method, Some(row.label().to_owned())),
            (Field::BlockSize, row.block_size.map(|size| size.to_string())),
            (Field::EpochTime, means.epoch_seconds.map(|mean| format::minutes(mean.value))),
            (Field::Perplexity, means.perplexity.map(|mean| perplexity(mean.value))),
            (Field::LimitedBy, row.limited_by.map(|limit| limited_by(limit).to_owned())),
            (Field::PerplexityCommon, means.perplexity_common.map(|mean| perplexity(mean.value))),
            (Field::PeakMemory, means.peak_bytes.map(|mean| format::bytes(mean.max as u64))),
            (Field::Throughput, means.tokens_per_second.map(|mean| throughput(mean.value))),
            (Field::Steps, means.optimizer_steps.map(|mean| whole(mean.value))),
            (Field::TokensSeen, means.tokens_seen.map(|mean| whole(mean.value))),
            (Field::Costs, means.costs_seconds.map(|mean| format!("{:.1}", mean.value))),
        ];
        if let Some(price) = price {
            cells.push((Field::EpochTime, cost_per_epoch(row, price).map(|cost| format!("{cost:.4}"))));
        }
        let cells = cells.into_iter().map(|(field, text)| Cell { text: text.unwrap_or_default(), notes: notes(&mut table, row, field) }).collect();
        table.rows.push(cells);
    }
    table.remarks = remarks(contents, rows);
    table
}

/// Numbers of the footnotes of a cell.
fn notes(table: &mut Table, row: &ReportRow<'_>, field: Field) -> Vec<usize> {
    let mut numbers: Vec<usize> = row.notes.iter().filter(|note| note.field == field).map(|note| table.footnote(&note.text)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// `table1.csv`: numbers in full precision and base units, notes as one text.
pub(super) fn table_1_csv(contents: &RunContents, rows: &[ReportRow<'_>]) -> String {
    let price = contents.manifest.report.price_per_device_hour;
    let mut columns = TABLE_1_COLUMNS.to_vec();
    if price.is_some() {
        columns.push("cost_per_epoch");
    }
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let means = &row.means;
            let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
            let whole = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{}", value.round()));
            let mut line = vec![
                row.label().to_owned(),
                row.block_size.map_or_else(String::new, |size| size.to_string()),
                row.limited_by.map_or("", limited_by).to_owned(),
                number(means.epoch_seconds.map(|mean| mean.value)),
                number(means.perplexity.map(|mean| mean.value)),
                number(means.perplexity_common.map(|mean| mean.value)),
                whole(means.peak_bytes.map(|mean| mean.max)),
                number(means.tokens_per_second.map(|mean| mean.value)),
                whole(means.optimizer_steps.map(|mean| mean.value)),
                whole(means.tokens_seen.map(|mean| mean.value)),
                notes_in_words(row),
            ];
            if let Some(price) = price {
                line.push(number(cost_per_epoch(row, price)));
            }
            line
        })
        .collect();
    csv(&columns, &lines)
}

/// All notes of a row, each text once, with the columns it is about.
fn notes_in_words(row: &ReportRow<'_>) -> String {
    let mut texts: Vec<(&str, Vec<&str>)> = Vec::new();
    for note in &row.notes {
        let column = match note.field {
            Field::Method | Field::BlockSize => "",
            Field::LimitedBy => "limited_by",
            Field::EpochTime => "time_per_epoch_s",
            Field::Perplexity => "perplexity",
            Field::PerplexityCommon => "eval_perplexity_common",
            Field::PeakMemory => "peak_memory_bytes",
            Field::Throughput => "tokens_per_s",
            Field::Steps => "optimizer_steps",
            Field::TokensSeen => "tokens_seen",
            // Its column is not part of the file.
            Field::Costs => continue,
        };
        match texts.iter_mut().find(|(text, _)| *text == note.text) {
            Some((_, columns)) => columns.push(column),
            None => texts.push((&note.text, vec![column])),
        }
    }
    let words =
        texts.into_iter().map(|(text, columns)| if columns.contains(&"") { text.to_owned() } else { format!("{}: {text}", columns.join(" and ")) });
    words.collect::<Vec<_>>().join("; ")
}

/// What holds for the whole of Table 1.
fn remarks(contents: &RunContents, rows: &[ReportRow<'_>]) -> Vec<String> {
    let mut remarks = Vec::new();
    match contents.progress {
        Progress::Complete => {}
        Progress::Open => {
            remarks.push("The end of this run is not on record: it is in progress, or was killed. The tables show what is there so far.".to_owned())
        }
        Progress::Stopped => remarks.push("This run was stopped with trials outstanding. The tables show what is there so far.".to_owned()),
    }
    remarks.push(
        "Perplexity is taken at each row's own block size, in the trial's own precision; the stride is the block size. A longer block gives more \
         context, so rows are compared at the common block size."
            .to_owned(),
    );
    let mut common: Vec<usize> = rows.iter().map(|row| row.settings().train.eval_block_size).collect();
    common.sort_unstable();
    common.dedup();
    let sizes: Vec<String> = common.iter().map(usize::to_string).collect();
    match sizes.as_slice() {
        [] => {}
        [size] => remarks.push(format!("The common block size is {size}.")),
        sizes => remarks.push(format!("The common block size is not the same in all rows: {}.", sizes.join(", "))),
    }
    remarks.push(
        "Time per epoch is the mean synchronised step time, data wait included, over all but the first max(3, 5 %) steps, times the steps of one epoch; \
         evaluation and checkpoints are in a column of their own. Peak memory is that of the fullest rank."
            .to_owned(),
    );
    let mut described: Vec<&str> = Vec::new();
    for row in rows {
        let data = &row.manifest.data;
        if described.contains(&data.fingerprint.as_str()) {
            continue;
        }
        described.push(&data.fingerprint);
        let mut text = format!(
            "Data: {} ({} training tokens, {} evaluation tokens; fingerprint {}).",
            data.description,
            format::count(data.train_tokens),
            format::count(data.eval_tokens),
            data.fingerprint.chars().take(16).collect::<String>()
        );
        if let Some(floor) = data.floor_perplexity {
            text += &format!(" No model can reach a perplexity below {} on it.", perplexity(floor));
        }
        remarks.push(text);
    }
    if let Some(price) = contents.manifest.report.price_per_device_hour {
        remarks.push(format!("Cost per epoch: {price} per device and hour, times the devices of the row."));
    }
    remarks.extend(contents.notices.iter().cloned());
    if !contents.problems.is_empty() {
        remarks.push(format!("{} files or lines could not be read; the report names them.", contents.problems.len()));
    }
    remarks
}

/// Table 2 for readers.
pub(super) fn table_2(rows: &[ReportRow<'_>]) -> Table {
    let headings = [
        ("Block size max", true),
        ("Full sharding", false),
        ("Wrapping strategy", false),
        ("Prefetch", false),
        ("Forward-fetch", false),
        ("use_orig_params", false),
        ("CPU-RAM offloading + efficient loading", false),
        ("Mixed precision", false),
        ("Activation checkpointing", false),
    ];
    let mut table = Table {
        headings: headings.iter().map(|(heading, _)| (*heading).to_owned()).collect(),
        numeric: headings.iter().map(|(_, numeric)| *numeric).collect(),
        ..Table::default()
    };
    for row in rows {
        let mut block_size = Cell::plain(row.block_size.map(|size| size.to_string()).unwrap_or_default());
        for note in row.notes.iter().filter(|note| note.field == Field::BlockSize || row.manifest.row.collapsed.contains(&note.text)) {
            block_size.notes.push(table.footnote(&note.text));
        }
        block_size.notes.sort_unstable();
        block_size.notes.dedup();
        let mut cells = vec![block_size];
        cells.extend(switches(&row.settings().fsdp).map(Cell::plain));
        table.rows.push(cells);
    }
    table.remarks = vec!["The rows are those of Table 1, in its order.".to_owned()];
    table
}

/// `table2.csv`.
pub(super) fn table_2_csv(rows: &[ReportRow<'_>]) -> String {
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let mut line = vec![row.label().to_owned(), row.block_size.map_or_else(String::new, |size| size.to_string())];
            line.extend(switches(&row.settings().fsdp));
            line
        })
        .collect();
    csv(&TABLE_2_COLUMNS, &lines)
}

/// The switches of Table 2, in its order, in words.
fn switches(fsdp: &FsdpSettings) -> [String; 8] {
    let yes_no = |on: bool| if on { "yes" } else { "no" }.to_owned();
    [
        match (fsdp.fsdp_version, fsdp.sharding_strategy) {
            (2, _) => match fsdp.reshard_after_forward {
                None | Some(ReshardAfterForward::Flag(true)) => "yes".to_owned(),
                Some(ReshardAfterForward::Flag(false)) => "no (reshard_after_forward = false)".to_owned(),
                Some(ReshardAfterForward::Ranks(ranks)) => format!("resharded to {ranks} ranks"),
            },
            (_, ShardingStrategy::FullShard) => "yes".to_owned(),
            (_, ShardingStrategy::ShardGradOp) => "no (SHARD_GRAD_OP)".to_owned(),
            (_, ShardingStrategy::NoShard) => "no (NO_SHARD)".to_owned(),
            (_, ShardingStrategy::HybridShard) => "within groups (HYBRID_SHARD)".to_owned(),
            (_, ShardingStrategy::HybridShardZero2) => "no (HYBRID_SHARD_ZERO2)".to_owned(),
        },
        match fsdp.auto_wrap_policy {
            AutoWrapPolicy::NoWrap => "no wrap".to_owned(),
            AutoWrapPolicy::TransformerBasedWrap => "transformer_based_wrap".to_owned(),
            AutoWrapPolicy::SizeBasedWrap => format!("size-based wrap, {} params", short_count(fsdp.min_num_params)),
        },
        match fsdp.backward_prefetch {
            BackwardPrefetch::BackwardPre => "yes".to_owned(),
            BackwardPrefetch::BackwardPost => "yes (BACKWARD_POST)".to_owned(),
            BackwardPrefetch::NoPrefetch => "no".to_owned(),
        },
        yes_no(fsdp.forward_prefetch),
        yes_no(fsdp.use_orig_params),
        match (fsdp.cpu_offload, fsdp.cpu_ram_efficient_loading) {
            (true, true) => "yes".to_owned(),
            (false, false) => "no".to_owned(),
            (true, false) => "offloading only".to_owned(),
            (false, true) => "efficient loading only".to_owned(),
        },
        mixed_precision(fsdp.mixed_precision),
        yes_no(fsdp.activation_checkpointing),
    ]
}

fn mixed_precision(precision: MixedPrecision) -> String {
    let name = |dtype: DType| match dtype {
        DType::Fp32 => "fp32",
        DType::Fp16 => "fp16",
        DType::Bf16 => "bf16",
    };
    let MixedPrecision { param_dtype, reduce_dtype, buffer_dtype } = precision;
    if precision == MixedPrecision::uniform(DType::Fp32) {
        "no".to_owned()
    } else if precision == MixedPrecision::uniform(param_dtype) {
        format!("yes ({})", name(param_dtype))
    } else {
        format!("yes (param {}, reduce {}, buffer {})", name(param_dtype), name(reduce_dtype), name(buffer_dtype))
    }
}

/// A count as people say it: `2k`, `100M`; in full where that would round.
fn short_count(count: u64) -> String {
    match count {
        0 => "0".to_owned(),
        _ if count.is_multiple_of(1_000_000) => format!("{}M", format::count(count / 1_000_000)),
        _ if count.is_multiple_of(1_000) => format!("{}k", format::count(count / 1_000)),
        _ => format::count(count),
    }
}

/// Price of the devices of a row for one epoch.
pub(super) fn cost_per_epoch(row: &ReportRow<'_>, price_per_device_hour: f64) -> Option<f64> {
    let seconds = row.means.epoch_seconds?.value;
    Some(seconds / 3600.0 * row.settings().device.world_size as f64 * price_per_device_hour)
}

/// A perplexity: two decimals, or as few as a large one needs.
pub(super) fn perplexity(value: f64) -> String {
    if !value.is_finite() {
        value.to_string()
    } else if value < 10_000.0 {
        format!("{value:.2}")
    } else if value < 1e9 {
        format::count(value.round() as u64)
    } else {
        format!("{value:.2e}")
    }
}

fn throughput(value: f64) -> String {
    format::tokens_per_second(value).trim_end_matches(" tokens/s").to_owned()
}

/// What stands in the way of a larger block size, as the tables write it.
pub(super) fn limited_by(limit: LimitedBy) -> &'static str {
    match limit {
        LimitedBy::Memory => "memory",
        LimitedBy::Model => "model",
        LimitedBy::Candidates => "candidates",
        LimitedBy::Data => "data",
    }
}

#[cfg(test)]
mod tests {
    use super::{mixed_precision, perplexity, short_count};
    use crate::spec::settings::{DType, MixedPrecision};

    #[test]
    fn counts_are_short_only_where_they_lose_nothing() {
        for (count, written) in [(0, "0"), (2000, "2k"), (2048, "2,048"), (100_000_000, "100M"), (1_500_000, "1,500k")] {
            assert_eq!(short_count(count), written);
        }
    }

    #[test]
    fn perplexities_are_readable_at_any_size() {
        for (value, written) in [(45.358, "45.36"), (50_257.4, "50,257"), (1e12, "1.00e12"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
            assert_eq!(perplexity(value), written);
        }
    }

    #[test]
    fn mixed_precision_names_its_types() {
        assert_eq!(mixed_precision(MixedPrecision::uniform(DType::Fp32)), "no");
        assert_eq!(mixed_precision(MixedPrecision::uniform(DType::Fp16)), "yes (fp16)");
        let apart = MixedPrecision { param_dtype: DType::Bf16, reduce_dtype: DType::Fp32, buffer_dtype: DType::Bf16 };
        assert_eq!(mixed_precision(apart), "yes (param bf16, reduce fp32, buffer bf16)");
    }
}
