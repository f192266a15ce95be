//! Bodies of TGI's routes.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| baton_fuzz::json_tgi(data));
