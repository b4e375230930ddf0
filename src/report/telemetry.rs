//! Reads `telemetry.csv` forgivingly: columns by name, empty cells missing, a torn last line dropped.

use crate::store::TELEMETRY_COLUMNS;

/// One reading of one source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    /// Seconds since the trial began.
    pub(super) elapsed: f64,
    /// `host`, or the UUID of a GPU.
    pub(super) source: String,
    /// Percent; of one core for `host`.
    pub(super) utilization: Option<f64>,
    pub(super) memory_bytes: Option<f64>,
}

impl Sample {
    /// Whether it is of the child's process tree rather than of a GPU.
    pub(super) fn is_host(&self) -> bool {
        self.source == "host"
    }
}

/// Samples, and line number and reason of what could not be read.
pub(super) fn parse(text: &str) -> (Vec<Sample>, Vec<(usize, String)>) {
    let mut unreadable = Vec::new();
    let mut lines = text.split_inclusive('\n').enumerate();
    let Some((_, header)) = lines.next() else { return (Vec::new(), unreadable) };
    let names: Vec<&str> = header.trim().split(',').map(str::trim).collect();
    let column = |name: &str| names.iter().position(|known| *known == name);
    for name in &TELEMETRY_COLUMNS[..4] {
        if column(name).is_none() {
            unreadable.push((1, format!("the column {name} is missing")));
        }
    }
    let (Some(elapsed), Some(source)) = (column("elapsed_s"), column("source")) else { return (Vec::new(), unreadable) };
    let (utilization, memory) = (column("utilization_percent"), column("memory_bytes"));
    let mut samples = Vec::new();
    for (index, line) in lines {
        // The sampler was cut off in the middle of it.
        if !line.ends_with('\n') {
            continue;
        }
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        match sample(&cells, names.len(), elapsed, source, utilization, memory) {
            Ok(sample) => samples.push(sample),
            Err(reason) => unreadable.push((index + 1, reason)),
        }
    }
    (samples, unreadable)
}

fn sample(
    cells: &[&str],
    columns: usize,
    elapsed: usize,
    source: usize,
    utilization: Option<usize>,
    memory: Option<usize>,
) -> Result<Sample, String> {
    if cells.len() != columns {
        return Err(format!("{} cells, the header has {columns}", cells.len()));
    }
    let number = |column: usize| match cells[column] {
        "" => Ok(None),
        text => match text.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(Some(value)),
            Ok(_) => Ok(None),
            Err(_) => Err(format!("\"{text}\" is not a number")),
        },
    };
    Ok(Sample {
        elapsed: number(elapsed)?.ok_or_else(|| "elapsed_s is empty".to_owned())?,
        source: cells[source].to_owned(),
        utilization: utilization.map_or(Ok(None), number)?,
        memory_bytes: memory.map_or(Ok(None), number)?,
    })
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn columns_are_found_by_name_and_empty_cells_are_missing() {
        let (samples, unreadable) = parse("source,elapsed_s,memory_bytes,utilization_percent,new_column\nhost,0.5,1024,,x\nGPU-1,1,,37.5,\n");
        assert!(unreadable.is_empty(), "{unreadable:?}");
        assert_eq!(samples.len(), 2);
        assert_eq!((samples[0].elapsed, samples[0].utilization, samples[0].memory_bytes), (0.5, None, Some(1024.0)));
        assert_eq!((samples[1].source.as_str(), samples[1].utilization, samples[1].memory_bytes), ("GPU-1", Some(37.5), None));
        assert!(samples[0].is_host() && !samples[1].is_host());
    }

    /// CASES 39: a missing column, zero samples.
    #[test]
    fn a_missing_column_is_named_and_the_rest_kept() {
        let (samples, unreadable) = parse("elapsed_s,source,utilization_percent\n0.2,host,50\n");
        assert_eq!(samples[0].utilization, Some(50.0));
        assert_eq!(unreadable, [(1, "the column memory_bytes is missing".to_owned())]);
        assert_eq!(parse("").0, []);
        assert_eq!(parse("elapsed_s,source,utilization_percent,memory_bytes\n"), (Vec::new(), Vec::new()));
    }

    #[test]
    fn a_torn_last_line_is_dropped_at_every_byte_and_a_bad_line_is_named() {
        let header = "elapsed_s,source,utilization_percent,memory_bytes\n";
        let last = "0.4,host,60,2048\n";
        let text = format!("{header}0.2,host,50,1024\n{last}");
        for cut in 1..last.len() {
            let (samples, unreadable) = parse(&text[..text.len() - cut]);
            assert_eq!((samples.len(), unreadable.len()), (1, 0), "cut {cut}");
        }
        let (samples, unreadable) = parse(&format!("{header}0.2,host,fast,1\n0.4,host\n0.6,host,60,2048\n"));
        assert_eq!(samples.len(), 1);
        assert_eq!(unreadable, [(2, "\"fast\" is not a number".to_owned()), (3, "2 cells, the header has 4".to_owned())]);
    }
}
