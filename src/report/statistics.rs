//! The tables' arithmetic, in polars: means and spreads over repeats, step times over the steady steps.

use polars::prelude::{ChunkedArray, Column, DataFrame, Float64Type, IntoLazy, PolarsResult, QuantileMethod, col, df, len, lit};

/// Measurements of one training: one value per [`Measure`], missing where there is none.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    pub(super) epoch_seconds: Option<f64>,
    pub(super) perplexity: Option<f64>,
    pub(super) perplexity_common: Option<f64>,
    pub(super) peak_bytes: Option<f64>,
    pub(super) tokens_per_second: Option<f64>,
    pub(super) optimizer_steps: Option<f64>,
    pub(super) tokens_seen: Option<f64>,
    pub(super) costs_seconds: Option<f64>,
}

/// A mean over repeats.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Mean {
    pub(super) value: f64,
    /// Sample standard deviation; `None` below two repeats.
    pub(super) deviation: Option<f64>,
    /// Repeats that have a value.
    pub(super) count: u32,
    /// The largest.
    pub(super) max: f64,
}

/// Means of one row.
#[derive(Clone, Debug, Default)]
pub(super) struct Means {
    pub(super) epoch_seconds: Option<Mean>,
    pub(super) perplexity: Option<Mean>,
    pub(super) perplexity_common: Option<Mean>,
    pub(super) peak_bytes: Option<Mean>,
    pub(super) tokens_per_second: Option<Mean>,
    pub(super) optimizer_steps: Option<Mean>,
    pub(super) tokens_seen: Option<Mean>,
    pub(super) costs_seconds: Option<Mean>,
}

const MEASURES: [&str; 8] =
    ["epoch_seconds", "perplexity", "perplexity_common", "peak_bytes", "tokens_per_second", "optimizer_steps", "tokens_seen", "costs_seconds"];

/// Means over the repeats of each row. `trainings` are pairs of row and measurement; rows from 0 to `rows` all have an entry.
pub(super) fn over_repeats(rows: usize, trainings: &[(usize, Measured)]) -> PolarsResult<Vec<Means>> {
    let column = |value: fn(&Measured) -> Option<f64>| trainings.iter().map(|(_, measured)| value(measured)).collect::<Vec<_>>();
    let measured = df!(
        "row" => trainings.iter().map(|(row, _)| *row as u32).collect::<Vec<_>>(),
        "epoch_seconds" => column(|measured| measured.epoch_seconds),
        "perplexity" => column(|measured| measured.perplexity),
        "perplexity_common" => column(|measured| measured.perplexity_common),
        "peak_bytes" => column(|measured| measured.peak_bytes),
        "tokens_per_second" => column(|measured| measured.tokens_per_second),
        "optimizer_steps" => column(|measured| measured.optimizer_steps),
        "tokens_seen" => column(|measured| measured.tokens_seen),
        "costs_seconds" => column(|measured| measured.costs_seconds),
    )?;
    let aggregates: Vec<_> = MEASURES
        .iter()
        .flat_map(|name| {
            [
                col(*name).mean().alias(format!("{name} mean")),
                col(*name).std(1).alias(format!("{name} deviation")),
                col(*name).count().cast(polars::prelude::DataType::UInt32).alias(format!("{name} count")),
                col(*name).max().alias(format!("{name} max")),
            ]
        })
        .collect();
    let means = measured.lazy().group_by_stable([col("row")]).agg(aggregates);
    let all = df!("row" => (0..rows as u32).collect::<Vec<_>>())?;
    let joined = all.lazy().left_join(means, col("row"), col("row")).sort(["row"], Default::default()).collect()?;
    (0..rows)
        .map(|row| {
            let mean = |name: &str| mean_at(&joined, name, row);
            Ok(Means {
                epoch_seconds: mean(MEASURES[0])?,
                perplexity: mean(MEASURES[1])?,
                perplexity_common: mean(MEASURES[2])?,
                peak_bytes: mean(MEASURES[3])?,
                tokens_per_second: mean(MEASURES[4])?,
                optimizer_steps: mean(MEASURES[5])?,
                tokens_seen: mean(MEASURES[6])?,
                costs_seconds: mean(MEASURES[7])?,
            })
        })
        .collect()
}

fn mean_at(frame: &DataFrame, name: &str, row: usize) -> PolarsResult<Option<Mean>> {
    let Some(count) = frame.column(&format!("{name} count"))?.u32()?.get(row).filter(|count| *count > 0) else { return Ok(None) };
    let Some(value) = frame.column(&format!("{name} mean"))?.f64()?.get(row) else { return Ok(None) };
    Ok(Some(Mean {
        value,
        deviation: frame.column(&format!("{name} deviation"))?.f64()?.get(row),
        count,
        max: frame.column(&format!("{name} max"))?.f64()?.get(row).unwrap_or(value),
    }))
}

/// Steps of one training, for [`over_steps`].
#[derive(Clone, Copy, Debug)]
pub(super) struct StepTime {
    /// Which training.
    pub(super) training: u32,
    /// From 1.
    pub(super) step: u64,
    /// Steps the training takes.
    pub(super) steps: u64,
    pub(super) seconds: f64,
    pub(super) tokens: u64,
    pub(super) skipped: bool,
}

/// Times of the steady steps of one training: all but the first max(3, 5 %).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SteadySteps {
    pub(super) training: u32,
    pub(super) steps: u32,
    pub(super) mean: f64,
    pub(super) median: f64,
    pub(super) percentile_95: f64,
    pub(super) tokens_per_second: f64,
    pub(super) skipped: u32,
}

/// Aggregates the steady steps of each training, in order of training; trainings without any have no entry.
pub(super) fn over_steps(steps: &[StepTime]) -> PolarsResult<Vec<SteadySteps>> {
    let frame = df!(
        "training" => steps.iter().map(|step| step.training).collect::<Vec<_>>(),
        "step" => steps.iter().map(|step| step.step).collect::<Vec<_>>(),
        "first" => steps.iter().map(|step| first_steps(step.steps)).collect::<Vec<_>>(),
        "seconds" => steps.iter().map(|step| step.seconds).collect::<Vec<_>>(),
        "tokens" => steps.iter().map(|step| step.tokens as f64).collect::<Vec<_>>(),
        "skipped" => steps.iter().map(|step| u32::from(step.skipped)).collect::<Vec<_>>(),
    )?;
    let skipped = frame.clone().lazy().group_by_stable([col("training")]).agg([col("skipped").sum()]);
    let steady = frame
        .lazy()
        .filter(col("step").gt(col("first")))
        .group_by_stable([col("training")])
        .agg([
            len().cast(polars::prelude::DataType::UInt32).alias("steps"),
            col("seconds").mean().alias("mean"),
            col("seconds").quantile(lit(0.5), QuantileMethod::Linear).alias("median"),
            col("seconds").quantile(lit(0.95), QuantileMethod::Linear).alias("percentile_95"),
            (col("tokens").sum() / col("seconds").sum()).alias("tokens_per_second"),
        ])
        .left_join(skipped, col("training"), col("training"))
        .sort(["training"], Default::default())
        .collect()?;
    let float = |name: &str| -> PolarsResult<&ChunkedArray<Float64Type>> { steady.column(name).and_then(Column::f64) };
    let (mean, median, percentile_95, tokens_per_second) = (float("mean")?, float("median")?, float("percentile_95")?, float("tokens_per_second")?);
    let (training, count, skipped) = (steady.column("training")?.u32()?, steady.column("steps")?.u32()?, steady.column("skipped")?.u32()?);
    Ok((0..steady.height())
        .filter_map(|index| {
            Some(SteadySteps {
                training: training.get(index)?,
                steps: count.get(index)?,
                mean: mean.get(index)?,
                median: median.get(index)?,
                percentile_95: percentile_95.get(index)?,
                tokens_per_second: tokens_per_second.get(index)?,
                skipped: skipped.get(index)?,
            })
        })
        .collect())
}

/// Steps at the start of a training that are not steady, because caches, pools and kernels are still warming up.
fn first_steps(steps: u64) -> u64 {
    steps.div_ceil(20).max(3)
}

#[cfg(test)]
mod tests {
    use super::{Measured, StepTime, over_repeats, over_steps};

    #[test]
    fn repeats_have_mean_and_spread_and_missing_stays_missing() {
        let measured = |perplexity, epoch_seconds| Measured { perplexity, epoch_seconds, ..Measured::default() };
        let means = over_repeats(3, &[(2, measured(Some(4.0), None)), (0, measured(Some(f64::NAN), Some(2.0))), (2, measured(Some(6.0), Some(1.0)))])
            .unwrap();
        let perplexity = means[2].perplexity.unwrap();
        assert_eq!((perplexity.value, perplexity.count, perplexity.max), (5.0, 2, 6.0));
        assert!((perplexity.deviation.unwrap() - 2.0_f64.sqrt()).abs() < 1e-12);
        let seconds = means[2].epoch_seconds.unwrap();
        assert_eq!((seconds.value, seconds.count, seconds.deviation), (1.0, 1, None));
        assert!(means[0].perplexity.unwrap().value.is_nan());
        assert!(means[1].perplexity.is_none() && means[1].epoch_seconds.is_none());
        assert!(over_repeats(1, &[]).unwrap()[0].tokens_seen.is_none());
    }

    /// CASES 38: first-step costs are in no step time.
    #[test]
    fn the_first_steps_do_not_count() {
        let steps: Vec<StepTime> = (1..=100)
            .map(|step| StepTime { training: 7, step, steps: 100, seconds: if step <= 5 { 60.0 } else { 0.5 }, tokens: 128, skipped: step == 2 })
            .collect();
        let steady = over_steps(&steps).unwrap();
        assert_eq!(steady.len(), 1);
        assert_eq!((steady[0].training, steady[0].steps, steady[0].skipped), (7, 95, 1));
        assert_eq!((steady[0].mean, steady[0].median, steady[0].percentile_95, steady[0].tokens_per_second), (0.5, 0.5, 0.5, 256.0));
        assert!(over_steps(&steps[..5]).unwrap().is_empty());
        assert!(over_steps(&[]).unwrap().is_empty());
    }
}
