//! The three floating-point types that models compute in, as one trait.

use std::mem::MaybeUninit;

use burn::tensor::Element;
use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::train::fsdp::buffer::Numbers;

/// A floating-point number of device memory. Arithmetic on it goes through f32.
pub trait Number: Element + Numbers + Pod + Send + Sync {
    /// Its value.
    fn load(self) -> f32;

    /// `value`, rounded to nearest.
    fn store(value: f32) -> Self;

    /// The values of `from`; both are equally long.
    fn load_all(from: &[Self], to: &mut [f32]);

    /// The values of `from`, rounded to nearest; both are equally long.
    fn store_all(from: &[f32], to: &mut [Self]);

    /// The numbers as f32, if that is what they are.
    fn as_f32(numbers: &[Self]) -> Option<&[f32]>;

    /// The numbers as f32, to be changed, if that is what they are.
    fn as_f32_mut(numbers: &mut [Self]) -> Option<&mut [f32]>;

    /// The room behind the numbers of a vector as f32, if that is what they are.
    fn spare_as_f32(numbers: &mut Vec<Self>) -> Option<&mut [MaybeUninit<f32>]>;
}

impl Number for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        value
    }

    fn load_all(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn store_all(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn as_f32(numbers: &[Self]) -> Option<&[f32]> {
        Some(numbers)
    }

    fn as_f32_mut(numbers: &mut [Self]) -> Option<&mut [f32]> {
        Some(numbers)
    }

    fn spare_as_f32(numbers: &mut Vec<Self>) -> Option<&mut [MaybeUninit<f32>]> {
        Some(numbers.spare_capacity_mut())
    }
}

macro_rules! half_number {
    ($type:ty) => {
        impl Number for $type {
            #[inline(always)]
            fn load(self) -> f32 {
                self.to_f32()
            }

            #[inline(always)]
            fn store(value: f32) -> Self {
                Self::from_f32(value)
            }

            fn load_all(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }

            fn store_all(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }

            fn as_f32(_: &[Self]) -> Option<&[f32]> {
                None
            }

            fn as_f32_mut(_: &mut [Self]) -> Option<&mut [f32]> {
                None
            }

            fn spare_as_f32(_: &mut Vec<Self>) -> Option<&mut [MaybeUninit<f32>]> {
                None
            }
        }
    };
}

half_number!(f16);
half_number!(bf16);

/// `numbers` as f32: themselves, or a copy in `room`. Kernels work on rows of f32, since halves one by one are slow to convert.
pub(super) fn wide<'a, T: Number>(numbers: &'a [T], room: &'a mut Vec<f32>) -> &'a [f32] {
    if let Some(numbers) = T::as_f32(numbers) {
        return numbers;
    }
    room.resize(numbers.len(), 0.0);
    T::load_all(numbers, room);
    room
}

/// Lets `change` work on `numbers` as f32.
pub(super) fn change<T: Number, R>(numbers: &mut [T], change: impl FnOnce(&mut [f32]) -> R) -> R {
    if let Some(numbers) = T::as_f32_mut(numbers) {
        return change(numbers);
    }
    let mut room = vec![0.0; numbers.len()];
    T::load_all(numbers, &mut room);
    let result = change(&mut room);
    T::store_all(&room, numbers);
    result
}
