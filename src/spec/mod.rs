//! The sweep file: from the TOML as written to what it means. Pure: no files, no clocks, no devices.

pub mod plan;
pub mod settings;
