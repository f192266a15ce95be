//! Any bytes that decode as a message are a plain value that survives the wire, or an error that names the field.

use gateway::fuzzing::take_grpc;
use prost::Message;
use proto::{
    Error, Generation, Handoff, KvLayout, ModelDescription, Placed, Reason, Token, WorkerDescription,
    wire as messages,
};

use crate::{front, model};

/// The messages between services; the first byte chooses which.
pub fn wire(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    match kind % 8 {
        0 => round_trip::<messages::Generation, Generation>(bytes),
        1 => round_trip::<messages::Token, Token>(bytes),
        2 => round_trip::<messages::Placed, Placed>(bytes),
        3 => round_trip::<messages::KvLayout, KvLayout>(bytes),
        4 => round_trip::<messages::Handoff, Handoff>(bytes),
        5 => round_trip::<messages::ModelDescription, ModelDescription>(bytes),
        6 => round_trip::<messages::DescribeResponse, WorkerDescription>(bytes),
        _ => status(bytes),
    }
}

/// The public service's request, as far as admission.
pub fn grpc_request(data: &[u8]) {
    let Ok(message) = messages::GenerateRequest::decode(data) else { return };
    match take_grpc(message, model::model()) {
        Ok((request, generation)) => {
            front::in_range(&request);
            front::fits(&request, &generation);
        }
        Err(error) => named(&error),
    }
}

fn round_trip<M, P>(bytes: &[u8])
where
    M: Message + Default + From<P>,
    P: TryFrom<M, Error = Error> + Clone + std::fmt::Debug,
{
    let Ok(message) = M::decode(bytes) else { return };
    match P::try_from(message) {
        Ok(plain) => {
            // Compared as bytes: a float that is no number is not equal to itself.
            let sent = M::from(plain.clone()).encode_to_vec();
            let received = M::decode(sent.as_slice()).expect("what was encoded decodes");
            let again = P::try_from(received).expect("what was plain is plain again");
            assert_eq!(M::from(again).encode_to_vec(), sent, "{plain:?}");
        }
        Err(error) => named(&error),
    }
}

fn named(error: &Error) {
    assert_eq!(error.reason, Reason::InvalidArgument, "{error}");
    let (field, expected) = error.message.split_once(": ").expect("an error names its field");
    assert!(
        !expected.is_empty()
            && field.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._[]".contains(&byte)),
        "{error}"
    );
}

/// Any code and message of a transport is an error, and an error of ours survives a status.
fn status(bytes: &[u8]) {
    let Some(([code, reason], message)) = bytes.split_first_chunk() else { return };
    let message = String::from_utf8_lossy(message);
    let bare = tonic::Status::new(tonic::Code::from(i32::from(*code)), message.clone());
    assert_eq!(Error::from(bare).message, message);
    let reason = Reason::ALL[usize::from(*reason) % Reason::ALL.len()];
    let error = Error::new(reason, message);
    assert_eq!(Error::from(tonic::Status::from(error.clone())), error);
}
