"""Slurm's job script: what is asked for, compared with files; and what cannot be one job."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl import cli
from spmd_rl._launch import slurm
from spmd_rl._launch.spec import LaunchSpec
from spmd_rl.config import ConfigError
from spmd_rl.config.load import compose
from tests.launch.golden import agrees

RUN = ["experiment=tiny", "trainer.output_dir=/shared/run", "cluster.python=/opt/python"]


def spec(*overrides: str) -> LaunchSpec:
    words = [*RUN, *overrides]
    return LaunchSpec.from_config(compose(words), "spmd_rl.train", words)


def options(script: str) -> dict[str, str]:
    """What the first part of a job asks for."""
    head = script.split("#SBATCH hetjob")[0]
    asked = [shlex.split(line)[1] for line in head.splitlines() if line.startswith("#SBATCH ")]
    return {name[2:]: value for name, _, value in (word.partition("=") for word in asked)}


def srun(script: str) -> list[str]:
    return shlex.split(next(line for line in script.splitlines() if line.startswith("srun ")))


GOLDEN = {
    "plain": ["cluster.nodes=2", "cluster.gpus_per_node=8"],
    "everything": [
        "cluster.nodes=4",
        "cluster.gpus_per_node=8",
        "cluster.node_tags=[h100,h100,h100,h100]",
        "cluster.time_h=12",
        "cluster.account=lab",
        "cluster.partition=gpu",
        "cluster.qos=high",
        "cluster.cpus_per_rank=12",
        "cluster.memory_gib=900",
        "cluster.exclusive=true",
        "cluster.retries=2",
        "cluster.links=5",
        "cluster.srun=node",
        "cluster.sbatch={reservation: r1}",
        "cluster.srun_args=['--mpi=none']",
        "cluster.env={NCCL_DEBUG: WARN}",
        "cluster.image=/images/rl.sqsh",
        "cluster.mounts=['/data:/data:ro']",
    ],
    "two_kinds": ["cluster.nodes=3", "cluster.gpus_per_node=[8,8,4]", "cluster.node_tags=[h100,h100,l40]"],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_script_as_a_whole(name: str) -> None:
    text = slurm.text(spec(*GOLDEN[name])).replace(shlex.quote(sys.executable), "PYTHON")
    agrees(f"slurm_{name}.sh", text)


def test_a_dry_run_needs_no_slurm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    words = [*RUN, *GOLDEN["plain"]]
    assert cli.main(["launch", "--on", "slurm", "--dry-run", *words]) == 0
    assert capsys.readouterr().out == slurm.text(spec(*GOLDEN["plain"]))
    assert cli.main(["launch", "--on", "slurm", *words]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", GOLDEN)
def test_the_script_is_a_script(name: str, tmp_path: Path) -> None:

    file = tmp_path / "job.sh"
    file.write_text(slurm.text(spec(*GOLDEN[name])), encoding="utf-8")
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False).stderr == ""


def test_containers() -> None:
    image = ["cluster.gpus_per_node=2", "cluster.image=rl.sif", "cluster.mounts=['/a:/a','/b:/c:ro']"]
    pyxis = srun(slurm.text(spec(*image)))
    assert {"--container-image=rl.sif", "--container-mounts=/a:/a,/b:/c:ro"} < set(pyxis)
    apptainer = srun(slurm.text(spec(*image, "cluster.container=apptainer")))
    entered = ["apptainer", "exec", "--nv", "--bind", "/a:/a,/b:/c:ro", "rl.sif", "/opt/python"]
    assert apptainer[apptainer.index("apptainer") :][:7] == entered
    on_cpu = srun(slurm.text(spec(*image, "cluster.container=apptainer", "trainer.device=cpu")))
    assert "--nv" not in on_cpu
    own = srun(slurm.text(spec(*image, "cluster.container='run -v {mounts} {image}'")))
    assert own[own.index("run") :][:5] == ["run", "-v", "/a:/a,/b:/c:ro", "rl.sif", "/opt/python"]
    with pytest.raises(ConfigError, match="neither pyxis nor apptainer"):
        slurm.text(spec(*image, "cluster.container=docker"))


def test_gpus_only_where_there_are_any() -> None:
    assert options(slurm.text(spec("cluster.gpus_per_node=4")))["gpus-per-node"] == "4"
    shared = options(slurm.text(spec("cluster.gpus_per_node=4", "cluster.ranks_per_gpu=2")))
    assert (shared["gpus-per-node"], shared["ntasks-per-node"]) == ("4", "8")
    assert "gpus-per-node" not in options(slurm.text(spec("cluster.gpus_per_node=4", "trainer.device=cpu")))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cluster.min_nodes=1", "cluster.nodes=2"], "cluster.min_nodes=1 is torchrun's"),
        (["cluster.warning_s=20"], "cluster.warning_s=20 must be above 20"),
        (["cluster.time_h=0.05"], "cluster.time_h=0.05 h must be longer than cluster.warning_s=180 s"),
    ],
)
def test_what_cannot_be_a_job(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        slurm.text(spec("cluster.gpus_per_node=2", *overrides))


def test_no_arrays_of_jobs_with_hosts_of_several_kinds() -> None:
    with pytest.raises(ConfigError, match="no arrays of jobs"):
        slurm.text(spec(*GOLDEN["two_kinds"], "cluster.links=2"))
