//! What a model is computed on.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The best that is there.
    Auto,
    /// The processor.
    Cpu,
    /// A GPU by CUDA.
    Cuda,
    /// A GPU by Metal.
    Metal,
    /// A GPU by Vulkan.
    Vulkan,
    /// A GPU by ROCm.
    Rocm,
    /// A device by OpenCL.
    OpenCl,
}

/// Each kind with its name.
const KINDS: [(DeviceKind, &str); 7] = [
    (DeviceKind::Auto, "auto"),
    (DeviceKind::Cpu, "cpu"),
    (DeviceKind::Cuda, "cuda"),
    (DeviceKind::Metal, "metal"),
    (DeviceKind::Vulkan, "vulkan"),
    (DeviceKind::Rocm, "rocm"),
    (DeviceKind::OpenCl, "opencl"),
];

/// A device, of which there may be several of a kind. As text its kind's name, and perhaps a colon and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Device {
    /// Which kind.
    pub kind: DeviceKind,
    /// Which of them, from 0.
    pub number: u32,
}

impl Default for Device {
    fn default() -> Self {
        Self { kind: DeviceKind::Auto, number: 0 }
    }
}

impl Device {
    /// Refuses what no worker of this build computes on.
    ///
    /// # Errors
    /// An option error that says what there is.
    pub(crate) fn check(self) -> Result<(), node::Error> {
        match self.kind {
            DeviceKind::Auto | DeviceKind::Cpu if self.number == 0 => Ok(()),
            // Whether there is one is seen when the model is loaded.
            DeviceKind::Cuda => Ok(()),
            _ => {
                let message = format!("{self} is not there; this build computes on cpu and cuda");
                Err(node::Error::option("device", message))
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(kind, _)| *kind == self.kind).map_or("auto", |(_, name)| name);
        if self.number == 0 { f.write_str(name) } else { write!(f, "{name}:{}", self.number) }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, number) = text.split_once(':').unwrap_or((text, "0"));
        let kind = KINDS.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind);
        kind.zip(number.parse().ok()).map(|(kind, number)| Self { kind, number }).ok_or_else(|| {
            let names = KINDS.map(|(_, name)| name).join(", ");
            format!("expected one of {names}, perhaps with a number as in cuda:0; got {text:?}")
        })
    }
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        device.to_string()
    }
}

impl TryFrom<String> for Device {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_read_as_they_print() {
        for (kind, name) in KINDS {
            let device = Device { kind, number: 0 };
            assert_eq!((device.to_string().as_str(), name.parse()), (name, Ok(device)));
            let third = Device { kind, number: 3 };
            assert_eq!(third.to_string().parse(), Ok(third));
        }
        assert_eq!("cuda:0".parse(), "cuda".parse::<Device>());
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", ":0", "cuda:0:1"] {
            let error = wrong.parse::<Device>().unwrap_err();
            assert!(
                error.contains("expected one of auto, cpu, cuda, metal, vulkan, rocm, opencl"),
                "{error}"
            );
        }
    }

    #[test]
    fn only_processors_and_cuda_are_there() {
        for there in ["auto", "cpu", "cpu:0", "cuda", "cuda:1"] {
            there.parse::<Device>().unwrap().check().unwrap();
        }
        for missing in ["metal", "vulkan", "rocm", "opencl", "cpu:1", "auto:1"] {
            let error = missing.parse::<Device>().unwrap().check().unwrap_err().to_string();
            assert_eq!(error, format!("device: {missing} is not there; this build computes on cpu and cuda"));
        }
    }
}
