//! The only room with threads, clocks and processes: dispatcher, executor, devices, signals, search, launchers.
