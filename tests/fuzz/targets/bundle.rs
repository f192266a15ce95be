//! The byte form of a tokenizer bundle.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::bundle(data));
