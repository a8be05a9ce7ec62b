"""Two hops between two nodes: through Landbridge's relays, and through two HAProxies in TCP mode.

Four network namespaces stand in a row, a - ga - gb - b, joined by veth pairs: the two nodes and
their gateways. For HAProxy each gateway redirects every TCP connection that passes to its own
HAProxy, which connects to the original destination; the nodes rewrite the source of arriving
packets, because libfabric's tcp provider identifies its peers by address. For Landbridge a topology
file describes the same namespaces. Everything is removed when the measurement ends.
"""

import contextlib
import os
import subprocess
from dataclasses import dataclass

import peers as ways
from support import paths

PREFIX = f"lb{os.getpid()}"
LINKS = [("a", "ga", 1), ("ga", "gb", 2), ("gb", "b", 3)]
ADDRESS = {"a": "10.91.1.1", "ga": "10.91.1.2", "gb": "10.91.3.1", "b": "10.91.3.2"}
FAR = {"a": "10.91.1.2", "b": "10.91.3.1"}  # the gateway as its node sees it
PORT = 7000
HAPROXY = f"""
global
  maxconn 4096
defaults
  mode tcp
  timeout connect 10s
  timeout client 1h
  timeout server 1h
listen hop
  bind 0.0.0.0:{PORT}
  server onward 0.0.0.0:0
"""


@dataclass(frozen=True)
class HopPeer(ways.Peer):
    """A peer that is measured between the namespaces a and b; `proxies` puts HAProxy in between."""

    proxies: bool = False

    def command(self, ranks: int, program: list[str]) -> list[str]:
        if self.run_options is not None:
            topology = ["--topology", str(write_topology())]
            return [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *topology, "--", *program]
        mpiexec = str(paths.venv("mpich") / "bin" / "mpiexec")
        return [mpiexec, *rank_in("a", program), ":", *rank_in("b", program)]

    def place(self):
        return row_of_namespaces(self.proxies)


def peers() -> list[HopPeer]:
    tcp = tuple((ways.OFI | {"FI_PROVIDER": "tcp"}).items())
    return [
        HopPeer("landbridge, two relays", (("LANDBRIDGE_PATHS", "relay"),), True, run_options=()),
        HopPeer("libfabric tcp, two HAProxies", tcp, proxies=True),
        HopPeer("libfabric tcp, routed", tcp, is_yardstick=True),
    ]


def rank_in(node: str, program: list[str]) -> list[str]:
    return ["-n", "1", "ip", "netns", "exec", f"{PREFIX}{node}", *program]


@contextlib.contextmanager
def row_of_namespaces(proxies: bool):
    """Makes the four namespaces for the duration of the body."""
    running: list[subprocess.Popen] = []
    try:
        for node in ADDRESS:
            ip("netns", "add", PREFIX + node)
            ip("-n", PREFIX + node, "link", "set", "lo", "up")
        for left, right, network in LINKS:
            join(left, right, network)
        route()
        if proxies:
            running = [start_proxy(gateway) for gateway in ("ga", "gb")]
            rewrite_source("a", FAR["a"], ADDRESS["b"])
            rewrite_source("b", FAR["b"], ADDRESS["a"])
        yield
    finally:
        for proxy in running:
            proxy.kill()
            proxy.wait()
        for node in ADDRESS:
            subprocess.run(["ip", "netns", "del", PREFIX + node], capture_output=True)


def join(left: str, right: str, network: int) -> None:
    ip("link", "add", f"to-{right}", "netns", PREFIX + left, "type", "veth",
       "peer", "name", f"to-{left}", "netns", PREFIX + right)
    for node, other, last in ((left, right, 1), (right, left, 2)):
        device = ["dev", f"to-{other}"]
        ip("-n", PREFIX + node, "addr", "add", f"10.91.{network}.{last}/24", *device)
        ip("-n", PREFIX + node, "link", "set", *device, "up")


def route() -> None:
    ip("-n", PREFIX + "a", "route", "add", "default", "via", FAR["a"])
    ip("-n", PREFIX + "b", "route", "add", "default", "via", FAR["b"])
    ip("-n", PREFIX + "ga", "route", "add", "10.91.3.0/24", "via", "10.91.2.2")
    ip("-n", PREFIX + "gb", "route", "add", "10.91.1.0/24", "via", "10.91.2.1")
    for gateway in ("ga", "gb"):
        inside(gateway, ["sysctl", "-qw", "net.ipv4.ip_forward=1"])


def start_proxy(gateway: str) -> subprocess.Popen:
    rules = f"type nat hook prerouting priority -100;\nip protocol tcp redirect to :{PORT}\n"
    inside(gateway, ["nft", "-f", "-"], f"table ip hop {{\nchain way {{\n{rules}}}\n}}\n")
    config = paths.RESULTS / "haproxy.cfg"
    config.write_text(HAPROXY)
    command = ["ip", "netns", "exec", PREFIX + gateway, "haproxy", "-f", str(config)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rewrite_source(node: str, seen: str, meant: str) -> None:
    rules = f"type nat hook input priority 100;\nip protocol tcp ip saddr {seen} snat to {meant}\n"
    inside(node, ["nft", "-f", "-"], f"table ip hop {{\nchain in {{\n{rules}}}\n}}\n")


def write_topology():
    """Writes a topology of the same row for `landbridge run`: two clusters of a node and a gateway
    each."""
    clusters = []
    for number, (gateway, node) in enumerate((("ga", "a"), ("gb", "b"))):
        wan = 'wan_listen = "10.91.2.2:7711"\n' if gateway == "gb" else ""
        hosts = "".join(
            f'[[cluster.host]]\nname = "{host}"\naddress = "{ADDRESS[host]}"\nslots = {slots}\n'
            f'shell = ["ip", "netns", "exec", "{PREFIX}{host}"]\n'
            for host, slots in ((gateway, 0), (node, 1))
        )
        relay = f'[cluster.relay]\nhost = "{gateway}"\nlisten = "{ADDRESS[gateway]}:7710"\n{wan}'
        clusters.append(f'[[cluster]]\nname = "site{number}"\n{relay}{hosts}')
    file = paths.RESULTS / "hops.toml"
    file.write_text("\n".join(clusters))
    return file


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def inside(node: str, command: list[str], text: str = "") -> None:
    subprocess.run(["ip", "netns", "exec", PREFIX + node, *command], input=text, text=True, check=True)
