//! Where the processes of a job can be reached that keep message logs: an entry of each in the
//! memory file of each node.
//!
//! A process writes its own entry when it opens its transport to other nodes. Its agent sends the
//! entry to the agents of all nodes, which write it into their files. Writers use pwrite(2), which
//! need not write an entry at once: an entry counts if its checksum is right.
//!
//! What enters: entries, or bytes. What leaves: bytes, or entries. What may never happen: half an
//! entry is taken for an entry.

use alloc::format;
use alloc::vec::Vec;

use crate::wire::name::{NAME_BYTES, Name};

/// Bytes of an entry.
pub const CONTACT_BYTES: usize = 64;
/// A process that has moved to another node numbers its transports from the next multiple on: what
/// it had on its last node is lost. With an image each second a process opens as many transports on
/// a node in half a year; and it may move 255 times.
pub const GENERATIONS_PER_NODE: u32 = 1 << 24;

/// How a process can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contact {
    /// The number of the transport, counted over all incarnations of the process from 1 on. The
    /// last number of a node ([`GENERATIONS_PER_NODE`]): the process has ended there, and counts
    /// as ended until it has moved.
    pub generation: u32,
    /// The name of the transport's endpoint.
    pub name: [u8; NAME_BYTES],
}

impl Contact {
    /// How often the process had moved to another node when it opened a transport of this
    /// generation.
    pub fn moves(generation: u32) -> u32 {
        generation / GENERATIONS_PER_NODE
    }

    /// The entry of a process that has ended after it has moved so many times. It counts after all
    /// transports on that node, and before those of a node to which the process moves later.
    pub fn ended(moves: u32) -> Contact {
        let first = moves * GENERATIONS_PER_NODE;
        Contact { generation: first + (GENERATIONS_PER_NODE - 1), name: [0; NAME_BYTES] }
    }

    /// The generation of the next transport of a process. `before`: of its last one, or 0; `moves`:
    /// how often the process has moved. `None`: there are no more.
    pub fn next_generation(before: u32, moves: u32) -> Option<u32> {
        let next = before.max(moves.checked_mul(GENERATIONS_PER_NODE)?).checked_add(1)?;
        (Contact::moves(next) == moves && !Contact::is_of_ended(next)).then_some(next)
    }

    /// The number of the endpoint of a process's next transport, which has this generation. `last`:
    /// the newest contact of the process that is known. Others may still send to the endpoints of
    /// the last transports, so the number is the next one; and behind the last transport on another
    /// node, of which newer ones may not be known, one that is far from it.
    pub fn next_endpoint(last: Option<&Contact>, generation: u32) -> u8 {
        const FAR: u32 = 100;
        let moves = Contact::moves(generation);
        let known = last.and_then(|last| Some((last, Name::parse(&last.name).ok()?.address)));
        let number = match known {
            Some((last, address)) => {
                let is_here = Contact::moves(last.generation) == moves;
                u32::from(address.endpoint()) + if is_here { 0 } else { FAR }
            }
            None => generation % GENERATIONS_PER_NODE + moves * FAR,
        };
        (number % u32::from(u8::MAX)) as u8 + 1
    }

    /// Whether a generation is that of [`Contact::ended`].
    pub fn is_of_ended(generation: u32) -> bool {
        generation % GENERATIONS_PER_NODE == GENERATIONS_PER_NODE - 1
    }

    /// The bytes of the entry: generation, name, zeros, checksum.
    pub fn emit(&self) -> [u8; CONTACT_BYTES] {
        let mut bytes = [0; CONTACT_BYTES];
        bytes[..4].copy_from_slice(&self.generation.to_le_bytes());
        bytes[4..4 + NAME_BYTES].copy_from_slice(&self.name);
        let sum = checksum(&bytes[..CONTACT_BYTES - 8]);
        bytes[CONTACT_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads an entry. `None`: nothing was written yet, or the entry is being written.
    pub fn parse(bytes: &[u8; CONTACT_BYTES]) -> Option<Contact> {
        let (content, sum) = bytes.split_at(CONTACT_BYTES - 8);
        let generation = u32::from_le_bytes([content[0], content[1], content[2], content[3]]);
        if generation == 0 || sum != checksum(content).to_le_bytes() {
            return None;
        }
        let mut name = [0; NAME_BYTES];
        name.copy_from_slice(&content[4..4 + NAME_BYTES]);
        Some(Contact { generation, name })
    }
}

/// The abstract name of the Unix socket that wakes the agent of a node. `job`: the name of the job.
/// `number`: the agent's, which is in its file.
pub fn agent_bell(job: &[u8], number: u64) -> Vec<u8> {
    [b"landbridge-", job, format!("-agent-{number:x}").as_bytes()].concat()
}

/// FNV-1a with 64 bits: the entry is not secret, and only an incomplete write is to be detected.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |state: u64, byte: &u8| (state ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;
    use crate::id::{Address, ClusterId};
    use crate::wire::name::FURTHER_MAX;

    #[test]
    fn an_entry_is_read_as_it_was_written_and_no_part_of_it() {
        let (old, new) = (
            Contact { generation: 3, name: [7; NAME_BYTES] },
            Contact { generation: 4, name: [9; NAME_BYTES] },
        );
        assert_eq!(Contact::parse(&old.emit()), Some(old));
        let ended = Contact::ended(2);
        assert_eq!(Contact::parse(&ended.emit()), Some(ended));
        assert_eq!(Contact::parse(&[0; CONTACT_BYTES]), None);
        for written in 1..CONTACT_BYTES {
            let mut bytes = old.emit();
            bytes[..written].copy_from_slice(&new.emit()[..written]);
            let read = Contact::parse(&bytes);
            assert!(read.is_none() || bytes == old.emit() || bytes == new.emit(), "{written}");
        }
    }
    #[test]
    fn a_process_has_ended_until_it_has_moved() {
        for moves in [0, 1, 255] {
            let ended = Contact::ended(moves).generation;
            assert!(Contact::is_of_ended(ended));
            assert_eq!(Contact::moves(ended), moves);
            assert!(!Contact::is_of_ended(ended - 1));
        }
        let next = Contact::next_generation(Contact::ended(0).generation, 1).unwrap();
        assert!(next > Contact::ended(0).generation && Contact::moves(next) == 1);
    }

    #[test]
    fn the_endpoint_of_a_transport_is_none_of_the_last_ones() {
        let contact = |generation, endpoint| {
            let name = Name {
                address: Address::new(7, endpoint),
                unique: 0,
                cluster: ClusterId(0),
                node: 5,
                ip: [0; 16],
                further: [[0; 4]; FURTHER_MAX],
                port: 0,
            };
            Contact { generation, name: name.emit() }
        };
        let next = |last: &Contact, moves| {
            let generation = Contact::next_generation(last.generation, moves).unwrap();
            contact(generation, Contact::next_endpoint(Some(last), generation))
        };
        let endpoint = |contact: &Contact| Name::parse(&contact.name).unwrap().address.endpoint();
        let mut all = vec![contact(1, Contact::next_endpoint(None, 1))];
        for number in 1..1_000 {
            // The process moves each 300 transports.
            all.push(next(&all[number - 1], number as u32 / 300));
        }
        for (place, one) in all.iter().enumerate() {
            let last = &all[place.saturating_sub(100)..place];
            assert!(endpoint(one) > 0 && last.iter().all(|it| endpoint(it) != endpoint(one)));
        }
        let ended = Contact::ended(0);
        let moved = Contact::next_generation(ended.generation, 1).unwrap();
        assert_eq!(Contact::next_endpoint(Some(&ended), moved), 102);
    }

    #[test]
    fn a_process_that_has_used_all_numbers_opens_no_transport() {
        assert_eq!(Contact::next_generation(0, 0), Some(1));
        assert_eq!(Contact::next_generation(7, 0), Some(8));
        assert_eq!(Contact::next_generation(7, 2), Some(2 * GENERATIONS_PER_NODE + 1));
        let last = Contact::ended(0).generation - 1;
        assert_eq!(Contact::next_generation(last - 1, 0), Some(last));
        assert_eq!(Contact::next_generation(last, 0), None);
        assert_eq!(Contact::next_generation(last + 1, 0), None, "that of the next node");
        assert_eq!(Contact::next_generation(0, 256), None);
    }
}
