//! A record of what a rank did in which order, comparable with what PyTorch does.

use std::fmt;

use crate::spec::settings::DType;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceEvent {
    /// A collective was issued.
    Collective {
        /// Which: `all_gather`, `reduce_scatter`, `all_reduce`.
        operation: &'static str,
        /// Elements of the whole, over all ranks.
        full_numel: usize,
        /// What they are.
        dtype: DType,
        /// Path of the unit; empty for the root.
        unit: String,
    },
    /// Forward of this block begins, or runs again.
    Forward(usize),
    /// The gradient of this block's output has arrived.
    Backward(usize),
    /// The loss is known.
    Loss,
    /// Backward has ended.
    BackwardDone,
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collective { operation, full_numel, dtype, unit } => {
                let unit = if unit.is_empty() { "<root>" } else { unit };
                let dtype = match dtype {
                    DType::Fp32 => "float32",
                    DType::Fp16 => "float16",
                    DType::Bf16 => "bfloat16",
                };
                write!(formatter, "{operation} {full_numel} {dtype} {unit}")
            }
            Self::Forward(block) => write!(formatter, "fwd h.{block}"),
            Self::Backward(block) => write!(formatter, "bwd h.{block}"),
            Self::Loss => formatter.write_str("loss"),
            Self::BackwardDone => formatter.write_str("backward done"),
        }
    }
}
