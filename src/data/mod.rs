//! Data: from text files, hub data sets and the embedded chain to token blocks. Fetches, tokenises and caches once, before the trials; names no Burn.
//!
//! The parent calls [`prepare`] and [`model::resolve`] and passes on what they found; the child calls [`load`] and deals the blocks with [`Dealing`].

mod blocks;
mod cache;
mod error;
mod hub;
mod hub_dataset;
mod load;
pub mod model;
mod model_config;
mod order;
mod prepare;
mod random;
mod synthetic;
mod text;
mod token_file;
mod tokenizer;

pub use blocks::{Blocks, blocks_at};
pub use cache::Cache;
pub use error::DataError;
pub use hub::Hub;
pub use load::{Split, check_enough, counts, load};
pub use order::{Dealing, Epoch};
pub use prepare::{Prepared, prepare};
