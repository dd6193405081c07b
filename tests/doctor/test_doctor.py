"""Each fault that is planted is found: a red line that names it, and a non-zero exit status on every rank."""

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.doctor.devices import App, Gpu, _links, device_of
from spmd_rl.doctor.examine import main
from spmd_rl.doctor.links import judge
from tests.cluster.hosts import Hosts, skip_without_namespaces
from tests.doctor.nvidia_smi import TOPOLOGY, install
from tests.world import Worlds

Reply = tuple[int, str]
FIRST = "GPU-aaaaaaaa-0000-4000-8000-000000000000"


def examined(arguments: list[str], plants: Mapping[int, Mapping[str, Any]]) -> Reply:
    """The doctor on this rank of a world, with what is planted on it: environment, `path`, `ahead_s`, `host`."""
    plant = dict(plants.get(int(os.environ["RANK"]), plants.get(-1, {})))
    kept, paths, clock = dict(os.environ), list(sys.path), time.time
    ahead, path, host = plant.pop("ahead_s", 0.0), plant.pop("path", None), plant.pop("host", "")
    name_of = socket.gethostname
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update({name: str(value) for name, value in plant.items()})
    said = io.StringIO()
    try:
        if path:
            sys.path.insert(0, path)
        if host:
            socket.gethostname = lambda: host
        if ahead:
            time.time = lambda: clock() + ahead
        with contextlib.redirect_stdout(said):
            code = main(arguments)
    finally:
        time.time, sys.path[:], socket.gethostname = clock, paths, name_of
        os.environ.clear()
        os.environ.update(kept)
    return code, said.getvalue()


def reds(text: str) -> list[str]:
    """Red lines, columns by one blank; they stand first."""
    lines = [" ".join(line.split()) for line in text.splitlines() if not line.strip().startswith("->")]
    found = [line for line in lines if line.startswith("red ")]
    assert lines[: len(found)] == found
    return found


def examine(worlds: Worlds, folder: Path, *arguments: str, **plants: Any) -> list[str]:
    """The one red line or more of two ranks; `all`, `zero` and `one` plant on every rank, on rank 0, on rank 1."""
    by_rank = {{"all": -1, "zero": 0, "one": 1}[name]: plant for name, plant in plants.items()}
    found = worlds[2].run(examined, ["--wait", "20", f"trainer.output_dir={folder}", *arguments], by_rank)
    (code, text), (other, silence) = found
    assert code == other == (1 if reds(text) else 0)
    assert silence == ""
    return reds(text) or text.splitlines()


def on_path(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_good_place(worlds: Worlds, tmp_path: Path) -> None:
    lines = examine(worlds, tmp_path / "out", "experiment=tiny")
    assert lines[-1] == "fit to run"
    text = "\n".join(lines)
    for words in (
        "packages alike",
        "2 ranks met at",
        "written and seen by all",
        "right on 2 ranks",
        "GB/s",
        "suit the plan",
    ):
        assert words in text
    assert not (tmp_path / "out").exists()


def test_an_unreachable_master_port(worlds: Worlds) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        port = closed.getsockname()[1]
        (code, text), (other, said) = worlds[2].run(examined, ["--wait", "2"], {1: {"MASTER_PORT": port}})
    assert (code, other) == (1, 1)
    assert re.match(
        rf"red meeting point rank 1 cannot reach 127.0.0.1:{port} \(127.0.0.1\) within 2 s: .*refused", reds(said)[0]
    )
    assert "the 2 ranks do not meet" in reds(text)[0]
    assert "1/2 clients joined" in reds(text)[0]


def test_two_ranks_on_one_gpu(worlds: Worlds, tmp_path: Path) -> None:
    tool = on_path(install(tmp_path / "bin"))
    (line,) = examine(worlds, tmp_path, all={**tool, "CUDA_VISIBLE_DEVICES": "0"})
    assert f"ranks 0, 1 are on one GPU (0, {FIRST}), and cluster.ranks_per_gpu=1" in line
    lines = examine(worlds, tmp_path, all={**tool, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert "NVIDIA H100 80GB HBM3; links NV18" in "\n".join(lines)
    assert lines[-1] == "fit to run"
    assert "fit to run" in examine(
        worlds, tmp_path, "cluster.ranks_per_gpu=2", all={**tool, "CUDA_VISIBLE_DEVICES": "0"}
    )


def test_a_ghost_on_a_device(worlds: Worlds, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "300"]) as ghost:
        try:
            tool = on_path(install(tmp_path / "bin", [(FIRST, ghost.pid, "python -m old, run", 70_000)]))
            (line,) = examine(worlds, tmp_path, all=tool)
        finally:
            ghost.kill()
    assert f"GPU 0 process {ghost.pid} (python -m old, run) holds 70000 MiB, and is not of this job" in line
    stray = on_path(install(tmp_path / "stray", used=40_000))
    (line,) = examine(worlds, tmp_path, all=stray)
    assert "40000 MiB are in use, but no process shows" in line


def test_a_driver_that_fails(worlds: Worlds, tmp_path: Path) -> None:
    (line,) = examine(worlds, tmp_path, all=on_path(install(tmp_path / "bin", broken=True)))
    assert "nvidia-smi fails: NVIDIA-SMI has failed because it couldn't communicate" in line


def test_unequal_packages(worlds: Worlds, tmp_path: Path) -> None:
    info = tmp_path / "other" / "transformers-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    (line,) = examine(worlds, tmp_path, one={"path": str(tmp_path / "other")})
    assert line.startswith("red versions all hosts transformers differs: ")
    assert "9.9.9 on" in line


def test_a_clock_that_is_wrong(worlds: Worlds, tmp_path: Path) -> None:
    (line,) = examine(worlds, tmp_path, one={"ahead_s": -40.0, "host": "other"})
    assert "host other its clock is 40.0 s behind rank 0's" in line


def test_another_world_size_than_the_plan(worlds: Worlds, tmp_path: Path) -> None:
    lines = examine(worlds, tmp_path, "experiment=tiny", "cluster.nodes=2", "cluster.gpus_per_node=8")
    assert lines == ["red plan 2 ranks cluster.nodes=2, but 1 host(s) started; start 2 or drop cluster.nodes"]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "readonly"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_folder(worlds: Worlds, read_only: Path) -> None:
    (line,) = examine(worlds, read_only / "run")
    assert "cannot write: Read-only file system" in line
    assert "ranks 0, 1" in line


@pytest.mark.netns
def test_a_host_name_that_means_the_host_itself() -> None:
    """Two hosts; node2 says that its own name is 127.0.0.1, where node1 would look for it in vain."""
    skip_without_namespaces()
    with Hosts(2) as hosts:
        hosts.resolve(1, {"node2": "127.0.0.1"})
        code, text = on_hosts(hosts)
        assert code == [1, 1]
        (line,) = reds(text)
        assert "node2 resolves to 127.0.0.1, where no other host finds it; its address is " + hosts.addresses[1] in line
        hosts.resolve(1)
        code, text = on_hosts(hosts)
        assert code == [0, 0]
        assert "between hosts" in text


def on_hosts(hosts: Hosts) -> tuple[list[int], str]:
    """The doctor on one rank a host."""
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29511"}
    env |= {"MASTER_ADDR": hosts.addresses[0], "OMP_NUM_THREADS": "1"}
    ranks = [
        hosts.start(at, [sys.executable, "-m", "spmd_rl.doctor", "--wait", "60"], env={**env, "RANK": str(at)},
                    stdout=subprocess.PIPE)
        for at in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said[0]


def test_what_nvidia_smi_says() -> None:
    assert _links(TOPOLOGY) == ["NV18"]
    cards = [Gpu(i, f"GPU-{i}{i}", "x", 1, 0, "1", "") for i in range(4)]
    os.environ["CUDA_VISIBLE_DEVICES"] = "3,GPU-11"
    try:
        assert [device_of(at, 1, cards) for at in range(3)] == [cards[3], cards[1], None]
        assert device_of(3, 2, cards) == cards[1]
        del os.environ["CUDA_VISIBLE_DEVICES"]
        assert device_of(2, 1, cards) == cards[2]
    finally:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert device_of(0, 1, cards) is None
    assert App("u", 1, "n", 2).used == 2


def test_a_slow_link() -> None:
    found = judge([(0, 1, "inside a"), (1, 2, "inside a"), (2, 0, "inside a")], [300.0, 310.0, 40.0])
    assert [(f.level, f.what) for f in found] == [
        ("yellow", "rank 2 to 0: 40 GB/s, the median inside a is 300"),
        ("green", "3 links, 40 to 310 GB/s"),
    ]
