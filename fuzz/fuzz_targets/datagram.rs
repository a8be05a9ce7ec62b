#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| landbridge_fuzz::datagram(bytes));
