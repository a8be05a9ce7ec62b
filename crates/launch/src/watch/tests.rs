//! Failures as agents report them, and what the user reads about the failures.

use super::*;
use Ending::{Exited, Killed};
use Stage::{Finalized, Joined, Silent};

const MPICH_ERROR: i32 = 678_509_711;

/// One report of a node.
enum Incident {
    Exit(u32, Ending, Stage),
    Abort(u32, i32),
    Loss(u32),
}

fn judge(size: u32, events: &[(&str, Incident)], now: Instant) -> Verdict {
    let mut watch = Watch::new(size, false);
    for (node, event) in events {
        match *event {
            Incident::Exit(rank, ending, stage) => {
                watch.handle_exit(node, rank, ending, stage, now);
            }
            Incident::Abort(rank, code) => watch.handle_cause(node, aborted(rank, code)),
            Incident::Loss(rank) => watch.handle_peer_losses([rank]),
        }
    }
    watch.verdict(now)
}

fn aborted(rank: u32, code: i32) -> Cause {
    Cause::Aborted { rank, code, message: String::new() }
}

use Incident::{Abort, Exit, Loss};

fn killed(rank: u32, signal: i32) -> Cause {
    Cause::Killed { rank, signal }
}

fn exited(rank: u32, code: i32) -> Cause {
    Cause::Exited { rank, code }
}

/// One test row: a description, the reports in order of arrival with their nodes, and the cause.
type CauseRow<'a> = (&'a str, Vec<(&'a str, Incident)>, Cause);

#[track_caller]
fn assert_causes(rows: Vec<CauseRow>) {
    let now = Instant::now();
    for (what, events, cause) in rows {
        assert_eq!(judge(8, &events, now), Verdict::End(cause), "{what}");
    }
}

#[test]
fn on_one_node_the_first_to_end_is_the_cause() {
    assert_causes(vec![
        (
            "kill -9 of one rank of a node",
            vec![
                ("a", Exit(2, Killed(9), Joined)),
                ("a", Exit(0, Killed(11), Joined)),
                ("a", Abort(1, MPICH_ERROR)),
            ],
            killed(2, 9),
        ),
        (
            "the same, and a victim was quicker to be reported",
            vec![("a", Abort(1, MPICH_ERROR)), ("a", Exit(2, Killed(9), Joined))],
            killed(2, 9),
        ),
        (
            "exit(5) without MPI_Finalize: others crash",
            vec![("a", Exit(2, Exited(5), Joined)), ("a", Exit(0, Killed(11), Joined))],
            exited(2, 5),
        ),
        (
            "exit(5) without MPI_Finalize: others abort",
            vec![("a", Exit(2, Exited(5), Joined)), ("a", Abort(0, MPICH_ERROR))],
            exited(2, 5),
        ),
        (
            "the program aborts: others crash",
            vec![
                ("a", Abort(1, 7)),
                ("a", Exit(1, Exited(7), Joined)),
                ("a", Exit(0, Killed(11), Joined)),
            ],
            aborted(1, 7),
        ),
        (
            "a crash, and others abort",
            vec![("a", Exit(1, Killed(11), Joined)), ("a", Abort(0, MPICH_ERROR))],
            killed(1, 11),
        ),
        (
            "a crash, and others handle the error and leave",
            vec![("a", Exit(1, Killed(11), Joined)), ("a", Exit(0, Exited(1), Joined))],
            killed(1, 11),
        ),
        (
            "an error of the library's own, and others crash",
            vec![("a", Abort(2, MPICH_ERROR)), ("a", Exit(0, Killed(11), Joined))],
            aborted(2, MPICH_ERROR),
        ),
    ]);
}

#[test]
fn on_several_nodes_the_strongest_of_the_first_is_the_cause() {
    assert_causes(vec![
        (
            "exit(5) on a node that is heard later than a victim",
            vec![("a", Exit(0, Killed(11), Joined)), ("b", Exit(2, Exited(5), Joined))],
            exited(2, 5),
        ),
        (
            "the same with victims on both",
            vec![
                ("a", Abort(0, MPICH_ERROR)),
                ("a", Exit(0, Exited(143), Joined)),
                ("b", Exit(3, Exited(5), Joined)),
                ("b", Exit(2, Killed(11), Joined)),
            ],
            exited(3, 5),
        ),
        (
            "the program aborts on a node that is heard later",
            vec![("a", Exit(0, Killed(11), Joined)), ("b", Abort(3, 7))],
            aborted(3, 7),
        ),
        (
            "a crash on a node that is heard later than an abort it caused",
            vec![("a", Abort(0, MPICH_ERROR)), ("b", Exit(3, Killed(11), Joined))],
            killed(3, 11),
        ),
        (
            "an assertion on a node that is heard later than a crash it caused",
            vec![("a", Exit(0, Killed(11), Joined)), ("b", Exit(3, Killed(6), Joined))],
            killed(3, 6),
        ),
        (
            "two crashes on two nodes: the first that is heard",
            vec![("b", Exit(3, Killed(11), Joined)), ("a", Exit(0, Killed(11), Joined))],
            killed(3, 11),
        ),
    ]);
}

#[test]
fn ranks_that_lost_another_are_not_the_cause_and_those_that_left_may_be() {
    assert_causes(vec![
        (
            "an exception: finalized, then exited while others abort",
            vec![("a", Abort(0, MPICH_ERROR)), ("a", Exit(2, Exited(1), Finalized))],
            Cause::FailedAfterFinalize { rank: 2, code: 1 },
        ),
        (
            "an exception on another node",
            vec![("b", Exit(3, Exited(1), Finalized)), ("a", Exit(0, Killed(11), Joined))],
            Cause::FailedAfterFinalize { rank: 3, code: 1 },
        ),
        (
            "exit(5), and another leaves because of it",
            vec![("a", Exit(2, Exited(5), Joined)), ("a", Exit(0, Exited(1), Finalized))],
            exited(2, 5),
        ),
        (
            "exit(5), which the kernel reported later than of a victim",
            vec![
                ("a", Loss(0)),
                ("a", Exit(0, Exited(1), Joined)),
                ("a", Exit(2, Exited(5), Joined)),
            ],
            exited(2, 5),
        ),
        (
            "a crash on another node, and one who lost it handles the error and leaves",
            vec![
                ("a", Exit(0, Exited(1), Joined)),
                ("b", Exit(3, Killed(11), Joined)),
                ("a", Loss(0)),
            ],
            killed(3, 11),
        ),
        (
            "_exit(0) before a barrier: the library of another aborts, or crashes",
            vec![
                ("a", Loss(0)),
                ("a", Abort(0, MPICH_ERROR)),
                ("a", Exit(0, Killed(11), Joined)),
                ("a", Exit(2, Exited(0), Joined)),
            ],
            Cause::QuitWithoutFinalize { rank: 2, recovers: false },
        ),
        (
            "_exit(0), and one that lost nobody crashes by itself",
            vec![("a", Exit(2, Exited(0), Joined)), ("b", Exit(0, Killed(11), Joined))],
            killed(0, 11),
        ),
        (
            "kill -9 of one that lost another",
            vec![
                ("a", Loss(0)),
                ("a", Exit(1, Exited(1), Joined)),
                ("a", Exit(0, Killed(9), Joined)),
            ],
            killed(0, 9),
        ),
        (
            "all say that they lost another: the order",
            vec![("a", Loss(0)), ("a", Loss(1)), ("a", Abort(1, 3)), ("a", Abort(0, 4))],
            aborted(1, 3),
        ),
    ]);
}

#[test]
fn what_happens_to_the_job_outweighs_what_happens_to_ranks() {
    let now = Instant::now();
    let failed = || Cause::Failed { text: String::from("lost node b") };
    let mut watch = Watch::new(2, false);
    watch.handle_cause("a", Cause::Stuck { rank: 1 });
    assert_eq!(watch.verdict(now), Verdict::End(Cause::Stuck { rank: 1 }));
    watch.handle_exit("a", 0, Killed(9), Joined, now);
    assert_eq!(watch.verdict(now), Verdict::End(Cause::Killed { rank: 0, signal: 9 }));
    for cause in
        [failed(), Cause::Timeout { seconds: 1 }, Cause::Unread, Cause::Interrupted { signal: 2 }]
    {
        watch.handle_cause("", cause.clone());
        assert_eq!(watch.verdict(now), Verdict::End(cause));
    }
    watch.handle_cause("", failed());
    assert_eq!(watch.verdict(now), Verdict::End(Cause::Interrupted { signal: 2 }));
}

#[test]
fn a_job_ends_well_when_every_rank_has() {
    let now = Instant::now();
    let verdict = |events: &[(&str, Incident)]| judge(2, events, now);
    let well = |rank, stage| ("a", Exit(rank, Exited(0), stage));
    assert_eq!(verdict(&[]), Verdict::GoOn);
    assert_eq!(verdict(&[well(0, Finalized)]), Verdict::GoOn);
    assert_eq!(verdict(&[well(0, Silent), well(1, Silent)]), Verdict::Finished { code: 0 });
    let late = [well(0, Finalized), ("a", Exit(1, Exited(3), Finalized))];
    assert_eq!(verdict(&late), Verdict::Finished { code: 3 });
    let mut watch = Watch::new(2, false);
    assert_eq!(watch.failed_after_finalize(), None);
    watch.handle_exit("a", 1, Exited(3), Finalized, now);
    assert_eq!(watch.failed_after_finalize(), Some((1, 3)), "the user reads which rank it was");
    let silent = [well(0, Finalized), ("a", Exit(1, Exited(3), Silent))];
    assert_eq!(verdict(&silent), Verdict::End(Cause::Exited { rank: 1, code: 3 }));
}

#[test]
fn a_rank_that_is_executed_again_has_to_end_again() {
    let now = Instant::now();
    let mut watch = Watch::new(2, true);
    watch.handle_exit("a", 0, Exited(0), Finalized, now);
    watch.handle_again(&[0]);
    watch.handle_exit("a", 1, Exited(0), Finalized, now);
    assert_eq!(watch.verdict(now), Verdict::GoOn);
    watch.handle_exit("b", 0, Exited(0), Finalized, now);
    assert_eq!(watch.verdict(now), Verdict::Finished { code: 0 });
    // Only the last end counts.
    for (stage, code) in [(Finalized, 3), (Joined, 0)] {
        let mut watch = Watch::new(2, true);
        watch.handle_exit("a", 0, Exited(code), stage, now);
        watch.handle_again(&[0]);
        assert_eq!(watch.verdict(now + 2 * EXIT_GRACE), Verdict::GoOn);
        watch.handle_exit("a", 1, Exited(0), Finalized, now);
        watch.handle_exit("b", 0, Exited(0), Finalized, now);
        assert_eq!(watch.verdict(now), Verdict::Finished { code: 0 });
    }
}

#[test]
fn an_error_after_finalize_ends_the_job_after_a_grace() {
    let at = Instant::now();
    let moment = Duration::from_millis(1);
    let place = |rank: u32| format!("rank {rank}");
    let mut watch = Watch::new(3, false);
    assert_eq!(watch.next_time(), None);
    watch.handle_exit("a", 2, Exited(1), Finalized, at);
    assert_eq!(watch.next_time(), Some(at + EXIT_GRACE_NOTICE));
    assert_eq!(watch.poll_notice(at + EXIT_GRACE_NOTICE - moment, place), None);
    let notice = watch.poll_notice(at + EXIT_GRACE_NOTICE, place).unwrap();
    assert!(notice.starts_with("rank 2 ended with exit code 1 after MPI_Final"), "{notice}");
    assert_eq!(watch.poll_notice(at + EXIT_GRACE_NOTICE, place), None);
    watch.handle_exit("a", 1, Exited(4), Finalized, at + EXIT_GRACE_NOTICE);
    assert_eq!(watch.verdict(at + EXIT_GRACE - moment), Verdict::GoOn);
    assert_eq!(watch.next_time(), Some(at + EXIT_GRACE));
    let cause = Cause::FailedAfterFinalize { rank: 2, code: 1 };
    assert_eq!(watch.verdict(at + EXIT_GRACE), Verdict::End(cause));
    watch.handle_exit("a", 0, Exited(0), Finalized, at + EXIT_GRACE);
    assert_eq!(watch.verdict(at + EXIT_GRACE), Verdict::Finished { code: 1 });
}

#[test]
fn who_ends_well_without_finalize_ends_a_job_whose_others_go_on() {
    let at = Instant::now();
    let moment = Duration::from_millis(1);
    let missing = |recovers| {
        let mut watch = Watch::new(3, recovers);
        watch.handle_exit("a", 2, Exited(0), Joined, at);
        watch
    };
    // The MPI library may carry the messages of a node: then nobody reports a loss.
    let mut watch = missing(false);
    assert_eq!(watch.verdict(at + EXIT_GRACE - moment), Verdict::GoOn);
    assert_eq!(watch.next_time(), Some(at + EXIT_GRACE_NOTICE));
    watch.handle_peer_losses([1]);
    let cause = Cause::QuitWithoutFinalize { rank: 2, recovers: false };
    assert_eq!(watch.verdict(at + EXIT_GRACE), Verdict::End(cause));
    let mut watch = missing(true);
    assert_eq!(watch.verdict(at + EXIT_GRACE - moment), Verdict::GoOn);
    let cause = Cause::QuitWithoutFinalize { rank: 2, recovers: true };
    assert_eq!(watch.verdict(at + EXIT_GRACE), Verdict::End(cause.clone()));
    assert_eq!(cause.code(), FAILED_CODE);
    let place = |rank: u32| format!("rank {rank}");
    let notice = watch.poll_notice(at + EXIT_GRACE_NOTICE, place).unwrap();
    assert!(notice.starts_with("rank 2 ended with exit code 0 without MPI_Final"), "{notice}");
    let text = cause.text(place).unwrap();
    assert!(text.starts_with("rank 2 has ended with exit code 0 without MPI_Finalize"), "{text}");

    // The job also ends well if all ranks end so, unless ranks come back: a script may have hidden
    // that the program within it was killed.
    for (recovers, verdict) in [(false, Verdict::Finished { code: 0 }), (true, Verdict::End(cause))]
    {
        let mut watch = missing(recovers);
        watch.handle_exit("a", 1, Exited(0), Joined, at);
        watch.handle_exit("a", 0, Exited(0), Silent, at);
        assert_eq!(watch.verdict(at), verdict);
    }
    let mut watch = missing(false);
    watch.handle_exit("a", 1, Exited(4), Finalized, at);
    watch.handle_exit("a", 0, Exited(0), Finalized, at);
    assert_eq!(watch.verdict(at), Verdict::Finished { code: 4 });
}

#[test]
fn spawned_ranks_are_waited_for_unless_revoked() {
    let now = Instant::now();
    let mut watch = Watch::new(1, false);
    watch.handle_spawn(2);
    watch.handle_exit("a", 0, Exited(0), Finalized, now);
    assert_eq!(watch.verdict(now), Verdict::GoOn);
    watch.handle_exit("a", 70, Exited(0), Silent, now);
    assert_eq!(watch.verdict(now), Verdict::GoOn);
    watch.handle_revoke(70..72);
    assert_eq!(watch.verdict(now), Verdict::Finished { code: 0 });
}

#[test]
fn codes_are_those_of_a_shell() {
    let code = |cause: Cause| cause.code();
    let abort = |code| aborted(0, code);
    assert_eq!(code(Cause::Killed { rank: 0, signal: 9 }), 137);
    assert_eq!(code(Cause::Interrupted { signal: 2 }), 130);
    assert_eq!(code(Cause::Timeout { seconds: 1 }), 124);
    assert_eq!(code(Cause::Unread), 141);
    assert_eq!(code(Cause::Exited { rank: 0, code: 42 }), 42);
    assert_eq!(code(abort(7)), 7);
    assert_eq!(code(abort(0)), 0);
    assert_eq!(code(abort(-1)), 255);
    assert_eq!(code(abort(256)), 1);
    // The low byte of this code is 143, which would look like a death by SIGTERM.
    assert_eq!(code(abort(MPICH_ERROR)), 1);
}

#[test]
fn the_message_names_rank_node_cluster_and_signal() {
    let cause = Cause::Killed { rank: 3, signal: 11 };
    let text = cause.text(|rank| format!("rank {rank} on node n2 (cluster nancy)"));
    let expected =
        "rank 3 on node n2 (cluster nancy) was killed by signal 11 (SIGSEGV); ending the job";
    assert_eq!(text.as_deref(), Some(expected));
}

#[test]
fn an_abort_tells_the_exit_code_where_it_is_another() {
    let text = |code, message| abort_text("rank 0", code, message);
    assert_eq!(text(7, "no more"), "rank 0 aborted the job with code 7: no more");
    assert_eq!(text(300, ""), "rank 0 aborted the job with code 300 (exit code 1)");
}
