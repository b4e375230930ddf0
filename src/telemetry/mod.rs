//! Samplers of devices and host behind one trait. No threads of its own.
