//! Whether a trial gave the memory of its GPUs back. A device whose memory does not return would fail the next trial for a reason that is not its own.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::telemetry::GpuLibrary;
use crate::trial::UnreturnedMemory;

/// A driver keeps some memory for itself once it has been used.
const TOLERANCE_BYTES: u64 = 64 << 20;
/// How long a driver may take to clean up after a process, and how often it is asked.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(200);

/// The least memory that was seen in use on each idle device, by UUID.
#[derive(Debug, Default)]
pub(super) struct Baselines(Mutex<BTreeMap<String, u64>>);

impl Baselines {
    /// Looks at `devices` before a trial is started on them. A device that does not say what is in use is not watched.
    pub(super) fn note(&self, devices: &[String], library: &dyn GpuLibrary) {
        let mut least = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for device in devices {
            if let Some(used) = used_bytes(library, device) {
                least.entry(device.clone()).and_modify(|known| *known = used.min(*known)).or_insert(used);
            }
        }
    }

    /// Those of `devices` whose memory does not return after a trial has ended, however long the driver is given. `pause` waits.
    pub(super) fn unreturned(&self, devices: &[String], library: &dyn GpuLibrary, mut pause: impl FnMut(Duration)) -> Vec<UnreturnedMemory> {
        let least = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut waited = Duration::ZERO;
        loop {
            let kept = |device: &String| {
                let bytes = used_bytes(library, device)?.saturating_sub(*least.get(device)?);
                (bytes > TOLERANCE_BYTES).then(|| UnreturnedMemory { device: device.clone(), bytes })
            };
            let unreturned: Vec<UnreturnedMemory> = devices.iter().filter_map(kept).collect();
            if unreturned.is_empty() || waited >= PATIENCE {
                return unreturned;
            }
            pause(PAUSE);
            waited += PAUSE;
        }
    }
}

fn used_bytes(library: &dyn GpuLibrary, device: &str) -> Option<u64> {
    library.read(device).memory.ok()?.used
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::telemetry::{GpuDevice, GpuError, GpuMemory, GpuReading};

    /// Says in turn what is in use; the last word for ever.
    struct Script(Mutex<BTreeMap<&'static str, Vec<Option<u64>>>>);

    impl GpuLibrary for Script {
        fn devices(&self) -> Result<Vec<Result<GpuDevice, GpuError>>, GpuError> {
            Ok(Vec::new())
        }

        fn read(&self, uuid: &str) -> GpuReading {
            let mut script = self.0.lock().unwrap();
            let words = script.get_mut(uuid).unwrap();
            let used = if words.len() > 1 { words.remove(0) } else { words[0] };
            GpuReading { memory: Ok(GpuMemory { used, total: Some(16 << 30) }), ..GpuReading::failed(&GpuError::NotAvailable("no".into())) }
        }
    }

    /// Case 26.
    #[test]
    fn memory_that_does_not_return_is_told_from_memory_that_returns_late() {
        let mib = |mib: u64| Some(mib << 20);
        let script = Script(Mutex::new(BTreeMap::from([
            ("at once", vec![mib(300), mib(340)]),
            ("late", vec![mib(300), mib(9000), mib(9000), mib(300)]),
            ("never", vec![mib(300), mib(9000)]),
            ("silent", vec![mib(300), None]),
            ("always silent", vec![None]),
        ])));
        let devices: Vec<String> = ["at once", "late", "never", "silent", "always silent"].map(str::to_owned).into();
        let baselines = Baselines::default();
        baselines.note(&devices, &script);
        let waited = Cell::new(Duration::ZERO);
        let unreturned = baselines.unreturned(&devices, &script, |pause| waited.set(waited.get() + pause));
        assert_eq!(unreturned, [UnreturnedMemory { device: "never".to_owned(), bytes: 8700 << 20 }]);
        assert_eq!(waited.get(), PATIENCE);
        // What is left over once does not become what is expected.
        baselines.note(&devices, &script);
        assert_eq!(baselines.unreturned(&devices[2..3], &script, |_| ()).len(), 1);
        assert_eq!(baselines.unreturned(&[], &script, |_| panic!("nothing to wait for")), []);
    }
}
