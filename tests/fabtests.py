#!/usr/bin/env python3
"""Runs libfabric's conformance programs (fabtests) against a provider, one at a time.

    tests/fabtests.py --fabtests /opt/fabtests --provider tcp
    tests/fabtests.py --fabtests /opt/fabtests --provider landbridge
    tests/fabtests.py --document

What enters: the folder in which fabtests is installed (the version that matches the libfabric it is
linked with; this script does not build fabtests). What leaves:
build/results/fabtests-VERSION-PROVIDER.json, and with --document the table docs/CONFORMANCE.md,
made from all such files. The exit code is 0 if every test passes here that passes over tcp,
according to the result file of tcp.

Most programs are pairs: a server, and a client that gets the server's address. Each pair has its
own deadline. A program that ends with "no data" or "not implemented" reports that the provider does
not offer the tested feature; the result is `n/a` and no failure.
"""

import argparse
import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from support import paths, process  # noqa: E402

HOST = "127.0.0.1"
# Exit codes, also as the low byte of a negative number.
NOT_OFFERED = {sign * code % 256 for code in (errno.ENODATA, errno.ENOSYS) for sign in (1, -1)}
# Part of the text that a program prints for an unknown option.
USAGE = "display this help output"
LIMIT_S = 60.0
# The client starts when the server listens, or after this many seconds at the latest: a server may
# listen by the provider itself, without a socket that this script could observe.
SERVER_START_S = 3.0
# Seconds between the first and the last listening socket of the server.
SETTLE_S = 0.2

# Programs that run alone, and their options.
ALONE = {
    "fi_getinfo_test": [f"-s {HOST} {HOST}"],
    "fi_av_test": [f"-g {HOST} -n 1 -s {HOST} -e rdm"],
    "fi_dom_test": ["-n 2"],
    "fi_eq_test": [""],
    "fi_cq_test": [""],
    "fi_mr_test": [""],
    "fi_cntr_test": [""],
    "fi_setopt_test": [""],
}
# Programs that run as a pair, and each set of options. `{a|b}` stands for either.
PAIRS = {
    "fi_rdm": ["{|-U}"],
    "fi_av_xfer": ["-e rdm"],
    "fi_cq_data": ["-e rdm{| -o senddata| -o writedata}"],
    "fi_rdm_rma_event": [""],
    "fi_rdm_rma_trigger": [""],
    "fi_rdm_deferred_wq": [""],
    "fi_shared_ctx": ["{|--no-tx-shared-ctx|--no-rx-shared-ctx}"],
    "fi_rdm_tagged_peek": [""],
    "fi_scalable_ep": [""],
    "fi_rdm_shared_av": [""],
    "fi_multi_mr": ["-e rdm -V"],
    "fi_multi_ep": ["-e rdm -v{| -A| -Q| -A -Q}{| --threading completion}"],
    "fi_recv_cancel": ["-e rdm -V"],
    "fi_unexpected_msg": ["-e rdm -I 10{| -v}"],
    "fi_inject_test": ["{|-N }-A {inject|inj_complete} -v"],
    "fi_resmgmt_test": [""],
    "fi_flood": ["-e rdm -v -T 1{| -U}"],
    "fi_rdm_multi_client": ["-C 10 -I 5{| -U}{| -R}"],
    "fi_rdm_multi_domain": ["-V"],
    "fi_rdm_bw": ["-I 5{| -v}"],
    "fi_rdm_bw_mt": ["-I 5"],
    "fi_bw": ["-e rdm -v -T 1{| -U}"],
    "fi_poll": ["{|-t counter}"],
    "fi_rma_bw": ["-e rdm -o {write|read|writedata} -I 5{| -U}"],
    "fi_rma_pingpong": ["-e rdm -o {write|writedata} -I 5"],
    "fi_rma_tx_completion": [""],
    "fi_rdm_atomic": ["-I 5 -o all{| -U}{| -v}"],
    "fi_rdm_cntr_pingpong": ["-I 5"],
    "fi_multi_recv": ["-e rdm -I 5"],
    "fi_rdm_pingpong": ["-I 5{| -U}{| -v}{| -k}", "-I 5 -c sread"],
    "fi_rdm_tagged_pingpong": ["-I 5{| -U}{| -v}"],
    "fi_rdm_tagged_bw": ["-I 5{| -U}{| -v}"],
}
# Installed programs that are not run, and why. A program that no table names is listed as unknown.
LEFT_OUT = {
    r"fi_(msg|dgram|cm|stream).*|fi_mcast": "endpoint types that the provider does not offer",
    r"fi_(efa|lpp).*|lpp.*": "hardware of one vendor",
    r"fi_loopback|fi_unmap_mem|fi_mr_cache_evict|.*hmem.*|cuda.*": "device memory, or its cache",
    r"fi_multinode.*|fi_rdm_stress|fi_ubertest": "needs a launcher or a plan file of its own",
    r"run.*|rft_.*|sock_test|sighandler_test": "not a test of a provider",
}


def main() -> int:
    options = arguments()
    if options.document:
        return document()
    folder = Path(options.fabtests) / "bin"
    if not folder.is_dir():
        print(f"fabtests: {folder} does not exist; install fabtests and name its prefix")
        return 2
    process.adopt_orphans()
    results = {}
    for name, kind in all_tests():
        if options.only and not re.search(options.only, name):
            continue
        results[name] = run_test(folder, name, kind, options)
        result, seconds, note = results[name]
        print(f"{result:5} {seconds:6.1f}s  {name}  {note}", flush=True)
    version = options.version or library_version(folder)
    write(version, options.provider, results)
    counts = {key: sum(r[0] == key for r in results.values()) for key in ("pass", "fail", "n/a")}
    print(f"fabtests {version} {options.provider}: {counts}")
    return compare(version, results)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fabtests", default="/usr", help="prefix in which fabtests is installed")
    parser.add_argument("--provider", default="landbridge")
    parser.add_argument("--version", help="libfabric's version, where it cannot be found out")
    parser.add_argument("--only", metavar="REGEX", help="only tests whose line matches")
    parser.add_argument("--document", action="store_true", help="write docs/CONFORMANCE.md")
    return parser.parse_args()


def all_tests() -> list[tuple[str, str]]:
    """(program and options, alone or pair) for each test."""
    tables = (("alone", ALONE), ("pair", PAIRS))
    return [
        (f"{program} {options}".strip(), kind)
        for kind, table in tables
        for program, patterns in table.items()
        for pattern in patterns
        for options in expand(pattern)
    ]


def expand(pattern: str) -> list[str]:
    """All alternatives of a pattern with `{a|b}` in it."""
    found = re.search(r"\{([^}]*)\}", pattern)
    if not found:
        return [pattern]
    head, rest = pattern[: found.start()], pattern[found.end() :]
    return [head + choice + end for choice in found[1].split("|") for end in expand(rest)]


def run_test(folder: Path, name: str, kind: str, options) -> tuple[str, float, str]:
    program, *words = name.split()
    if not (folder / program).exists():
        return "-", 0.0, "`-`: no such program"
    command = [str(folder / program), "-p", options.provider, *words]
    env = {"FI_PROVIDER": options.provider}
    if options.provider == "landbridge":
        env["FI_PROVIDER_PATH"] = str(paths.RELEASE)
    started = time.monotonic()
    if kind == "alone":
        done = process.run(command, LIMIT_S, env)
        codes, why, output = [done.code], done.why, done.output
    else:
        codes, why, output = run_pair(command, env)
    return judge(codes, why, output), round(time.monotonic() - started, 1), note(codes, why, output)


def run_pair(command: list[str], env: dict[str, str]):
    """Runs server and client: (their exit codes, why they were ended, both outputs)."""
    log = paths.RESULTS / "fabtests-server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "-s", HOST],
            env=process.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        await_listener(server)
        client = process.run([*command, "-s", HOST, HOST], LIMIT_S, env, keep=[server.pid])
        why = client.why
        try:
            code = server.wait(timeout=5.0 if client.ok else 1.0)
        except subprocess.TimeoutExpired:
            code, why = None, why or "the server did not end"
        process.end_descendants()
        server.wait()
    return [code, client.code], why, log.read_text(errors="replace") + client.output


def await_listener(server: subprocess.Popen) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while server.poll() is None and time.monotonic() < deadline:
        if listens(server.pid):
            time.sleep(SETTLE_S)
            return
        time.sleep(0.02)


def listens(pid: int) -> bool:
    """Whether the process has a TCP socket in the state LISTEN (0A)."""
    try:
        held = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    except OSError:
        return False
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return any(row[3] == "0A" and f"socket:[{row[9]}]" in held for row in rows)


def judge(codes, why: str, output: str) -> str:
    if all(code == 1 for code in codes) and USAGE in output:
        return "-"
    if any(code in NOT_OFFERED for code in codes):
        return "n/a"
    return "pass" if not why and all(code == 0 for code in codes) else "fail"


def note(codes, why: str, output: str) -> str:
    if all(code == 1 for code in codes) and USAGE in output:
        return "`-`: no such option"
    if why or not all(code == 0 for code in codes):
        last = [line for line in output.splitlines() if line.strip()]
        return f"{why or codes}: {last[-1].strip()[:90] if last else 'no output'}"
    return ""


def library_version(folder: Path) -> str:
    """The version of the libfabric that the programs load, by its file name."""
    listing = subprocess.run(["ldd", folder / "fi_rdm"], capture_output=True, text=True).stdout
    found = re.search(r"libfabric\.so\.1 => (\S+)", listing)
    pattern = rb"^[12]\.\d+\.\d+$"
    strings = re.findall(rb"\x00([12]\.\d{1,2}\.\d)\x00", Path(found[1]).read_bytes()) if found else []
    versions = {text.decode() for text in strings if re.match(pattern, text)}
    return max(versions, key=lambda v: list(map(int, v.split("."))), default="unknown")


def result_file(version: str, provider: str) -> Path:
    return paths.RESULTS / f"fabtests-{version}-{provider}.json"


def write(version, provider, results) -> None:
    """Writes results; results of other tests in the file stay."""
    file = result_file(version, provider)
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | results, indent=0))


def compare(version: str, results) -> int:
    file = result_file(version, "tcp")
    if not file.exists():
        return 0
    tcp = json.loads(file.read_text())
    lost = [n for n, (result, *_) in results.items() if result != "pass" == tcp.get(n, [""])[0]]
    for name in lost:
        print(f"passes over tcp, not here: {name}")
    return 1 if lost else 0


def document() -> int:
    """Writes docs/CONFORMANCE.md from all result files."""
    files = sorted(paths.RESULTS.glob("fabtests-*-*.json"))
    columns = {file.stem.removeprefix("fabtests-"): json.loads(file.read_text()) for file in files}
    if not columns:
        print("fabtests: no results yet; run with --fabtests first")
        return 2
    names = [name for name, _ in all_tests()]
    lines = ["| test | " + " | ".join(columns) + " | remark |", "|" + "---|" * (len(columns) + 2)]
    for name in names:
        cells = [column.get(name, ["-", 0, ""]) for column in columns.values()]
        ours = [c for title, c in zip(columns, cells) if title.endswith("landbridge")]
        remark = next((c[2] for c in ours if c[0] != "pass"), "").replace("|", "/")
        lines.append(f"| `{name}` | {' | '.join(c[0] for c in cells)} | {remark} |")
    left_out = [f"- `{pattern}`: {why}" for pattern, why in LEFT_OUT.items()]
    text = HEAD + "\n".join(lines) + "\n\n## Not run\n\n" + "\n".join(left_out) + "\n"
    (paths.ROOT / "docs").mkdir(exist_ok=True)
    (paths.ROOT / "docs" / "CONFORMANCE.md").write_text(text)
    print(f"fabtests: wrote docs/CONFORMANCE.md, {len(names)} tests")
    return 0


HEAD = """# Conformance

The table shows the results of libfabric's own test programs (fabtests) over the provider and, for
comparison, over libfabric's `tcp` provider. Most run as a server and a client on one host, without
the launcher. A column title is the version of libfabric and the provider.

`pass`: every process ended with exit code 0. `fail`: one ended with an error, or not within 60 s.
`n/a`: the program requested a feature that the provider does not offer. `-`: this version of
fabtests has no such program or option. A remark is about the first Landbridge column that is not
`pass`; the numbers are the exit codes of server and client (61, 195: no data).

To make this table, build and install fabtests of the same version as each libfabric. For each
installation PREFIX run the first two commands, then once the last one:

    tests/fabtests.py --fabtests PREFIX --provider tcp
    tests/fabtests.py --fabtests PREFIX --provider landbridge
    tests/fabtests.py --document

Completion queues of the provider have no wait object with a file descriptor (`FI_WAIT_FD`, option
`-c fd`, not in the table); those of `tcp` have one. `fi_cq_sread` waits without a descriptor (`-c
sread`), and the MPI libraries request none. The writer of a ring in shared memory wakes its reader
only if the reader has marked the ring before sleeping. With a descriptor every ring of the queue
would be marked before each sleep, and each completion from another thread written to it.

## Results

"""

if __name__ == "__main__":
    sys.exit(main())
