//! Messages between services, and their plain types.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::wire(data));
