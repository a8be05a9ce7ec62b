"""The cases of each slow family that `make test` runs: at least one for each kind of fault.

`make test-all` runs all cases. A driver with `--sample` makes only the checks named here, and fails
if a name is that of no check.
"""

SAMPLES = {
    # Kills at each point of a job; wildcards; remote memory; the log on disk; standard input;
    # recorded nondeterminism; divergence; faults of the program.
    "recovery": [
        "as a job begins",
        "two clusters, all",
        "who takes whatever comes",
        "who fetches from another one's memory",
        "a record that is mostly on disk",
        "a record for which there is no room",
        "a record that is to lie where nothing can",
        "a record below a folder that others could exchange",
        "who draws from clocks and random numbers",
        "who draws and is not recorded",
        "who looks at the clock another number of times",
        "a script that starts the program beside itself",
        "a child that becomes the program, killed",
        "who does something else than before",
        "who sends to somebody else than before",
        "who has spawned others",
        "who was spawned",
        "who crashes by its own fault",
        "who leaves without MPI_Finalize",
        "who leaves with the code of those who cannot go on",
        "who is killed more often than allowed",
        "where it cannot be",
        "logs of the senders, which are full",
        "logs of the senders, with little memory in a control group",
        "logs of the senders, mostly on disk",
        "logs of the senders, for which the disk has no room",
        "ranks of a node together, two clusters",
        "ranks of a node together, and some have ended",
        "ranks of a node together, and one that has ended does something else",
        "who receive from ranks that do nothing meanwhile, who are killed",
        "logs of relays, the same again while it comes back",
        "logs of relays, who does something else than before",
    ],
    # A wide-area link that fails; a relay on another node; a cable; a lost node with each kind of
    # program; no spare node.
    "nodes": [
        "wide-area link cut for 2 s, one in each cluster",
        "relays on other nodes, one on each, again while it comes back",
        "relays on other nodes, a cable that is out for 3 s",
        "relays on other nodes, who does something else than before",
        "logs of the senders, one on each, again while it comes back",
        "logs of the senders, two clusters, the wide-area link cut for 2 s",
        "a node is lost",
        "a node is lost, and there is no other one",
        "a node is lost, who draws from clocks and random numbers, and the next one",
        "a node is lost, who takes whatever comes, and a second one",
        "a node is lost, who prints its hostname",
        "a node is lost, who sends its hostname",
        "a node is lost, while a rank spawns",
        "a node is lost, heat, two clusters",
        "logs of the senders, a node is lost, who receive from ranks that do nothing meanwhile",
        "logs of the senders, a node is lost, who send and then do nothing",
        "logs of the senders, a node is lost, who work on after MPI_Finalize",
        "logs of the senders, a node is lost, one works on after MPI_Finalize",
    ],
    # Restores from checkpoints on the same node, over clusters, on a spare node with a shared
    # folder and with a store; corrupt checkpoints.
    "checkpoint": [
        "one after another, one twice",
        "ranks of a node together, two clusters",
        "logs that ask for images",
        "logs on disk",
        "logs of relays, all",
        "logs of the senders of two clusters",
        "who draws from clocks and random numbers",
        "images that somebody asks for",
        "no room for images",
        "a folder that others could exchange",
        "an object store",
        "relays on other nodes, two on one node, one of them twice",
        "a node is lost, and nobody else sees its images",
        "a node is lost, heat, two clusters, from images",
        "logs of the senders, nodes are lost in turn, wildcards and probes, from images",
        "who is killed as its image is taken",
        "the newest checkpoint is corrupt",
        "where there is no CRIU",
    ],
    "records": [
        "who reads more than a record holds",
        "a node is lost with who reads more than a record holds",
        "who reads more of small files than is recorded, and they change",
        "who reads more of its own scratch file than a record holds, from images",
    ],
    # One-sided operations (whose messages have bytes of the stack that nobody has set), messages,
    # collectives, files, spawns.
    "suite": [
        "test_rma_nb, one node",
        "test_p2p_buf, two clusters",
        "test_cco_nb_vec, two clusters",
        "test_file, one node",
        "test_spawn, one node",
    ],
    # Each program once, from the start and from checkpoints, one cluster and two, and both kinds of
    # bad networks.
    "kills": [
        "heat, two clusters, from images, a storm",
        "wildcards and probes, two clusters, from the start, a storm",
        "wildcards and probes, one cluster, from images, a storm",
        "IMB-MPI1 Sendrecv Allreduce Alltoall, one cluster, from the start, a storm",
        "heat, logs of relays, from images, a storm",
        "wildcards and probes, ranks of a node together, two clusters, from images, a storm",
        "heat, a bad network over UDP, from images",
    ],
    # Each fault once over TCP and once over UDP, with both libraries, and the faults of relays and
    # the wide-area link.
    "network": [
        "MPICH, one cluster, 5 % loss",
        "Open MPI, one cluster, corruption",
        "MPICH, one cluster, reordering",
        "Open MPI, one cluster, interfaces down and up",
        "MPICH, one cluster, first rail down for good",
        "MPICH, one cluster, corruption over UDP",
        "MPICH, one cluster, duplication over UDP",
        "Open MPI, one cluster, 5 % loss over UDP",
        "MPICH, two clusters, bits flipped as it begins",
        "MPICH, one cluster, corruption without integrity",
        "MPICH, one cluster, corruption without integrity over UDP",
        "MPICH, one cluster, a host cut off for good",
        "MPICH, one cluster, only small packets get through on both rails over UDP",
        "MPICH, two clusters, relay stopped for 5 s",
        "MPICH, two clusters, wide-area link cut for 8 s over UDP",
    ],
}
