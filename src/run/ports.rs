//! A port of its own for each running trial: runners that meet at a fixed one cannot run beside each other.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Mutex, PoisonError};

/// How often another port is asked for where the system names one that a trial has.
const TRIES: usize = 32;

/// Ports that running trials were given.
#[derive(Debug, Default)]
pub(super) struct Ports(Mutex<BTreeSet<u16>>);

/// A port that no other running trial has, until it is dropped.
#[derive(Debug)]
pub(super) struct Port<'p> {
    pub(super) number: u16,
    ports: &'p Ports,
}

impl Ports {
    /// A port that is free now and that no other trial was given; `None` where the system names none.
    pub(super) fn take(&self) -> Option<Port<'_>> {
        let mut given = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Only named here, not kept: the trial is to listen on it.
        let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?.local_addr().ok().map(|address| address.port());
        let number = (0..TRIES).find_map(|_| free().filter(|port| !given.contains(port)))?;
        given.insert(number);
        Some(Port { number, ports: self })
    }
}

impl Drop for Port<'_> {
    fn drop(&mut self) {
        self.ports.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_trials_have_the_same_port_at_once() {
        let ports = Ports::default();
        let taken: Vec<Port<'_>> = (0..50).map(|_| ports.take().unwrap()).collect();
        assert_eq!(taken.iter().map(|port| port.number).collect::<BTreeSet<_>>().len(), 50);
        TcpListener::bind((Ipv4Addr::LOCALHOST, taken[0].number)).unwrap();
        drop(taken);
        assert!(ports.0.lock().unwrap().is_empty());
    }
}
