//! Where the processes of this job can be reached, as the file of this node's logs says, and the
//! bells by which this agent and the ranks of this node wake each other.
//!
//! In: contacts that ranks of this node have written, and those that other agents have sent. Out:
//! contacts for other nodes; rings. What may never happen: an older contact replaces a newer one.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};
use landbridge_proto::log::contact::{CONTACT_BYTES, Contact, agent_bell};
use landbridge_proto::log::layout::{
    AGENT_BELL_AT, BELL_AT, CONTACTS_CHANGED_AT, LOGGED_PROCESSES_MAX, contact_at, control_at,
};
use rustix::io::{pread, pwrite};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recv,
    sendto, socket_with,
};

use crate::agent::log_region::LogFiles;
use crate::sys;

/// What this node knows of where processes can be reached.
pub struct NodeContacts {
    files: Rc<LogFiles>,
    job: String,
    /// Becomes readable when a rank of this node has written its contact, or wants something else.
    bell: OwnedFd,
    /// The generations of the contacts that other nodes know, by process of this node.
    announced: RefCell<BTreeMap<u32, u32>>,
    /// Number of contacts that were written into the file.
    noted: Cell<u64>,
}

impl NodeContacts {
    /// Nothing is known. The bell of this agent is open, and the file says how it is named.
    pub fn new(job: &str, files: Rc<LogFiles>) -> Result<NodeContacts> {
        let number = u64::from_str_radix(&sys::random_hex(16)?, 16)?;
        pwrite(&files.memory, &number.to_ne_bytes(), AGENT_BELL_AT)?;
        let bell = open_bell(&agent_bell(job.as_bytes(), number))
            .context("no socket by which ranks say where they can be reached")?;
        Ok(NodeContacts {
            files,
            job: job.to_owned(),
            bell: sys::out_of_the_way(bell),
            announced: RefCell::default(),
            noted: Cell::default(),
        })
    }

    /// The socket that becomes readable when a rank has written its contact, or wants something
    /// else.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Lets the bell be silent until a rank rings again.
    pub(super) fn silence_bell(&self) {
        while recv(&self.bell, &mut [0; 8][..], RecvFlags::DONTWAIT).is_ok() {}
    }

    /// The contacts of these ranks of this node that other nodes do not know yet.
    pub(super) fn take_unannounced(&self, local: &BTreeSet<u32>) -> Vec<(u32, Vec<u8>)> {
        let mut announced = self.announced.borrow_mut();
        let mut take = |rank: u32| {
            let contact = self.contact_of(rank)?;
            let before = announced.insert(rank, contact.generation);
            (before != Some(contact.generation)).then(|| (rank, contact.emit().to_vec()))
        };
        local.iter().filter_map(|process| take(*process)).collect()
    }

    /// Notes the contact of a rank of another node, unless a newer one is known.
    pub(super) fn note_contact(&self, rank: u32, contact: &[u8]) -> Result<()> {
        let contact = contact.try_into().ok().and_then(Contact::parse);
        let contact = contact.context("it is damaged")?;
        anyhow::ensure!((rank as usize) < LOGGED_PROCESSES_MAX, "there is no such rank");
        let known = self.contact_of(rank).map_or(0, |known| known.generation);
        if contact.generation <= known {
            return Ok(());
        }
        pwrite(&self.files.memory, &contact.emit(), contact_at(rank as usize))?;
        self.note_change()
    }

    /// Lets ranks look at contacts and mailboxes.
    pub fn note_change(&self) -> Result<()> {
        self.noted.set(self.noted.get() + 1);
        pwrite(&self.files.memory, &self.noted.get().to_ne_bytes(), CONTACTS_CHANGED_AT)?;
        Ok(())
    }

    /// Whether ranks of other nodes are known.
    pub fn knows_other_nodes(&self) -> bool {
        self.noted.get() > 0
    }

    /// Where a process can be reached, if it is known.
    pub fn contact_of(&self, rank: u32) -> Option<Contact> {
        let mut bytes = [0; CONTACT_BYTES];
        let read = pread(&self.files.memory, &mut bytes, contact_at(rank as usize)).ok()?;
        Contact::parse(&bytes).filter(|_| read == CONTACT_BYTES)
    }

    /// Wakes a rank, if it sleeps.
    pub fn ring(&self, rank: u32) -> Result<()> {
        let number = self.files.word(control_at(rank as usize) + BELL_AT as u64);
        let bell = format!("landbridge-{}-{rank}-{number}", self.job);
        let bell = SocketAddrUnix::new_abstract_name(bell.as_bytes())?;
        // A full socket means that the bell was rung; no socket, that nobody waits.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendto(&self.bell, b"!", flags, &bell);
        Ok(())
    }
}

fn open_bell(name: &[u8]) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let bell = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    bind(&bell, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(bell)
}

#[cfg(test)]
mod tests {
    use super::super::tests::logs;
    use super::*;

    #[test]
    fn contacts_of_this_node_are_announced_once_and_those_of_others_noted() {
        let logs = logs(0..2);
        let contact = |generation| Contact { generation, name: [generation as u8; 48] };
        pwrite(&logs.files.memory, &contact(1).emit(), contact_at(1)).unwrap();
        assert_eq!(logs.take_contacts(), [(1, contact(1).emit().to_vec())]);
        assert_eq!(logs.take_contacts(), []);
        pwrite(&logs.files.memory, &contact(2).emit(), contact_at(1)).unwrap();
        assert_eq!(logs.take_contacts(), [(1, contact(2).emit().to_vec())]);
        logs.note_contact(2, &contact(5).emit()).unwrap();
        logs.note_contact(2, &contact(4).emit()).unwrap();
        logs.note_contact(1, &contact(9).emit()).unwrap();
        assert_eq!(
            (logs.contacts.contact_of(2), logs.contacts.contact_of(1)),
            (Some(contact(5)), Some(contact(2)))
        );
        assert_eq!(logs.word(CONTACTS_CHANGED_AT), 1);
        let beyond = LOGGED_PROCESSES_MAX as u32;
        assert!(logs.note_contact(beyond, &contact(1).emit()).is_err());
        assert!(logs.note_contact(2, &[7; 64]).is_err());
    }
}
