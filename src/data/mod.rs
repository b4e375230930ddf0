//! Data: from text files, hub data sets and the embedded chain to token blocks. Fetches, tokenises and caches once, before the trials; names no Burn.
