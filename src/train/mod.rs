//! Everything that names Burn. Run by `sweep trial` in the child.

pub mod memory;
pub mod scaler;
pub mod schedule;
