//! libfabric unloads a provider when the program ends (`dlclose`), at a time when our threads and
//! thread-local destructors may still have code to run: the library stays mapped.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
