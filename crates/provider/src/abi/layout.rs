//! Tests of the layouts of `abi`, against written numbers and against the headers of this machine.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;

/// A C expression, and its value in this crate.
type Fact = (&'static str, usize);

const HEADERS: &str = "/usr/include/rdma/fabric.h";

/// Sizes that do not depend on the release (64-bit).
#[test]
fn sizes_are_as_written_down() {
    assert_eq!(size_of::<Fid>(), 24);
    assert_eq!(size_of::<FidFabric>(), 40);
    assert_eq!(size_of::<FidDomain>(), 40);
    assert_eq!(size_of::<FidEp>(), 80);
    assert_eq!(size_of::<FidMr>(), 40);
    assert_eq!(size_of::<Info>(), 120);
    assert_eq!(size_of::<TxAttr>(), 80);
    assert_eq!(size_of::<RxAttr>(), 64);
    assert_eq!(size_of::<EpAttr>(), 96);
    assert_eq!(size_of::<DomainAttrBase>(), 192);
    assert_eq!(size_of::<DomainAttr>(), 224);
    assert_eq!(size_of::<FabricAttr>(), 32);
    assert_eq!(size_of::<CqTaggedEntry>(), 48);
    assert_eq!(size_of::<CqErrEntry>(), 88);
    assert_eq!(offset_of!(CqErrEntry, src_addr), 80);
    assert_eq!(offset_of!(CqErrEntry, err_data_size), 72);
    assert_eq!(size_of::<EqErrEntry>(), 48);
    assert_eq!(size_of::<Provider>(), 72);
    assert_eq!(size_of::<OpsAtomic>(), 14 * 8);
    assert_eq!(size_of::<OpsAv>(), 11 * 8);
}

/// The newer fields of a domain's attributes follow the fields of 1.17 as in C.
#[test]
fn the_newest_domain_attributes_extend_the_oldest() {
    assert_eq!(offset_of!(DomainAttr, max_ep_auth_key), size_of::<DomainAttrBase>());
    assert_eq!(offset_of!(DomainAttr, max_cntr_value), 208);
}

#[test]
fn layouts_are_those_of_the_installed_headers() {
    if !Path::new(HEADERS).exists() {
        println!("skipped: no libfabric headers here (apt install libfabric-dev)");
        return;
    }
    let Some(output) = compile_and_run(&program()) else {
        println!("skipped: no C compiler here (apt install gcc)");
        return;
    };
    let values = output.lines().map(|line| line.parse::<usize>().expect("a number per line"));
    let mut compared = 0;
    for ((expression, ours), theirs) in facts().into_iter().zip(values) {
        assert_eq!(ours, theirs, "{expression}");
        compared += 1;
    }
    assert_eq!(compared, facts().len(), "the C program says all facts");
}

fn facts() -> Vec<Fact> {
    [structures(), entries(), tables(), constants()].concat()
}

fn structures() -> Vec<Fact> {
    vec![
        ("sizeof(struct fid)", size_of::<Fid>()),
        ("sizeof(struct fi_ops)", size_of::<Ops>()),
        ("sizeof(struct fid_fabric)", size_of::<FidFabric>()),
        ("offsetof(struct fid_fabric, api_version)", offset_of!(FidFabric, api_version)),
        ("sizeof(struct fid_domain)", size_of::<FidDomain>()),
        ("sizeof(struct fid_ep)", size_of::<FidEp>()),
        ("offsetof(struct fid_ep, tagged)", offset_of!(FidEp, tagged)),
        ("offsetof(struct fid_ep, atomic)", offset_of!(FidEp, atomic)),
        ("sizeof(struct fid_mr)", size_of::<FidMr>()),
        ("offsetof(struct fid_mr, key)", offset_of!(FidMr, key)),
        ("sizeof(struct fi_info)", size_of::<Info>()),
        ("offsetof(struct fi_info, domain_attr)", offset_of!(Info, domain_attr)),
        ("offsetof(struct fi_info, src_addr)", offset_of!(Info, src_addr)),
        ("sizeof(struct fi_tx_attr)", size_of::<TxAttr>()),
        ("offsetof(struct fi_tx_attr, rma_iov_limit)", offset_of!(TxAttr, rma_iov_limit)),
        ("sizeof(struct fi_rx_attr)", size_of::<RxAttr>()),
        ("sizeof(struct fi_ep_attr)", size_of::<EpAttr>()),
        ("offsetof(struct fi_ep_attr, mem_tag_format)", offset_of!(EpAttr, mem_tag_format)),
        ("offsetof(struct fi_domain_attr, mr_mode)", offset_of!(DomainAttrBase, mr_mode)),
        ("offsetof(struct fi_domain_attr, caps)", offset_of!(DomainAttrBase, caps)),
        ("offsetof(struct fi_domain_attr, mr_cnt)", offset_of!(DomainAttrBase, mr_cnt)),
        ("offsetof(struct fi_domain_attr, tclass)", offset_of!(DomainAttrBase, tclass)),
        ("sizeof(struct fi_fabric_attr)", size_of::<FabricAttr>()),
        ("sizeof(struct fi_provider)", size_of::<Provider>()),
        ("offsetof(struct fi_provider, getinfo)", offset_of!(Provider, getinfo)),
        ("sizeof(struct fi_msg)", size_of::<Msg>()),
        ("sizeof(struct fi_msg_tagged)", size_of::<MsgTagged>()),
        ("sizeof(struct fi_msg_rma)", size_of::<MsgRma>()),
        ("sizeof(struct fi_msg_atomic)", size_of::<MsgAtomic>()),
        ("offsetof(struct fi_msg_atomic, op)", offset_of!(MsgAtomic, op)),
        ("sizeof(struct fi_rma_iov)", size_of::<RmaIov>()),
        ("sizeof(struct fi_rma_ioc)", size_of::<RmaIoc>()),
        ("sizeof(struct fi_ioc)", size_of::<Ioc>()),
    ]
}

fn entries() -> Vec<Fact> {
    vec![
        ("sizeof(struct fi_cq_entry)", 8),
        ("sizeof(struct fi_cq_msg_entry)", offset_of!(CqTaggedEntry, buf)),
        ("sizeof(struct fi_cq_data_entry)", offset_of!(CqTaggedEntry, tag)),
        ("sizeof(struct fi_cq_tagged_entry)", size_of::<CqTaggedEntry>()),
        ("offsetof(struct fi_cq_err_entry, olen)", offset_of!(CqErrEntry, olen)),
        ("offsetof(struct fi_cq_err_entry, err_data_size)", offset_of!(CqErrEntry, err_data_size)),
        ("sizeof(struct fi_cq_attr)", size_of::<CqAttr>()),
        ("sizeof(struct fi_cntr_attr)", size_of::<CntrAttr>()),
        ("sizeof(struct fi_eq_attr)", size_of::<EqAttr>()),
        ("sizeof(struct fi_eq_entry)", size_of::<EqEntry>()),
        ("sizeof(struct fi_eq_err_entry)", size_of::<EqErrEntry>()),
        ("sizeof(struct fi_poll_attr)", size_of::<PollAttr>()),
        ("sizeof(struct fi_av_attr)", size_of::<AvAttr>()),
        ("offsetof(struct fi_mr_attr, requested_key)", offset_of!(MrAttr, requested_key)),
        ("offsetof(struct fi_mr_attr, iface)", offset_of!(MrAttr, iface)),
        ("sizeof(struct fi_atomic_attr)", size_of::<AtomicAttr>()),
    ]
}

fn tables() -> Vec<Fact> {
    vec![
        ("sizeof(struct fi_ops_fabric)", size_of::<OpsFabric>()),
        ("sizeof(struct fi_ops_domain)", size_of::<OpsDomain>()),
        ("offsetof(struct fi_ops_domain, query_atomic)", offset_of!(OpsDomain, query_atomic)),
        ("sizeof(struct fi_ops_mr)", size_of::<OpsMr>()),
        ("sizeof(struct fi_ops_ep)", size_of::<OpsEp>()),
        ("sizeof(struct fi_ops_cm)", size_of::<OpsCm>()),
        ("offsetof(struct fi_ops_cm, getname)", offset_of!(OpsCm, getname)),
        ("sizeof(struct fi_ops_msg)", size_of::<OpsMsg>()),
        ("offsetof(struct fi_ops_msg, injectdata)", offset_of!(OpsMsg, injectdata)),
        ("sizeof(struct fi_ops_tagged)", size_of::<OpsTagged>()),
        ("offsetof(struct fi_ops_tagged, senddata)", offset_of!(OpsTagged, senddata)),
        ("sizeof(struct fi_ops_rma)", size_of::<OpsRma>()),
        ("offsetof(struct fi_ops_rma, inject)", offset_of!(OpsRma, inject)),
        ("sizeof(struct fi_ops_atomic)", size_of::<OpsAtomic>()),
        ("offsetof(struct fi_ops_atomic, compwritemsg)", offset_of!(OpsAtomic, compwritemsg)),
        ("sizeof(struct fi_ops_cq)", size_of::<OpsCq>()),
        ("offsetof(struct fi_ops_cq, signal)", offset_of!(OpsCq, signal)),
        ("sizeof(struct fi_ops_cntr)", size_of::<OpsCntr>()),
        ("sizeof(struct fi_ops_eq)", size_of::<OpsEq>()),
        ("sizeof(struct fi_ops_poll)", size_of::<OpsPoll>()),
        ("sizeof(struct fid_poll)", size_of::<FidPoll>()),
        ("offsetof(struct fi_ops_av, straddr)", offset_of!(OpsAv, straddr)),
    ]
}

fn constants() -> Vec<Fact> {
    vec![
        ("FI_REMOTE_CQ_DATA", REMOTE_CQ_DATA as usize),
        ("FI_DELIVERY_COMPLETE", DELIVERY_COMPLETE as usize),
        ("FI_DIRECTED_RECV", DIRECTED_RECV as usize),
        ("FI_SELECTIVE_COMPLETION", SELECTIVE_COMPLETION as usize),
        ("FI_CLAIM", CLAIM as usize),
        ("FI_DISCARD", DISCARD as usize),
        ("FI_SYNC_ERR", AV_SYNC_ERR as usize),
        ("FI_SOURCE", SOURCE as usize),
        ("FI_ORDER_ATOMIC_WAW", ORDER_ATOMIC_WAW as usize),
        ("FI_CLASS_CNTR", CLASS_CNTR),
        ("FI_CLASS_EQ", CLASS_EQ),
        ("FI_CLASS_POLL", CLASS_POLL),
        ("FI_GETWAIT", GETWAIT as usize),
        ("FI_ENABLE", ENABLE as usize),
        ("FI_THREAD_DOMAIN", THREAD_DOMAIN as usize),
        ("FI_PROGRESS_MANUAL", PROGRESS_MANUAL as usize),
        ("FI_EP_RDM", EP_RDM as usize),
        ("FI_AV_TABLE", AV_TABLE as usize),
        ("FI_WAIT_FD", WAIT_FD as usize),
        ("FI_CQ_FORMAT_TAGGED", CQ_FORMAT_TAGGED as usize),
        ("FI_AV_COMPLETE", EQ_AV_COMPLETE as usize),
        ("FI_OPT_MIN_MULTI_RECV", OPT_MIN_MULTI_RECV as usize),
        ("FI_LONG_DOUBLE_COMPLEX", LONG_DOUBLE_COMPLEX as usize),
        ("FI_MSWAP", OP_MSWAP as usize),
        ("FI_CSWAP_GT", OP_CSWAP_GT as usize),
        ("FI_ETRUNC", Errno::ETRUNC.0 as usize),
        ("FI_ENOKEY", Errno::ENOKEY.0 as usize),
        ("FI_EAVAIL", Errno::EAVAIL.0 as usize),
        ("FI_ETOOSMALL", Errno::ETOOSMALL.0 as usize),
        ("FI_LOG_INFO", LOG_INFO as usize),
    ]
}

fn program() -> String {
    let mut text = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <rdma/fabric.h>\n\
         #include <rdma/fi_atomic.h>\n#include <rdma/fi_cm.h>\n#include <rdma/fi_domain.h>\n\
         #include <rdma/fi_endpoint.h>\n#include <rdma/fi_eq.h>\n#include <rdma/fi_errno.h>\n\
         #include <rdma/fi_rma.h>\n#include <rdma/fi_tagged.h>\n\
         #include <rdma/providers/fi_log.h>\n#include <rdma/providers/fi_prov.h>\n\
         int main(void) {\n",
    );
    for (expression, _) in facts() {
        writeln!(text, "printf(\"%zu\\n\", (size_t)({expression}));").expect("a string grows");
    }
    text + "return 0; }\n"
}

/// The output of the program; `None` if there is no compiler.
fn compile_and_run(program: &str) -> Option<String> {
    let folder = Folder::new();
    let (source, binary) = (folder.0.join("facts.c"), folder.0.join("facts"));
    std::fs::write(&source, program).expect("the temporary folder is writable");
    let compiled = Command::new("cc").arg("-o").arg(&binary).arg(&source).output().ok()?;
    let complaint = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "the facts do not compile: {complaint}");
    let run = Command::new(&binary).output().expect("what was just built runs");
    Some(String::from_utf8(run.stdout).expect("digits"))
}

/// A temporary folder that is deleted when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let path = std::env::temp_dir().join(format!("landbridge-layout-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the temporary folder is writable");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
