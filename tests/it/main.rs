//! Integration tests: one binary, a module per room.
mod plan;
