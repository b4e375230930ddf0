//! Which GPUs `CUDA_VISIBLE_DEVICES` leaves visible, by the CUDA runtime's own rules. Pure.

use super::GpuDevice;

/// What is left visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    /// In the variable's order.
    pub devices: Vec<GpuDevice>,
    /// Why devices are hidden, a sentence each.
    pub reasons: Vec<String>,
}

/// Applies `variable` (`None` where it is not set) to `devices`.
///
/// As in CUDA: numbers count devices by PCI bus id, whatever order they were listed in; UUIDs may be cut short as long as they are unambiguous; the
/// first entry that names nothing (`-1` is one on purpose) hides itself and everything after it; a device named twice hides all. A GPU in MIG mode
/// stands for its first instance.
pub fn visible_devices(devices: &[GpuDevice], variable: Option<&str>) -> Visible {
    let mut by_bus: Vec<&GpuDevice> = devices.iter().collect();
    by_bus.sort_by_key(|device| device.pci_bus_id.as_ref().map(|bus_id| bus_id.to_ascii_lowercase()));
    let Some(variable) = variable else {
        return Visible { devices: by_bus.into_iter().map(|device| first_instance(device).clone()).collect(), reasons: Vec::new() };
    };
    let shown = format!("CUDA_VISIBLE_DEVICES=\"{variable}\"");
    let mut visible = Visible::default();
    for entry in variable.split(',').map(str::trim) {
        match named(&by_bus, entry) {
            Ok(device) if visible.devices.iter().any(|other| other.uuid == device.uuid) => {
                return Visible { devices: Vec::new(), reasons: vec![format!("{shown} names {} twice, so CUDA sees no device.", device.uuid)] };
            }
            Ok(device) => visible.devices.push(device.clone()),
            Err(reason) => {
                if let Some(reason) = reason {
                    visible.reasons.push(format!("{shown}: {reason}; it and what follows it are hidden."));
                }
                break;
            }
        }
    }
    let hidden = devices.len().saturating_sub(visible.devices.len());
    if visible.devices.is_empty() && hidden > 0 {
        visible.reasons.push(format!("{shown} hides every GPU."));
    }
    visible
}

/// The device an entry names, or why there is none; no reason where the entry ends the list on purpose.
fn named<'a>(by_bus: &[&'a GpuDevice], entry: &str) -> Result<&'a GpuDevice, Option<String>> {
    if entry.is_empty() || entry == "-1" {
        return Err(None);
    }
    if let Ok(index) = entry.parse::<usize>() {
        return by_bus.get(index).map(|device| first_instance(device)).ok_or_else(|| Some(format!("there is no GPU {index}")));
    }
    if !entry.starts_with("GPU-") && !entry.starts_with("MIG-") {
        return Err(Some(format!("`{entry}` is neither a number nor a UUID")));
    }
    let instances = by_bus.iter().flat_map(|device| &device.mig_instances);
    let mut matching = by_bus.iter().copied().chain(instances).filter(|device| starts_with_ignoring_case(&device.uuid, entry));
    match (matching.next(), matching.next()) {
        (Some(device), None) => Ok(first_instance(device)),
        (Some(first), Some(_)) if first.uuid.eq_ignore_ascii_case(entry) => Ok(first_instance(first)),
        (Some(_), Some(_)) => Err(Some(format!("`{entry}` fits more than one device"))),
        (None, _) => Err(Some(format!("there is no device `{entry}`"))),
    }
}

fn first_instance(device: &GpuDevice) -> &GpuDevice {
    device.mig_instances.first().unwrap_or(device)
}

fn starts_with_ignoring_case(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

#[cfg(test)]
mod tests {
    use super::{GpuDevice, visible_devices};

    fn gpu(uuid: &str, bus: &str) -> GpuDevice {
        GpuDevice { uuid: uuid.into(), name: "Fake".into(), pci_bus_id: Some(bus.into()), mig_instances: Vec::new() }
    }

    /// Four GPUs, listed by the library in another order than their bus ids; the last is in MIG mode.
    fn machine() -> Vec<GpuDevice> {
        let instances = vec![gpu("MIG-11aa", ""), gpu("MIG-22bb", "")];
        vec![
            gpu("GPU-cccc", "00000000:3B:00.0"),
            gpu("GPU-aaaa", "00000000:17:00.0"),
            GpuDevice { mig_instances: instances, ..gpu("GPU-dddd", "00000000:ca:00.0") },
            gpu("GPU-aabb", "00000000:1A:00.0"),
        ]
    }

    /// CASES 25.
    #[test]
    fn cuda_visible_devices_is_read_as_cuda_reads_it() {
        for (variable, uuids, reasons) in [
            (None, &["GPU-aaaa", "GPU-aabb", "GPU-cccc", "MIG-11aa"][..], &[][..]),
            (Some(""), &[], &["CUDA_VISIBLE_DEVICES=\"\" hides every GPU."]),
            (Some("-1"), &[], &["CUDA_VISIBLE_DEVICES=\"-1\" hides every GPU."]),
            (Some("2,3"), &["GPU-cccc", "MIG-11aa"], &[]),
            (Some("1,0"), &["GPU-aabb", "GPU-aaaa"], &[]),
            (Some(" 1 , 0 "), &["GPU-aabb", "GPU-aaaa"], &[]),
            (Some("0,-1,1"), &["GPU-aaaa"], &[]),
            (Some("0,7,1"), &["GPU-aaaa"], &["CUDA_VISIBLE_DEVICES=\"0,7,1\": there is no GPU 7; it and what follows it are hidden."]),
            (Some("GPU-cccc"), &["GPU-cccc"], &[]),
            (Some("GPU-cc,0"), &["GPU-cccc", "GPU-aaaa"], &[]),
            (Some("GPU-aaa"), &["GPU-aaaa"], &[]),
            (
                Some("GPU-aa"),
                &[],
                &[
                    "CUDA_VISIBLE_DEVICES=\"GPU-aa\": `GPU-aa` fits more than one device; it and what follows it are hidden.",
                    "CUDA_VISIBLE_DEVICES=\"GPU-aa\" hides every GPU.",
                ],
            ),
            (Some("MIG-22BB"), &["MIG-22bb"], &[]),
            (Some("GPU-dddd"), &["MIG-11aa"], &[]),
            (Some("1,1"), &[], &["CUDA_VISIBLE_DEVICES=\"1,1\" names GPU-aabb twice, so CUDA sees no device."]),
            (
                Some("0,card"),
                &["GPU-aaaa"],
                &["CUDA_VISIBLE_DEVICES=\"0,card\": `card` is neither a number nor a UUID; it and what follows it are hidden."],
            ),
            (
                Some("GPU-zz"),
                &[],
                &[
                    "CUDA_VISIBLE_DEVICES=\"GPU-zz\": there is no device `GPU-zz`; it and what follows it are hidden.",
                    "CUDA_VISIBLE_DEVICES=\"GPU-zz\" hides every GPU.",
                ],
            ),
        ] {
            let visible = visible_devices(&machine(), variable);
            let found: Vec<&str> = visible.devices.iter().map(|device| device.uuid.as_str()).collect();
            assert_eq!(found, uuids, "{variable:?}");
            assert_eq!(visible.reasons, reasons, "{variable:?}");
        }
    }

    #[test]
    fn a_machine_without_gpus_hides_nothing() {
        assert_eq!(visible_devices(&[], Some("")), super::Visible::default());
    }

    #[test]
    fn a_multibyte_entry_is_no_uuid_and_no_panic() {
        assert!(visible_devices(&machine(), Some("GPU-\u{e9}\u{e9}")).devices.is_empty());
    }
}
