//! What a member says of itself in the registry.

use proto::{Capabilities, Error, Role, WorkerEpoch};
use serde::{Deserialize, Serialize};

use crate::Member;

/// A member as it registers: the JSON value of its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// What it does.
    pub role: Role,
    /// `host:port` under which others reach it.
    pub address: String,
    /// This life of it.
    pub epoch: WorkerEpoch,
    /// What it must have in common with others of its model; a router has nothing of the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
}

impl Entry {
    /// What others are told of it.
    pub(super) fn member(&self) -> Member {
        Member { role: self.role, address: self.address.clone() }
    }

    /// Why it cannot work beside another member of its model (invariant I9), by the name of the field.
    pub(super) fn mismatch(&self, other: &Self) -> Option<Error> {
        let (own, others) = (self.capabilities.as_ref()?, other.capabilities.as_ref()?);
        if own.model.name != others.model.name {
            return None;
        }
        let Error { reason, message } = own.mismatch(others)?;
        let (model, role, address) = (&own.model.name, other.role.name(), &other.address);
        let message = format!(
            "{message}, where {role} {address} serves model {model}; \
             expected the same, or another --served-name or prefix of --discovery for what differs"
        );
        Some(Error::new(reason, message))
    }

    /// The key of its registration.
    pub(super) fn key(&self, prefix: &str) -> String {
        format!("{prefix}/{}/{}", self.role.name(), self.address)
    }

    /// The value of its registration.
    pub(super) fn value(&self) -> String {
        serde_json::to_string(self).expect("names, numbers and digits have a JSON form")
    }

    /// Reads a value. One of a later version may have more fields.
    pub(super) fn read(value: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(value).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use proto::worker::PROTOCOL_VERSION;
    use proto::{Digest, KvDtype, KvLayout, ModelDescription};

    use super::*;

    /// What makes a worker one of another kind.
    type Change = fn(&mut Capabilities);

    fn entry() -> Entry {
        let model = ModelDescription {
            name: "m".to_owned(),
            fingerprint: Digest([1; 32]),
            tokenizer: Digest([2; 32]),
            context_len: 100,
            vocab_size: 10,
            numerics: "cpu".to_owned(),
        };
        let layout = KvLayout { layers: 2, kv_heads: 3, head_dim: 4, dtype: KvDtype::F32, block_tokens: 16 };
        let capabilities = Capabilities { protocol: PROTOCOL_VERSION, model, layout };
        Entry {
            role: Role::Decode,
            address: "10.0.0.1:9201".to_owned(),
            epoch: WorkerEpoch(u64::MAX),
            capabilities: Some(capabilities),
        }
    }

    #[test]
    fn an_entry_reads_back() {
        let decode = entry();
        assert_eq!(Entry::read(decode.value().as_bytes()), Ok(decode.clone()));
        assert_eq!(decode.key("a/b"), "a/b/decode/10.0.0.1:9201");
        let router = Entry { role: Role::Router, capabilities: None, ..decode };
        assert_eq!(Entry::read(router.value().as_bytes()), Ok(router.clone()));
        let later = router.value().replacen('{', "{\"zone\":\"b\",", 1);
        assert_eq!(Entry::read(later.as_bytes()), Ok(router));
        assert!(Entry::read(b"{}").unwrap_err().contains("missing field `role`"));
    }

    #[test]
    fn a_mismatch_names_the_field_and_the_member() {
        let refused = |change: Change| {
            let mut other = entry();
            change(other.capabilities.as_mut().unwrap());
            entry().mismatch(&other).map(|error| error.message)
        };
        let cases: [(&str, Change); 7] = [
            ("protocol version: ", |with| with.protocol += 1),
            ("checkpoint fingerprint: ", |with| with.model.fingerprint = Digest([3; 32])),
            ("tokenizer digest: ", |with| with.model.tokenizer = Digest([3; 32])),
            ("layers: 2 here, 5 there", |with| with.layout.layers = 5),
            ("kv_heads: 3 here, 5 there", |with| with.layout.kv_heads = 5),
            ("head_dim: 4 here, 5 there", |with| with.layout.head_dim = 5),
            ("kv_dtype: F32 here, F16 there", |with| with.layout.dtype = KvDtype::F16),
        ];
        for (field, change) in cases {
            let message = refused(change).unwrap();
            assert!(message.starts_with(field), "{message}");
            assert!(message.contains(", where decode 10.0.0.1:9201 serves model m; expected "), "{message}");
        }
        assert_eq!(refused(|_| {}), None);
        assert_eq!(refused(|with| with.layout.block_tokens = 5), None);
        assert_eq!(refused(|with| (with.model.name, with.layout.layers) = ("n".to_owned(), 5)), None);
        let router = Entry { role: Role::Router, capabilities: None, ..entry() };
        assert_eq!(entry().mismatch(&router), None);
    }
}
