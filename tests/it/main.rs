//! Integration tests: one binary, a module per room.

#[cfg(feature = "cpu")]
mod checkpoint;
mod data;
mod devices;
#[cfg(feature = "cpu")]
mod llama;
mod nvml;
mod plan;
mod report;
mod run;
mod run_chaos;
mod run_devices;
mod run_endings;
mod run_processes;
mod schema;
mod slurm;
mod status;
#[cfg(feature = "cpu")]
mod trial;
mod ui;
mod world;
