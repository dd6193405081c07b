"""The hosts and the Slurm that other tests stand on."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, skip_without_namespaces
from tests.cluster.slurm import Slurm, skip_without_slurm

SEND = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], 5000)); s.sendall(b"x" * 1_000_000); s.shutdown(1); s.recv(1)
"""
RECEIVE = """
import socket, time
server = socket.create_server(("", 5000)); print("ready", flush=True); s, _ = server.accept(); begin = time.monotonic()
while s.recv(65536): pass
s.sendall(b"."); print(time.monotonic() - begin)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    skip_without_namespaces()
    with Hosts(2) as made:
        yield made


def seconds_for_a_megabyte(hosts: Hosts) -> float:
    receiver = hosts.start(0, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    hosts.run(1, [sys.executable, "-c", SEND, hosts.names[0]])
    said, _ = receiver.communicate(timeout=20)
    return float(said)


@pytest.mark.netns
def test_names_addresses_and_a_limit(hosts: Hosts) -> None:
    for at, name in enumerate(hosts.names):
        assert hosts.run(at, ["hostname"]).strip() == name
        found = "import socket; print(*(socket.gethostbyname(n) for n in ('node1', 'node2')))"
        assert hosts.run(at, [sys.executable, "-c", found]).split() == hosts.addresses
    assert seconds_for_a_megabyte(hosts) < 0.5
    hosts.limit(4)
    assert 1.2 < seconds_for_a_megabyte(hosts) < 4  # 8 Mbit at 4 Mbit/s, but for the first 64 kB
    hosts.limit(None)
    assert seconds_for_a_megabyte(hosts) < 0.5


@pytest.mark.netns
def test_a_wrong_name_a_pulled_cable_a_dead_host(hosts: Hosts) -> None:
    look = [sys.executable, "-c", "import socket; print(socket.gethostbyname('node2'))"]
    hosts.resolve(0, {"node2": "127.0.0.1"})
    assert hosts.run(0, look).strip() == "127.0.0.1"
    assert hosts.run(1, look).strip() == hosts.addresses[1]
    call = [sys.executable, "-c", f"import socket; socket.create_connection(('{hosts.addresses[1]}', 9), timeout=2)"]
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1") as refused:
        hosts.run(0, call)
    assert "ConnectionRefusedError" in refused.value.stderr
    hosts.connect(1, False)
    with pytest.raises(subprocess.CalledProcessError) as silent:
        hosts.run(0, call)
    assert "TimeoutError" in silent.value.stderr
    sleeping = hosts.start(1, ["sleep", "100"])
    while not hosts.pids(1):
        pass
    hosts.kill(1)
    assert sleeping.wait(10) == -9


@pytest.mark.slurm
def test_slurm_runs_a_task_on_every_host(hosts: Hosts, tmp_path: Path) -> None:
    skip_without_slurm()
    with Slurm(hosts, tmp_path, gpus=2, features=["big", "small"]) as slurm:
        said = slurm.run("srun", "-N2", "--gpus-per-node=2", "bash", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES")
        assert sorted(said.splitlines()) == ["node1 0,1", "node2 0,1"]
        assert slurm.run("srun", "-N1", "-C", "small", "hostname") == "node2\n"
