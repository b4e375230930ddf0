//! Flat buffers that ranks exchange: a run of numbers of one data type in this rank's device memory.

use std::ops::Range;

use half::{bf16, f16};

use crate::spec::settings::DType;
use crate::train::error::TrainError;

/// A run of numbers of one data type.
#[derive(Clone, Debug, PartialEq)]
pub enum Buffer {
    /// 32-bit.
    F32(Vec<f32>),
    /// IEEE half.
    F16(Vec<f16>),
    /// Brain float.
    Bf16(Vec<bf16>),
}

impl Buffer {
    /// Zeros.
    pub fn zeros(dtype: DType, length: usize) -> Self {
        match dtype {
            DType::Fp32 => Self::F32(vec![0.0; length]),
            DType::Fp16 => Self::F16(vec![f16::ZERO; length]),
            DType::Bf16 => Self::Bf16(vec![bf16::ZERO; length]),
        }
    }

    /// `values` rounded to `dtype`.
    pub fn from_f32(dtype: DType, values: &[f32]) -> Self {
        match dtype {
            DType::Fp32 => Self::F32(values.to_vec()),
            DType::Fp16 => Self::F16(values.iter().map(|&value| f16::from_f32(value)).collect()),
            DType::Bf16 => Self::Bf16(values.iter().map(|&value| bf16::from_f32(value)).collect()),
        }
    }

    /// Data type of the numbers.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::Fp32,
            Self::F16(_) => DType::Fp16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// How many numbers.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same numbers, rounded to `dtype`.
    pub(super) fn converted(self, dtype: DType) -> Self {
        match self {
            Self::F32(values) => Self::from_f32(dtype, &values),
            half => Self::from_f32(dtype, &half.to_f32()),
        }
    }

    /// The numbers as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.clone(),
            Self::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }

    /// The numbers as f32, without a copy if that is what they are and `copy` does not ask for one.
    pub(super) fn into_f32(self, copy: bool) -> Vec<f32> {
        match self {
            Self::F32(values) if !copy => values,
            other => other.to_f32(),
        }
    }

    /// Divides every number and rounds it again.
    pub(super) fn divide(&mut self, by: f32) {
        if by == 1.0 {
            return;
        }
        match self {
            Self::F32(values) => values.iter_mut().for_each(|value| *value /= by),
            Self::F16(values) => values.iter_mut().for_each(|value| *value = f16::from_f32(value.to_f32() / by)),
            Self::Bf16(values) => values.iter_mut().for_each(|value| *value = bf16::from_f32(value.to_f32() / by)),
        }
    }

    /// Adds every number to its place in `sum`.
    pub(super) fn add_to(&self, sum: &mut [f32]) {
        match self {
            Self::F32(values) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
            Self::F16(values) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value.to_f32()),
            Self::Bf16(values) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value.to_f32()),
        }
    }

    /// The numbers of `parts`, one after another.
    pub(super) fn concatenate<'a>(parts: impl Iterator<Item = &'a Self> + Clone) -> Result<Self, TrainError> {
        let length = parts.clone().map(Self::len).sum();
        let first = parts.clone().next().ok_or_else(mixed)?;
        match first {
            Self::F32(_) => join(length, parts, |part| if let Self::F32(values) = part { Some(values) } else { None }).map(Self::F32),
            Self::F16(_) => join(length, parts, |part| if let Self::F16(values) = part { Some(values) } else { None }).map(Self::F16),
            Self::Bf16(_) => join(length, parts, |part| if let Self::Bf16(values) = part { Some(values) } else { None }).map(Self::Bf16),
        }
    }

    /// The element-wise sum of `parts` within `range`, added in order and rounded after every addition, as a ring of ranks does.
    pub(super) fn sum<'a>(parts: impl Iterator<Item = &'a Self> + Clone, range: Range<usize>) -> Result<Self, TrainError> {
        let first = parts.clone().next().ok_or_else(mixed)?;
        match first {
            Self::F32(_) => add(range, parts, |part| if let Self::F32(values) = part { Some(values) } else { None }, |a, b| a + b).map(Self::F32),
            Self::F16(_) => add(range, parts, |part| if let Self::F16(values) = part { Some(values) } else { None }, |a, b| a + b).map(Self::F16),
            Self::Bf16(_) => add(range, parts, |part| if let Self::Bf16(values) = part { Some(values) } else { None }, |a, b| a + b).map(Self::Bf16),
        }
    }
}

fn mixed() -> TrainError {
    TrainError::Failed("ranks brought buffers of different data types or lengths to one collective".to_owned())
}

fn join<'a, T: Copy + 'a>(
    length: usize,
    parts: impl Iterator<Item = &'a Buffer>,
    values: impl Fn(&'a Buffer) -> Option<&'a Vec<T>>,
) -> Result<Vec<T>, TrainError> {
    let mut joined = Vec::with_capacity(length);
    for part in parts {
        joined.extend_from_slice(values(part).ok_or_else(mixed)?);
    }
    Ok(joined)
}

fn add<'a, T: Copy + 'a>(
    range: Range<usize>,
    mut parts: impl Iterator<Item = &'a Buffer>,
    values: impl Fn(&'a Buffer) -> Option<&'a Vec<T>>,
    plus: impl Fn(T, T) -> T,
) -> Result<Vec<T>, TrainError> {
    let part = |part: &'a Buffer| values(part).and_then(|values| values.get(range.clone())).ok_or_else(mixed);
    let mut sum = part(parts.next().ok_or_else(mixed)?)?.to_vec();
    for next in parts {
        for (total, &value) in sum.iter_mut().zip(part(next)?) {
            *total = plus(*total, value);
        }
    }
    Ok(sum)
}

/// Rust's type of a [`Buffer`]'s numbers.
pub trait Numbers: Copy {
    /// The numbers, if they are of this type.
    fn of(buffer: &Buffer) -> Option<&[Self]>;

    /// The numbers to be changed, if they are of this type.
    fn of_mut(buffer: &mut Buffer) -> Option<&mut [Self]>;
}

macro_rules! numbers {
    ($type:ty, $variant:ident) => {
        impl Numbers for $type {
            fn of(buffer: &Buffer) -> Option<&[Self]> {
                if let Buffer::$variant(values) = buffer { Some(values) } else { None }
            }

            fn of_mut(buffer: &mut Buffer) -> Option<&mut [Self]> {
                if let Buffer::$variant(values) = buffer { Some(values) } else { None }
            }
        }
    };
}

numbers!(f32, F32);
numbers!(f16, F16);
numbers!(bf16, Bf16);
