//! The engine behind one libfabric endpoint (interface first; the body follows).

pub mod request;
