//! Keeps the library mapped after `dlclose`: libfabric unloads a provider when the program ends, at
//! a time when thread-local destructors of threads may still run code of the library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
