//! Makes the loader initialize the library before every other one, so that effects of their
//! constructors on files are recorded as well.

fn main() {
    // ld(1), "-z initfirst".
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,initfirst");
}
