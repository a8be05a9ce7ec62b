//! Has the library initialised before every other one, so that what their constructors do to files is seen as well.

fn main() {
    // ld(1), "-z initfirst".
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,initfirst");
}
