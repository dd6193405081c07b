"""torchx: the component `grpo`, and the same job for `spmd-rl launch --on torchx`.

    torchx run -s local_cwd launch/components.py:grpo experiment=tiny cluster.nodes=2 cluster.gpus_per_node=2
    torchx run -s kubernetes -cfg queue=default launch/components.py:grpo cluster=kubernetes experiment=gsm8k …

Hosts of one kind are one role; the ranks are numbered through the roles in order.
"""

import re
import shlex
import sys
from collections import Counter
from typing import Any

import torchx.specs as specs
from torchx.runner import Runner, get_runner

from spmd_rl.cli import find_module
from spmd_rl.config import ConfigError

find_module("launch")  # where this file is run by its path, its package is not imported yet

from spmd_rl._launch.spec import HostGroup, LaunchSpec, mounts  # noqa: E402

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""The label by which Kubernetes, and torchx for AWS Batch, know a kind of host: the plan's node class."""
GIB_A_RANK = 4
QUEUED = ("kubernetes", "kubernetes_mcad", "aws_batch")
"""Schedulers that have a queue."""


def grpo(*arguments: str) -> specs.AppDef:
    """Train (GRPO unless the config says otherwise), on the hosts of the config group `cluster`.

    Args:
        arguments: group=preset and key=value, as for spmd-rl train
    """
    from spmd_rl._launch.command import read_spec

    spec, _ = read_spec(list(arguments))
    if spec is None:
        sys.exit(0)
    return app(spec)


def app(spec: LaunchSpec) -> specs.AppDef:
    """The job as torchx knows it."""
    roles, first, seen = [], 0, Counter[str]()
    for group in spec.groups:
        name = role_name(group)
        seen[name] += 1
        roles.append(role(spec, group, name if seen[name] == 1 else f"{name}again{seen[name]}", first))
        first += group.nodes
    return specs.AppDef(name=spec.name, roles=roles)


def role_name(group: HostGroup) -> str:
    """Letters and digits only: Volcano makes a shell variable of it that leads the other hosts to the first one."""
    name = re.sub(r"[^a-z0-9]", "", group.tag.lower()) or "hosts"
    return name if name[0].isalpha() else f"hosts{name}"


def role(spec: LaunchSpec, group: HostGroup, name: str, first: int) -> specs.Role:
    """One kind of host; `first` is the number of its first one."""
    cluster = spec.cluster
    memory = cluster.memory_gib or GIB_A_RANK * group.ranks
    return specs.Role(
        name=name,
        image=cluster.image or "",
        entrypoint="bash",
        args=["-c", script(spec, group, first)],
        num_replicas=group.nodes,
        env=spec.env | ({"SPMD_RL_NODE_TAG": group.tag} if group.tag else {}),
        port_map={"c10d": cluster.master_port},
        max_retries=cluster.retries,
        retry_policy=specs.RetryPolicy.APPLICATION,
        resource=specs.Resource(
            cpu=(cluster.cpus_per_rank or 1) * group.ranks,
            gpu=group.gpus,
            memMB=round(memory * 1024),
            capabilities={INSTANCE_TYPE: group.tag} if group.tag else {},
        ),
        mounts=[specs.BindMount(m.source, m.target, m.read_only) for m in mounts(cluster)],
    )


def script(spec: LaunchSpec, group: HostGroup, first: int) -> str:
    """What a host does: torchrun with its number, and with the address that the scheduler gives the first one.

    `${replica_id}` and `${rank0_env}` are torchx's; `$$` becomes the shell's `$`. On AWS Batch a replica's number is
    the whole job's already.
    """
    program = shlex.join(spec.program).replace("$", "$$")
    python = shlex.quote(spec.python)
    start = f"{python} -m spmd_rl.torchrun --nproc-per-node {group.ranks}"
    if spec.nodes == 1:
        return f"exec {start} --standalone {program}"
    number = f"$${{AWS_BATCH_JOB_NODE_INDEX:-$$(({first} + {specs.macros.replica_id}))}}"
    address = f"$${{{specs.macros.rank0_env}:-localhost}}"
    meeting = f"--nnodes {spec.nodes} --node-rank {number} --master-addr {address}"
    return f"exec {start} {meeting} --master-port {spec.cluster.master_port} {program}"


def settings(spec: LaunchSpec) -> dict[str, Any]:
    """The scheduler's own settings."""
    cluster, tags = spec.cluster, {group.tag for group in spec.groups}
    if cluster.scheduler == "slurm" and len(tags) > 1:
        raise ConfigError(
            f"torchx's Slurm has one constraint for all hosts, but cluster.node_tags={sorted(tags)}: --on slurm"
        )
    queue = {"queue": cluster.queue} if cluster.scheduler in QUEUED and cluster.queue else {}
    slurm: dict[str, Any] = {}
    if cluster.scheduler == "slurm":
        minutes = None if cluster.time_h is None else str(round(cluster.time_h * 60))
        asked = {"partition": cluster.partition, "time": minutes, "constraint": tags.pop() or None}
        slurm = {name: value for name, value in asked.items() if value is not None}
    return queue | slurm | dict(cluster.scheduler_args)


def dry_run(spec: LaunchSpec, runner: Runner, *, ask: bool) -> "specs.AppDryRunInfo[Any]":
    """What torchx would submit. Raises ConfigError for what it refuses.

    With `ask`, a newer torchx has Kubernetes check the request; without, no cluster is needed.
    """
    scheduler = spec.cluster.scheduler
    if scheduler not in runner.scheduler_backends():
        raise ConfigError(f"cluster.scheduler={scheduler}: torchx has {', '.join(runner.scheduler_backends())}")
    asks = runner.scheduler_run_opts(scheduler).get("validate_spec") is not None
    unasked = {"validate_spec": False} if asks and not ask else {}
    try:
        return runner.dryrun(app(spec), scheduler, unasked | settings(spec))
    except ModuleNotFoundError as error:
        raise ConfigError(f"cluster.scheduler={scheduler} needs {error.name}: pip install {error.name}") from error
    except specs.InvalidRunConfigException as error:
        raise ConfigError(f"cluster.scheduler={scheduler}: {error}") from error


def text(spec: LaunchSpec) -> str:
    """The request, as torchx prints it."""
    with get_runner() as runner:
        return f"{dry_run(spec, runner, ask=False)}\n"


def submit(spec: LaunchSpec, follow: bool) -> tuple[str, int]:
    """(torchx's handle of the job, status): with `follow` after its end, else 0 at once."""
    with get_runner() as runner:
        handle = runner.schedule(dry_run(spec, runner, ask=True))
        print(handle, flush=True)
        if not follow and spec.cluster.scheduler != "local_cwd":  # local processes end with this one
            return handle, 0
        status = runner.wait(handle, wait_interval=1)
        print(status, file=sys.stderr)
        return handle, 0 if status is not None and status.state == specs.AppState.SUCCEEDED else 1
