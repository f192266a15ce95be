//! Whether the process takes work, as its services say it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the services of a process say of themselves. Cheap to clone; all clones are one.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    /// By name: what a service still waits for, `None` when it takes work.
    services: Arc<Mutex<BTreeMap<String, Option<String>>>>,
}

/// What one service says of itself. When this is dropped, the service has ended.
#[derive(Debug)]
#[must_use]
pub struct Standing {
    readiness: Readiness,
    name: String,
}

impl Readiness {
    /// A service begins, and waits for something before it takes work.
    pub fn join(&self, name: &str, waits_for: &str) -> Standing {
        let standing = Standing { readiness: self.clone(), name: name.to_owned() };
        standing.not_ready(waits_for);
        standing
    }

    /// Why the process does not take work: what each of its services waits for. `None` when all take work.
    pub fn obstacle(&self) -> Option<String> {
        let services = self.services();
        if services.is_empty() {
            return Some("no service has started yet".to_owned());
        }
        let obstacles: Vec<String> = services
            .iter()
            .filter_map(|(name, waits_for)| Some(format!("{name}: {}", waits_for.as_ref()?)))
            .collect();
        (!obstacles.is_empty()).then(|| obstacles.join("; "))
    }

    /// Each service, and what it waits for.
    pub(crate) fn all(&self) -> BTreeMap<String, Option<String>> {
        self.services().clone()
    }

    fn services(&self) -> MutexGuard<'_, BTreeMap<String, Option<String>>> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Standing {
    /// The service takes work.
    pub fn ready(&self) {
        self.say(None);
    }

    /// The service takes no work, for that reason.
    pub fn not_ready(&self, waits_for: impl Into<String>) {
        self.say(Some(waits_for.into()));
    }

    /// The service has another name from now on, and what it said last under that.
    pub fn rename(&mut self, name: &str) {
        let mut services = self.readiness.services();
        let said = services.remove(&self.name).flatten();
        services.insert(name.to_owned(), said);
        drop(services);
        name.clone_into(&mut self.name);
    }

    fn say(&self, waits_for: Option<String>) {
        self.readiness.services().insert(self.name.clone(), waits_for);
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.not_ready("has ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_ready_when_all_its_services_are() {
        let readiness = Readiness::default();
        assert_eq!(readiness.obstacle().as_deref(), Some("no service has started yet"));
        let gateway = readiness.join("gateway", "no probe has come back");
        let decode = readiness.join("decode-0", "the model is loading");
        let both = "decode-0: the model is loading; gateway: no probe has come back";
        assert_eq!(readiness.obstacle().as_deref(), Some(both));
        decode.ready();
        assert_eq!(readiness.obstacle().as_deref(), Some("gateway: no probe has come back"));
        gateway.ready();
        assert_eq!(readiness.obstacle(), None);
        let mut decode = decode;
        decode.not_ready("drains");
        decode.rename("prefill-0");
        assert_eq!(readiness.obstacle().as_deref(), Some("prefill-0: drains"));
        drop(decode);
        assert_eq!(readiness.obstacle().as_deref(), Some("prefill-0: has ended"));
    }
}
