//! Layout of the memory file with the logs of one node's recorded processes.
//!
//! The node's agent makes the file and keeps it, so it outlives the processes. It holds in this
//! order, for each process of the node: control words; determinants of its deliveries; the source
//! of each frame that it has received; and a log for each ordered pair of processes. The file is
//! sparse: memory is used only for what was written.
//!
//! What enters: numbers of processes, which count from 0 on the node. What leaves: positions in the
//! file. What may never happen: two parts overlap.

/// Bytes of the control words of one process: a page.
pub const CONTROL_BYTES: usize = 4096;
/// Bytes for the determinants of one process.
pub const DETERMINANTS_BYTES: usize = 1 << 30;
/// Bytes for the sources of the frames that one process has received: one byte each.
pub const SOURCES_BYTES: usize = 1 << 30;
/// Bytes of one log.
pub const LOG_BYTES: usize = 4 << 30;
/// Most processes of a node.
pub const NODE_PROCESSES_MAX: usize = 64;

/// Bytes of the memory file for `processes` processes.
pub const fn file_bytes(processes: usize) -> u64 {
    log_at(processes, processes, 0)
}

/// Position of the control words of a process.
pub const fn control_at(process: usize) -> u64 {
    (process * CONTROL_BYTES) as u64
}

/// Position of the determinants of a process.
pub const fn determinants_at(processes: usize, process: usize) -> u64 {
    control_at(processes) + (process * DETERMINANTS_BYTES) as u64
}

/// Position of the sources of the frames that a process has received.
pub const fn sources_at(processes: usize, process: usize) -> u64 {
    determinants_at(processes, processes) + (process * SOURCES_BYTES) as u64
}

/// Position of the log of one process to another.
pub const fn log_at(processes: usize, from: usize, to: usize) -> u64 {
    sources_at(processes, processes) + ((from * processes + to) * LOG_BYTES) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other() {
        assert_eq!(control_at(1), control_at(0) + CONTROL_BYTES as u64);
        assert_eq!(determinants_at(3, 0), control_at(3));
        assert_eq!(sources_at(3, 0), determinants_at(3, 2) + DETERMINANTS_BYTES as u64);
        assert_eq!(log_at(3, 0, 0), sources_at(3, 2) + SOURCES_BYTES as u64);
        assert_eq!(log_at(3, 1, 0), log_at(3, 0, 2) + LOG_BYTES as u64);
        assert_eq!(file_bytes(3), log_at(3, 2, 2) + LOG_BYTES as u64);
        assert!(file_bytes(NODE_PROCESSES_MAX) < i64::MAX as u64);
    }
}
