//! How messages are buffered on their way.

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstCodec;

/// Room of a stream's buffer to begin with, bytes: enough for some tokens. tonic's own is 8 KiB, and every open stream has
/// one of each direction; a larger message makes room for itself.
const BUFFER_BYTES: usize = 256;
/// From so many bytes on what is written is handed on; tonic's own.
const YIELD_BYTES: usize = 32 << 10;

/// prost's codec with small buffers.
#[derive(Clone, Debug)]
pub struct LeanCodec<T, U>(std::marker::PhantomData<(T, U)>);

impl<T, U> Default for LeanCodec<T, U> {
    fn default() -> Self {
        Self(std::marker::PhantomData)
    }
}

impl<T, U> Codec for LeanCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = <ProstCodec<T, U> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BUFFER_BYTES, YIELD_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER_BYTES, YIELD_BYTES))
    }
}
