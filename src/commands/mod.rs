//! The commands, a file each. They join the rooms; none of them prints.

pub mod compare;
pub mod devices;
pub mod plan;
mod prepare;
pub mod report;
pub mod run;
mod slurm;
pub mod status;
pub mod supervise;
pub mod trial;
