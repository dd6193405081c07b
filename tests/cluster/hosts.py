"""Hosts as network namespaces on one bridge: each has its address, its host name, its /etc/hosts and its processes.

Files and the process table are shared, as over a cluster's shared folder. Needs root and iproute2.

    with Hosts(2) as hosts:                     # node1 is 10.77.N.1, node2 is 10.77.N.2
        first = hosts.start(0, ["torchrun", …])
        hosts.limit(50)                         # Mbit/s out of every host
        hosts.kill(1)                           # the host dies with all that runs on it
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BRIDGE = "spmdbr"
"""Bridge N carries the network 10.77.N.0/24; its alias is the process that made it."""
NETWORKS = range(1, 200)


def missing() -> str | None:
    """Why there can be no hosts here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need iproute2 and util-linux"
    made = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False)
    return None if made.returncode == 0 else f"this kernel makes no namespaces: {made.stderr.strip()}"


def skip_without_namespaces() -> None:
    """Skip the test, saying why, where hosts cannot be made."""
    if (reason := missing()) is not None:
        pytest.skip(reason)


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """`count` hosts; the machine itself is reachable from them at `gateway` (and as `names_here`)."""

    def __init__(self, count: int, names: Sequence[str] = ()) -> None:
        self.names = list(names) or [f"node{i + 1}" for i in range(count)]
        assert len(self.names) == count, "one name a host"
        self.network = _claim_network()
        self.gateway = f"10.77.{self.network}.254"
        self.addresses = [f"10.77.{self.network}.{i + 1}" for i in range(count)]
        self._bridge = f"{BRIDGE}{self.network}"
        try:
            ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for index in range(count):
                self._plug_in(index)
                self.resolve(index)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.names)

    def namespace(self, host: int) -> str:
        """Its name for `ip netns exec`."""
        return f"{self._bridge}-{host + 1}"

    def resolve(self, host: int, different: Mapping[str, str] | None = None) -> None:
        """Write the host's /etc/hosts: every host by its name and this machine, but `different` (name to address)."""
        table = dict(zip(self.names, self.addresses, strict=True)) | {os.uname().nodename: self.gateway}
        table |= different or {}
        folder = Path("/etc/netns") / self.namespace(host)
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in table.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv` as it runs on a host; the processes keep this one's environment and folder."""
        named = ["unshare", "--uts", "bash", "-c", 'hostname "$0"; exec "$@"', self.names[host], *argv]
        return ["ip", "netns", "exec", self.namespace(host), *named]

    def start(self, host: int, argv: Sequence[str], **popen: Any) -> "subprocess.Popen[str]":
        """Start a program on a host; `popen` are subprocess.Popen's arguments."""
        return subprocess.Popen(self.command(host, argv), text=True, **popen)

    def run(self, host: int, argv: Sequence[str], timeout_s: float = 60.0, **run: Any) -> str:
        """What a program on a host prints. Raises CalledProcessError and TimeoutExpired."""
        options: dict[str, Any] = {"capture_output": True, "check": True, "timeout": timeout_s, **run}
        return str(subprocess.run(self.command(host, argv), text=True, **options).stdout)

    def pids(self, host: int) -> list[int]:
        """What runs on the host."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace(host), check=False).split()]

    def kill(self, host: int, number: int = signal.SIGKILL) -> None:
        """Send every process on the host a signal; by default the host's death."""
        for pid in self.pids(host):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def limit(self, mbit: float | None) -> None:
        """Let every host send at most `mbit` Mbit/s; None lifts the limit."""
        for host in range(len(self)):
            device = ["-n", self.namespace(host), "qdisc"]
            if mbit is None:
                _tc(*device, "del", "dev", "eth0", "root")
            else:
                rate = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms"]
                _tc(*device, "replace", "dev", "eth0", "root", "tbf", *rate)

    def connect(self, host: int, connected: bool) -> None:
        """Pull the host's network cable, or put it back."""
        ip("link", "set", self._cable(host), "up" if connected else "down")

    def close(self) -> None:
        """Kill what still runs on the hosts and take them away."""
        _remove(self.network, len(self))

    def _cable(self, host: int) -> str:
        return self.namespace(host)

    def _plug_in(self, host: int) -> None:
        space, cable = self.namespace(host), self._cable(host)
        ip("netns", "add", space)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", cable, "master", self._bridge, "up")
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", space, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")


def _tc(*words: str) -> None:
    subprocess.run(["tc", *words], check=True, capture_output=True)


def _claim_network() -> int:
    """A free number, claimed by making its bridge; what processes that are gone left behind is taken away first."""
    for number in NETWORKS:
        name = f"{BRIDGE}{number}"
        made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, check=False)
        if made.returncode == 0:
            ip("link", "set", "dev", name, "alias", str(os.getpid()))
            return number
        owner = _read(f"/sys/class/net/{name}/ifalias")
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(number, len([s for s in ip("netns", "list").split() if s.startswith(f"{name}-")]))
    raise RuntimeError(f"no bridge {BRIDGE}N could be made: {ip('-br', 'link')}")


def _remove(number: int, hosts: int) -> None:
    name = f"{BRIDGE}{number}"
    spaces = [f"{name}-{host + 1}" for host in range(hosts)]
    for attempt in range(50):
        pids = [int(pid) for space in spaces for pid in ip("netns", "pids", space, check=False).split()]
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02 * (attempt + 1))
    for space in spaces:
        ip("link", "del", space, check=False)
        ip("netns", "del", space, check=False)
        shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
    ip("link", "del", name, check=False)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
