"""On a real Slurm of two and of four hosts: a run survives whatever ends its job, and says first what failed first."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spmd_rl.observe.jsonl import read_metrics
from spmd_rl.observe.metrics import deterministic
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm, skip_without_slurm
from tests.trainer import launched
from tests.world import Worlds

pytestmark = pytest.mark.slurm
HERE = Path(__file__).parent
STEPS = 24
RUN = [
    "experiment=tiny",
    f"reward.functions=['{HERE / 'slow.py'}:digits']",
    "observe.trackers=[jsonl]",
    "data.val.task=null",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "trainer.device=cpu",
    "trainer.save_freq=0",
    f"trainer.total_training_steps={STEPS}",
]
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE.parents[1])}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Three hosts, of which each job takes two, the first ones if they may; a preempted job has half a minute."""
    skip_without_slurm()
    with Hosts(3) as hosts, Slurm(hosts, tmp_path_factory.mktemp("slurm"), grace_s=30) as slurm:
        yield slurm


def launch(slurm: Slurm, folder: Path, *words: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """`spmd-rl launch --on slurm …` as a user calls it."""
    variables = ",".join(f"{name}: '{value}'" for name, value in {**ENV, **(env or {})}.items())
    command = [sys.executable, "-m", "spmd_rl.cli", "launch", "--on", "slurm", *RUN, f"trainer.output_dir={folder}"]
    environment = {**slurm.environment, **ENV}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, f"cluster.env={{{variables}}}", *words], env=environment, text=True, **pipes)


def submit(slurm: Slurm, folder: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """The job's number."""
    said, complaint = launch(slurm, folder, *words, env=env).communicate(timeout=60)
    assert said.startswith("job "), complaint
    return said.split()[1].rstrip(":")


def lines(folder: Path) -> list[dict[str, object]]:
    file = folder / "metrics.jsonl"
    return [deterministic(row) for row in read_metrics(file)] if file.exists() else []


def differences(got: list[dict[str, object]], wanted: list[dict[str, object]]) -> dict[object, object]:
    """Step to what differs there; the steps themselves when they do."""
    if [row["step"] for row in got] != [row["step"] for row in wanted]:
        return {"steps": ([row["step"] for row in got], [row["step"] for row in wanted])}
    both = {mine["step"]: (mine, true) for mine, true in zip(got, wanted, strict=True) if mine != true}
    return {
        step: {key: (mine.get(key), true.get(key)) for key in mine | true if mine.get(key) != true.get(key)}
        for step, (mine, true) in both.items()
    }


def until(condition: Callable[[], bool], timeout_s: float, log: Path) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(log.read_text(encoding="utf-8")[-3000:] if log.exists() else "no log")
        time.sleep(0.1)


def rank_pids(hosts: Hosts, host: int) -> list[int]:
    """The ranks that run on a host, without the torchrun that may have forked them, whose words they have."""
    found = {}
    for pid in hosts.pids(host):
        with contextlib.suppress(OSError):
            if b"spmd_rl.train" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [pid for pid in found if pid not in found.values()]


def test_requeue_time_limit_preemption_and_a_killed_rank_lose_nothing(
    two: Slurm, worlds: Worlds, tmp_path: Path
) -> None:
    """Of 2 × 2 ranks. A host that is back has its old ranks, wherever it is listed; a new one takes the vacancy."""
    folder, slow = tmp_path / "run", tmp_path / "slow"
    slow.write_text("1.4")  # a step takes six seconds, four replies a rank: none of the parts reaches the end
    asked = ["cluster.nodes=2", "cluster.gpus_per_node=2", "cluster.retries=1"]
    limit = ["cluster.time_h=1", "cluster.warning_s=300"]
    job = submit(two, folder, *asked, *limit, env={"SLOW_REWARD": str(slow)})
    log = folder / "slurm" / f"{job}_0_log.out"

    def one_more_step() -> int:
        done = len(lines(folder))
        until(lambda: len(lines(folder)) > done, 300, log)
        return len(lines(folder))

    def until_ranks_are_on(*hosts: str) -> None:
        wanted = [host for host in hosts for _ in range(2)]
        until(lambda: [r["host"] for r in json.loads((folder / "status.json").read_text())["ranks"]] == wanted, 60, log)

    def attempts() -> list[str]:
        return sorted(found.name for found in (folder / "slurm" / f"{job}.attempts").iterdir())

    one_more_step()
    until_ranks_are_on("node1", "node2")
    minutes = int(two.job(job)["RunTime"].split(":")[1])
    two.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 5}")  # so the warning is due
    two.start_now(job, timeout_s=300)  # saved, and queued again by the job itself
    assert "SIGUSR2: the rank ended with status 0" in log.read_text()
    two.run("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")

    one_more_step()
    two.run("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=replaced")
    two.run("scontrol", "requeue", job)
    two.start_now(job)

    one_more_step()
    until_ranks_are_on("node3", "node2")
    assert "attempt 2: task 0 on node2\n" in log.read_text()  # Slurm lists node2, node3
    two.run("scontrol", "update", "NodeName=node1", "State=RESUME")
    two.run("scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=replaced")
    two.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    two.start_now(job)

    done = one_more_step()
    until_ranks_are_on("node1", "node2")
    os.kill(rank_pids(two.hosts, 1)[0], signal.SIGKILL)
    two.start_now(job)  # cluster.retries=1
    assert "ended with SIGKILL" in (folder / "slurm" / f"{job}.failure.txt").read_text().splitlines()[0]
    assert done < STEPS

    slow.write_text("0")
    assert two.wait(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", timeout_s=300)["JobState"] == "COMPLETED", (
        log.read_text()
    )
    assert attempts() == ["0", "1", "2", "3", "4"]

    two.run("scontrol", "update", "NodeName=node3", "State=RESUME")
    whole = tmp_path / "whole"
    plain = [*RUN, f"trainer.output_dir={whole}"]
    assert worlds[4].run(launched.train_quietly, plain) == [0] * 4
    assert differences(lines(folder), lines(whole)) == {}


def test_the_first_failing_ranks_traceback_comes_first(two: Slurm, tmp_path: Path) -> None:
    """Rank 3 of 2 × 2 raises in its second step, also when it is started again after the step that was saved."""
    roles = f"trainer.roles={{rollout: '{HERE / 'faulty.py'}:rollout'}}"
    asked = ["cluster.nodes=2", "cluster.gpus_per_node=2", "cluster.retries=1", "trainer.save_freq=1"]
    process = launch(two, tmp_path, "--follow", *asked, roles)
    assert process.stdout is not None
    job = process.stdout.readline().split()[1].rstrip(":")
    two.start_now(job, timeout_s=300)
    _, complaint = process.communicate(timeout=300)
    assert process.returncode == 1
    assert two.job(job)["JobState"] == "FAILED"
    shown = [line for line in complaint.splitlines() if not line.startswith("[job ")]
    first = shown[0]
    assert first.startswith("rank 3 on node2 failed first")
    assert first.endswith("ValueError: planted on rank 3")
    assert shown[1] == "Traceback (most recent call last):"
    assert shown[-1] == f"its whole log: {tmp_path}/slurm/{job}_3_log.out"
    assert sum(line.startswith("rank 3 on node2 failed first") for line in shown) == 2
    assert "planted on rank 3" in Path(f"{tmp_path}/slurm/{job}_3_log.out").read_text()
    assert [row["step"] for row in lines(tmp_path)] == [1, 2]


def test_two_kinds_of_hosts_and_torchrun_on_each(worlds: Worlds, tmp_path: Path) -> None:
    """Four hosts, of which a job takes three, in the order of its node classes; asked to stop, it is queued again."""
    skip_without_slurm()
    folder, slow = tmp_path / "run", tmp_path / "slow"
    slow.write_text("1")
    kinds = ["cluster.nodes=3", "cluster.gpus_per_node=[1,1,2]", "cluster.node_tags=[big,big,small]"]
    with Hosts(4) as hosts, Slurm(hosts, tmp_path / "slurm", features=["big", "small", "big", "small"]) as slurm:
        job = submit(slurm, folder, *kinds, "cluster.srun=node", env={"SLOW_REWARD": str(slow)})
        log = folder / "slurm" / f"{job}_0_log.out"
        until(lambda: lines(folder) != [], 300, log)
        assert [len(rank_pids(hosts, host)) for host in range(4)] == [1, 2, 1, 0]
        slurm.run("scancel", "--signal=USR2", job)
        slurm.start_now(job)
        slow.write_text("0")
        assert slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=300)["JobState"] == "COMPLETED", (
            log.read_text()
        )
    logs = [(folder / "slurm" / f"{job}_{rank}_log.out").read_text() for rank in range(3)]
    for attempt in (0, 1):
        for rank, host in enumerate(("node1", "node3", "node2")):
            assert f"attempt {attempt}: task {rank} on {host}\n" in logs[rank]
    assert [row["step"] for row in lines(folder)] == [*range(1, STEPS + 1)]


def test_torchx_on_slurm(two: Slurm, tmp_path: Path) -> None:
    words = ["cluster.scheduler=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", f"trainer.output_dir={tmp_path}"]
    variables = ",".join(f"{name}: '{value}'" for name, value in ENV.items())
    job = ["cluster.memory_gib=2", "cluster.partition=debug"]
    command = [sys.executable, "-m", "spmd_rl.cli", "launch", "--on", "torchx", *RUN, *words, *job]
    short = ["trainer.total_training_steps=1", f"cluster.env={{{variables}}}"]
    place = {"env": {**two.environment, **ENV}, "cwd": tmp_path}  # torchx puts the logs there
    done = subprocess.run([*command, *short], **place, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("slurm://"), done.stderr
    number = done.stdout.strip().rpartition("/")[2]
    logs = "".join(path.read_text() for path in tmp_path.glob("slurm-*.err"))
    assert two.wait(number, "COMPLETED", "FAILED", "CANCELLED", timeout_s=300)["JobState"] == "COMPLETED", logs
    assert [row["step"] for row in lines(tmp_path)] == [1]


def test_the_script_written_by_hand(two: Slurm, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("0.7")
    two.environment |= {**ENV, "SLOW_REWARD": str(slow), "PYTHON": sys.executable}
    words = [str(HERE.parents[1] / "launch" / "job.sbatch"), *RUN, f"trainer.output_dir={tmp_path}"]
    said = two.run("sbatch", "-N2", "--ntasks-per-node=1", f"--output={tmp_path}/log", *words)
    job = said.split()[-1]
    until(lambda: lines(tmp_path) != [], 300, tmp_path / "log")
    two.run("scancel", "--batch", "--signal=USR1", job)
    two.start_now(job)
    slow.write_text("0")
    ended = two.wait(job, "COMPLETED", "FAILED", "CANCELLED", timeout_s=300)
    assert ended["JobState"] == "COMPLETED", (tmp_path / "log").read_text()
    assert ended["Restarts"] == "1"
    assert [row["step"] for row in lines(tmp_path)] == [*range(1, STEPS + 1)]
