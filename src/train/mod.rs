//! Everything that names Burn. Run by `sweep trial` in the child.

pub mod error;
pub mod fsdp;
pub mod memory;
pub mod model;
pub mod scaler;
pub mod schedule;
