"""Slurm through submitit: the job script, its submission, and waiting for its end."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
from submitit.slurm.slurm import SlurmExecutor

from spmd_rl.config import ConfigError

from . import slurm_task, torchrun
from .spec import HostGroup, LaunchSpec, mounts, refuse

RESERVE_S = 20
"""Of the seconds between the warning and the time limit: what a run that is given up and the job script need."""
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "UNKNOWN",
)
"""Slurm's words for a job that will not go on."""
SETUP = """\
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
export SPMD_RL_ATTEMPT=LOGS/$job.attempts/${SLURM_RESTART_COUNT:-0}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 20000))
trap : TERM  # a polite end is for the tasks; this script goes on to the end of it"""
TEARDOWN = """\
status=$?
again=
if [[ -d $SPMD_RL_ATTEMPT/errors ]]; then
    { REPORT --failure "$SPMD_RL_ATTEMPT" || cat "$SPMD_RL_ATTEMPT"/errors/*; } | tee "$SPMD_RL_ATTEMPT/failure.txt"
    mv "$SPMD_RL_ATTEMPT/failure.txt" "LOGS/$job.failure.txt"
    failed=$(find "LOGS/$job.attempts" -name errors | wc -l)
    [[ $failed -le RETRIES ]] && again=1
elif [[ -e $SPMD_RL_ATTEMPT/interrupted ]]; then
    again=CONTINUE
fi
# A job that was cancelled, or that Slurm itself has queued again, is not RUNNING any more.
if [[ -n $again && $(squeue --noheader --job "$SLURM_JOB_ID" --format %T | head -n 1) == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status"""

DRY_RUN = """\
# To be read: the srun line loads what `spmd-rl launch` pickles when it submits. One to change: launch/job.sbatch"""
"""Under the script that is printed."""


class Executor(SlurmExecutor):
    """submitit's, for a `LaunchSpec`; hosts of several kinds become a heterogeneous job."""

    def __init__(self, spec: LaunchSpec) -> None:
        srun, prefix = container(spec)
        super().__init__(spec.output_dir / "slurm", python=shlex.join([*prefix, spec.python]))
        self.spec = spec
        self.update_parameters(**parameters(spec, srun))

    @classmethod
    def affinity(cls) -> int:
        """Rendering needs no Slurm."""
        return 2

    def _num_tasks(self) -> int:
        return self.spec.size if self.spec.cluster.srun == "rank" else self.spec.nodes

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        script = super()._make_submission_file_text(command, uid)
        if len(self.spec.groups) == 1:
            return script
        head, _, rest = script.partition("\n\n# setup")
        others = [self._part(group) for group in self.spec.groups[1:]]
        return "\n#SBATCH hetjob\n".join([head, *others]) + "\n\n# setup" + rest

    def _part(self, group: HostGroup) -> str:
        """The request for one more group of hosts."""
        wanted = {"job_name": self.spec.name, **of_group(self.spec, group)}
        shared = {k: v for k, v in self.parameters.items() if k in ("partition", "account", "qos", "mem", "time")}
        named = {**shared, **wanted}
        lines = [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value not in (None, False)]
        return "\n".join(f"#SBATCH {line}" for line in lines)


def check(spec: LaunchSpec) -> None:
    """Raise ConfigError for what cannot be one Slurm job."""
    cluster, mistakes = spec.cluster, []
    if cluster.min_nodes is not None:
        mistakes.append(f"cluster.min_nodes={cluster.min_nodes} is torchrun's: a Slurm job has all of its hosts")
    if cluster.links > 1 and len(spec.groups) > 1:
        mistakes.append(f"cluster.links={cluster.links}: Slurm has no arrays of jobs with hosts of several kinds")
    if cluster.warning_s <= RESERVE_S:
        mistakes.append(f"cluster.warning_s={cluster.warning_s} must be above {RESERVE_S}")
    if cluster.time_h is not None and cluster.time_h * 3600 <= cluster.warning_s:
        mistakes.append(
            f"cluster.time_h={cluster.time_h:g} h must be longer than cluster.warning_s={cluster.warning_s} s"
        )
    refuse(mistakes)


def parameters(spec: LaunchSpec, srun: list[str]) -> dict[str, Any]:
    """submitit's parameters of the job."""
    cluster = spec.cluster
    exports = [f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    logs = shlex.quote(str(spec.output_dir / "slurm"))
    several = [f"--het-group={','.join(str(i) for i in range(len(spec.groups)))}"] if len(spec.groups) > 1 else []
    cores = _cores(spec, spec.groups[0])
    own = [f"--cpus-per-task={cores}"] if cores and not several else []
    end = {
        "LOGS": logs,
        "REPORT": f"{shlex.quote(sys.executable)} -m spmd_rl.cli launch",
        "RETRIES": str(cluster.retries),
        "CONTINUE": "1" if cluster.links == 1 else "",
    }
    return {
        "job_name": spec.name,
        **of_group(spec, spec.groups[0]),
        "time": None if cluster.time_h is None else max(1, round(cluster.time_h * 60)),
        "mem": None if cluster.memory_gib is None else f"{round(cluster.memory_gib * 1024)}MB",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "exclusive": True if cluster.exclusive else None,
        "signal_delay_s": cluster.warning_s,
        "stderr_to_stdout": True,
        "array_parallelism": 1,
        "wckey": None,
        "setup": [*_filled(SETUP, {"LOGS": logs}), *exports],
        "teardown": _filled(TEARDOWN, end),
        "srun_args": ["--open-mode=append", "--kill-on-bad-exit=1", *several, *own, *srun, *cluster.srun_args],
        "additional_parameters": {"requeue": True, **cluster.sbatch},
    }


def of_group(spec: LaunchSpec, group: HostGroup) -> dict[str, Any]:
    """What differs between groups of hosts."""
    return {
        "nodes": group.nodes,
        "ntasks_per_node": group.ranks if spec.cluster.srun == "rank" else 1,
        "gpus_per_node": group.gpus or None,
        "cpus_per_task": _cores(spec, group),
        "constraint": group.tag or None,
    }


def _cores(spec: LaunchSpec, group: HostGroup) -> int | None:
    cores = spec.cluster.cpus_per_rank
    return cores * (1 if spec.cluster.srun == "rank" else group.ranks) if cores else None


def container(spec: LaunchSpec) -> tuple[list[str], list[str]]:
    """(arguments of srun, words before the interpreter) that put the tasks into cluster.image."""
    cluster = spec.cluster
    if not cluster.image:
        return [], []
    folders = ",".join(str(mount) for mount in mounts(cluster))
    if cluster.container == "pyxis":
        return [f"--container-image={cluster.image}", *([f"--container-mounts={folders}"] if folders else [])], []
    if cluster.container == "apptainer":
        gpus = ["--nv"] if any(group.gpus for group in spec.groups) else []
        return [], ["apptainer", "exec", *gpus, *(["--bind", folders] if folders else []), cluster.image]
    words = shlex.split(cluster.container)
    if not any("{image}" in word for word in words):
        raise ConfigError(
            f"cluster.container={cluster.container!r} is neither pyxis nor apptainer nor a command with {{image}} in it"
        )
    return [], [word.replace("{image}", cluster.image).replace("{mounts}", folders) for word in words]


def task(spec: LaunchSpec) -> slurm_task.Task:
    """What every task of the job does."""
    words = [spec.python, "-u", *spec.program]
    if spec.cluster.srun == "node":
        meeting = torchrun.static(str(spec.nodes), "$SLURM_NODEID", "$MASTER_ADDR", "$MASTER_PORT")
        words = [spec.python, *torchrun.torchrun(meeting, "$SPMD_RL_RANKS"), *spec.program]
    groups = [spec.group_of(node) for node in range(spec.nodes)]
    hosts = [{"SPMD_RL_NODE_TAG": group.tag, "SPMD_RL_RANKS": str(group.ranks)} for group in groups]
    return slurm_task.Task(words, spec.cluster.warning_s - RESERVE_S, hosts)


def text(spec: LaunchSpec) -> str:
    """The job script, as `submit` hands it to sbatch with the pickle that its srun line loads, and what tasks run."""
    check(spec)
    executor = Executor(spec)
    if spec.cluster.links > 1:
        executor.parameters["map_count"] = spec.cluster.links
    script = executor._make_submission_file_text(executor._submitit_command_str, "")
    return f"{script}\n{DRY_RUN}\n# every task runs: {shlex.join(task(spec).command)}\n"


def submit(spec: LaunchSpec) -> str:
    """Submit the job; its id. Raises ConfigError where sbatch is missing or says no."""
    check(spec)
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch here: launch --on slurm from a login node, or look at it with --dry-run")
    cloudpickle.register_pickle_by_value(slurm_task)
    executor, work = Executor(spec), task(spec)
    executor.folder.mkdir(parents=True, exist_ok=True)
    try:
        if spec.cluster.links == 1:
            return str(executor.submit(work).job_id)
        return str(executor.submit_array([work] * spec.cluster.links)[0].job_id).partition("_")[0]
    except Exception as error:
        raise ConfigError(f"sbatch refused the job: {_said(error)}") from error


def follow(spec: LaunchSpec, job: str) -> int:
    """Show rank 0's log until the job has ended, and when an attempt has failed, its first failing rank's traceback.

    The job's status: 0 when it has come to its end.
    """
    logs, shown, told, state = spec.output_dir / "slurm", 0, 0.0, ""
    while state not in ENDED:
        now = state_of(job)
        shown = _show(logs / f"{job}_0_log.out", shown)
        told = _tell(logs / f"{job}.failure.txt", told)
        if now != state:
            print(f"[job {job}: {now}]", file=sys.stderr, flush=True)
        state = now
        time.sleep(0 if now in ENDED else 1)
    return 0 if state == "COMPLETED" else 1


def state_of(job: str) -> str:
    """The job's state in Slurm's word; UNKNOWN when Slurm has forgotten it."""
    done = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False)
    found = re.search(r"JobState=(\w+)", done.stdout)
    return found[1] if found else "UNKNOWN"


def _show(log: Path, shown: int) -> int:
    """Print what the log has beyond `shown` bytes; its size now."""
    if not log.exists():
        return shown
    with log.open("rb") as file:
        file.seek(shown)
        new = file.read()
    print(new.decode(errors="replace"), end="", flush=True)
    return shown + len(new)


def _tell(failure: Path, told: float) -> float:
    """Print the report of a failed attempt when it is newer than `told`; its time."""
    if not failure.exists() or failure.stat().st_mtime <= told or not (text := failure.read_text(encoding="utf-8")):
        return told
    print(text, end="", file=sys.stderr, flush=True)
    return failure.stat().st_mtime


def _filled(text: str, values: dict[str, str]) -> list[str]:
    return re.sub(rf"\b({'|'.join(values)})\b", lambda found: values[found[0]], text).splitlines()


def _said(error: Exception) -> str:
    lines: Iterator[str] = (line for line in str(error).splitlines() if "error" in line.lower())
    return next(lines, str(error))
