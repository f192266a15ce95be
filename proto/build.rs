//! Compiles the `.proto` files with protox, so that no protoc is needed. Without the `wire` feature: nothing.

#[cfg(not(feature = "wire"))]
fn main() {}

#[cfg(feature = "wire")]
#[expect(clippy::disallowed_methods, reason = "cargo tells a build script its paths by environment")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use prost::Message as _;

    println!("cargo::rerun-if-changed=proto");
    let own =
        ["types", "worker", "router", "generation", "operators"].map(|name| format!("baton/v1/{name}.proto"));
    let kserve = ["model_config", "grpc_service"].map(|name| format!("inference/{name}.proto"));
    let descriptors = protox::compile(own.into_iter().chain(kserve), ["proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("baton.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .codec_path("crate::codec::LeanCodec")
        .bytes(".baton.v1.KvBlock.slabs")
        .bytes(".baton.v1.TokenizerChunk.bytes")
        .bytes(".inference.InferTensorContents.bytes_contents")
        .bytes(".inference.ModelInferRequest.raw_input_contents")
        .bytes(".inference.ModelInferResponse.raw_output_contents")
        .compile_fds(descriptors)?;
    Ok(())
}
