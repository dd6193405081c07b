"""What is launched, what is refused, and torchrun's command lines."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl import cli
from spmd_rl._launch import torchrun
from spmd_rl._launch.spec import HostGroup, LaunchSpec, mounts
from spmd_rl.config import ConfigError
from spmd_rl.config.load import compose

TINY = ["experiment=tiny", "trainer.device=cpu"]


def spec(*overrides: str) -> LaunchSpec:
    words = [*TINY, *overrides]
    return LaunchSpec.from_config(compose(words), "spmd_rl.train", words)


def after_python(words: list[str]) -> list[str]:
    """torchrun's own words."""
    assert words[:3] == [sys.executable, "-m", "spmd_rl.torchrun"]
    return words[3 : words.index("-m", 3)]


def test_hosts_that_are_alike_stand_together() -> None:
    tags = "cluster.node_tags=[h100,h100,l40,h100]"
    found = spec("cluster.gpus_per_node=[4,4,2,4]", "cluster.nodes=4", "cluster.ranks_per_gpu=2", tags)
    assert found.groups == (HostGroup(2, 8, 0, "h100"), HostGroup(1, 4, 0, "l40"), HostGroup(1, 8, 0, "h100"))
    assert (found.nodes, found.size) == (4, 28)
    assert [found.group_of(node).tag for node in range(4)] == ["h100", "h100", "l40", "h100"]
    on_gpus = LaunchSpec.from_config(compose(["experiment=tiny", "cluster.gpus_per_node=2"]), "spmd_rl.train", [])
    assert on_gpus.groups == (HostGroup(1, 2, 2),)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "cluster.gpus_per_node is not set"),
        (["cluster.gpus_per_node=4", "actor.engine.fsdp.fsdp_size=3"], "fsdp_size=3"),
        (["cluster.gpus_per_node=2", "cluster.nodes=2", "cluster.min_nodes=3"], "min_nodes=3 is more than"),
        (
            ["cluster.gpus_per_node=2", "cluster.nodes=3", "cluster.min_nodes=2", "actor.engine.fsdp.fsdp_size=3"],
            "cluster.min_nodes=2, but on 2 of 3 hosts: actor.engine.fsdp.fsdp_size=3",
        ),
        (["cluster.gpus_per_node=[2,1]", "cluster.min_nodes=1"], "must be all alike"),
    ],
)
def test_what_cannot_be_planned_is_not_launched(
    overrides: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.execvp", lambda *_: pytest.fail("torchrun was started"))
    monkeypatch.setenv("PATH", "")  # nothing could be submitted either
    for launcher in ("torchrun", "slurm"):
        assert cli.main(["launch", "--on", launcher, *TINY, *overrides]) == 2
        assert says in capsys.readouterr().err


def test_a_launcher_that_is_not_known_is_named_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--on", "k8s"]) == 2
    assert capsys.readouterr().err == "error: --on k8s is unknown; known: torchrun, slurm, torchx\n"


def test_torchrun_on_one_host() -> None:
    words = torchrun.command(spec("cluster.gpus_per_node=2", "cluster.retries=1"))
    assert after_python(words) == ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    assert words[words.index("-m", 3) :][:4] == ["-m", "spmd_rl.train", *TINY]


def test_torchrun_on_several_hosts() -> None:
    hosts = ["cluster.nodes=3", "cluster.gpus_per_node=2", "cluster.master_addr=10.0.0.1", "cluster.master_port=1234"]
    met = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:1234", "--rdzv-id", "tiny", "--nproc-per-node", "2"]
    assert after_python(torchrun.command(spec(*hosts))) == ["--nnodes", "3", *met]

    elastic = spec(*hosts, "cluster.min_nodes=2")
    assert after_python(torchrun.command(elastic)) == ["--nnodes", "2:3", *met]
    assert torchrun.environment(elastic) == torchrun.SHARED_STORE
    assert elastic.program[-1] == "cluster.nodes=null"

    words = after_python(torchrun.command(spec(*hosts, "cluster.rendezvous=static"), node_rank=2))
    numbered = ["--node-rank", "2", "--master-addr", "10.0.0.1", "--master-port", "1234"]
    assert words == ["--nnodes", "3", *numbered, "--nproc-per-node", "2"]

    uneven = spec("cluster.gpus_per_node=[4,2]", "cluster.master_addr=a")
    assert [after_python(torchrun.command(uneven, node))[-1] for node in (0, 1)] == ["4", "2"]


@pytest.mark.parametrize(
    ("overrides", "node", "says"),
    [
        (["cluster.nodes=2"], None, "2 hosts need cluster.master_addr"),
        (["cluster.nodes=2", "cluster.master_addr=a", "cluster.rendezvous=static"], None, "needs --node-rank"),
        (["cluster.nodes=2", "cluster.master_addr=a"], 2, "--node-rank 2: the hosts are 0..1"),
        (["cluster.nodes=2", "cluster.min_nodes=1", "cluster.rendezvous=static"], 0, "cluster.min_nodes=1 needs"),
    ],
)
def test_what_torchrun_could_not_do(overrides: list[str], node: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        torchrun.command(spec("cluster.gpus_per_node=2", *overrides), node)


def test_mounts() -> None:
    cluster = spec("cluster.gpus_per_node=1", "cluster.mounts=['/data:/data:ro','/home/me:/work']").cluster
    assert [(m.source, m.target, m.read_only) for m in mounts(cluster)] == [
        ("/data", "/data", True),
        ("/home/me", "/work", False),
    ]
    cluster.mounts = ["/data"]
    with pytest.raises(ConfigError, match="'/data' is not source:target"):
        list(mounts(cluster))


def test_dry_run_prints_what_would_be_executed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "cluster.gpus_per_node=2", "cluster.env={NAME: 'a b'}"]
    assert cli.main(["launch", "--dry-run", "eval", *words]) == 0
    line = shlex.split(capsys.readouterr().out)
    assert line[0] == "NAME=a b"
    assert line[line.index("-m", 4) :] == ["-m", "spmd_rl.evaluate", *words]


def test_a_launched_run_trains(tmp_path: Path) -> None:
    words = [*TINY, "cluster.gpus_per_node=2", "cluster.env.OMP_NUM_THREADS=1", f"trainer.output_dir={tmp_path}"]
    quick = ["trainer.total_training_steps=1", "data.val.task=null", "observe.trackers=[jsonl]"]
    command = [sys.executable, "-m", "spmd_rl.cli", "launch", *words, *quick]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "--nproc-per-node 2" in done.stdout
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
