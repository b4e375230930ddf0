//! `sweep` decides by measurement how to fine-tune language models with fully sharded data parallelism (FSDP).
//!
//! Data flows one way: a sweep file ([`spec`]) becomes configurations, [`run`] turns them into trials and starts one child process each,
//! the child ([`train`]) appends messages ([`protocol`]), their endings are classified ([`trial`]), and [`report`] reads the results folder
//! ([`store`]) alone. Work emits events ([`event`]); only [`ui`] prints.

pub mod cli;
pub mod commands;
pub mod data;
pub mod error;
pub mod event;
pub mod format;
pub mod place;
pub mod protocol;
pub mod report;
pub mod run;
pub mod spec;
pub mod store;
pub mod telemetry;
#[cfg(feature = "cpu")]
pub mod train;
pub mod trial;
pub mod ui;
