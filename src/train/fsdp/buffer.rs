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

    /// None yet, with room for `capacity`.
    pub fn with_capacity(dtype: DType, capacity: usize) -> Self {
        match dtype {
            DType::Fp32 => Self::F32(Vec::with_capacity(capacity)),
            DType::Fp16 => Self::F16(Vec::with_capacity(capacity)),
            DType::Bf16 => Self::Bf16(Vec::with_capacity(capacity)),
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

    /// Appends the numbers of `other` in `range`.
    pub(super) fn extend_from(&mut self, other: &Self, range: Range<usize>) -> Result<(), TrainError> {
        let appended = match (self, other) {
            (Self::F32(values), Self::F32(other)) => other.get(range).map(|other| values.extend_from_slice(other)),
            (Self::F16(values), Self::F16(other)) => other.get(range).map(|other| values.extend_from_slice(other)),
            (Self::Bf16(values), Self::Bf16(other)) => other.get(range).map(|other| values.extend_from_slice(other)),
            _ => None,
        };
        appended.ok_or_else(mixed)
    }

    /// Appends `count` zeros.
    pub(super) fn extend_zeros(&mut self, count: usize) {
        match self {
            Self::F32(values) => values.resize(values.len() + count, 0.0),
            Self::F16(values) => values.resize(values.len() + count, f16::ZERO),
            Self::Bf16(values) => values.resize(values.len() + count, bf16::ZERO),
        }
    }

    /// Appends the element-wise sum of `parts` within `range`, added in order and rounded after every addition, as a ring of ranks does.
    pub(super) fn extend_with_sum<'a>(&mut self, parts: impl Iterator<Item = &'a Self>, range: Range<usize>) -> Result<(), TrainError> {
        let start = self.len();
        for (index, part) in parts.enumerate() {
            if index == 0 {
                self.extend_from(part, range.clone())?;
                continue;
            }
            self.add(start, part, range.clone())?;
        }
        Ok(())
    }

    /// Adds the numbers of `part` in `range` to those from `start` on, of which there are as many, and rounds again.
    pub(super) fn add(&mut self, start: usize, part: &Self, range: Range<usize>) -> Result<(), TrainError> {
        let added = match (self, part) {
            (Self::F32(sum), Self::F32(part)) => add(&mut sum[start..], part.get(range), |a, b| a + b),
            (Self::F16(sum), Self::F16(part)) => add(&mut sum[start..], part.get(range), |a, b| a + b),
            (Self::Bf16(sum), Self::Bf16(part)) => add(&mut sum[start..], part.get(range), |a, b| a + b),
            _ => None,
        };
        added.ok_or_else(mixed)
    }

    /// Puts the numbers of `other` at `start`.
    pub(super) fn overwrite(&mut self, start: usize, other: &Self) -> Result<(), TrainError> {
        let range = start..start + other.len();
        let written = match (self, other) {
            (Self::F32(values), Self::F32(other)) => values.get_mut(range).map(|values| values.copy_from_slice(other)),
            (Self::F16(values), Self::F16(other)) => values.get_mut(range).map(|values| values.copy_from_slice(other)),
            (Self::Bf16(values), Self::Bf16(other)) => values.get_mut(range).map(|values| values.copy_from_slice(other)),
            _ => None,
        };
        written.ok_or_else(mixed)
    }
}

fn mixed() -> TrainError {
    TrainError::Failed("ranks brought buffers of different data types or lengths to one collective".to_owned())
}

fn add<T: Copy>(sum: &mut [T], part: Option<&[T]>, plus: impl Fn(T, T) -> T) -> Option<()> {
    let part = part.filter(|part| part.len() == sum.len())?;
    sum.iter_mut().zip(part).for_each(|(sum, part)| *sum = plus(*sum, *part));
    Some(())
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
