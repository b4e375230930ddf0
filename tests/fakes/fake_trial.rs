//! The fake trial program of the process tests: behaves as its parameters say.

fn main() {}
