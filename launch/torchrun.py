"""torchrun's command line, for this host or for one of several."""

import os
import shlex
from collections.abc import Sequence

from spmd_rl.config import ConfigError

from .spec import LaunchSpec, refuse

SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, ranks that go on after a host was lost would look for the store of the rendezvous that died with it."""


def check(spec: LaunchSpec, node_rank: int | None) -> None:
    """Raise ConfigError for what torchrun could not do."""
    cluster, mistakes = spec.cluster, []
    static = cluster.rendezvous == "static" or len({group.ranks for group in spec.groups}) > 1
    if spec.nodes > 1 and cluster.master_addr is None:
        mistakes.append(f"{spec.nodes} hosts need cluster.master_addr, the address of the first one")
    if cluster.min_nodes is not None and static:
        mistakes.append(f"cluster.min_nodes={cluster.min_nodes} needs cluster.rendezvous=c10d and hosts that are alike")
    if spec.nodes > 1 and static and node_rank is None:
        mistakes.append("cluster.rendezvous=static (or hosts of different size) needs --node-rank on each host")
    if node_rank is not None and not 0 <= node_rank < spec.nodes:
        mistakes.append(f"--node-rank {node_rank}: the hosts are 0..{spec.nodes - 1}")
    refuse(mistakes)


def command(spec: LaunchSpec, node_rank: int | None = None) -> list[str]:
    """What to execute on a host. Raises ConfigError for what torchrun could not do."""
    check(spec, node_rank)
    cluster, group = spec.cluster, spec.group_of(node_rank or 0)
    if spec.nodes == 1:
        meeting = ["--standalone"]
    elif node_rank is not None:
        meeting = static(str(spec.nodes), str(node_rank), str(cluster.master_addr), str(cluster.master_port))
    else:
        hosts = f"{cluster.min_nodes}:{spec.nodes}" if cluster.min_nodes is not None else str(spec.nodes)
        meeting = c10d(hosts, f"{cluster.master_addr}:{cluster.master_port}", spec.name)
    return [spec.python, *torchrun(meeting, str(group.ranks), cluster.retries), *spec.program]


def torchrun(meeting: Sequence[str], ranks: str, restarts: int = 0) -> list[str]:
    """torchrun's words, without the interpreter and without what the ranks run."""
    again = ["--max-restarts", str(restarts)] if restarts else []
    return ["-m", "spmd_rl.torchrun", *meeting, "--nproc-per-node", ranks, *again]


def static(nodes: str, node_rank: str, address: str, port: str) -> list[str]:
    """Every host knows its number."""
    return ["--nnodes", nodes, "--node-rank", node_rank, "--master-addr", address, "--master-port", port]


def c10d(nodes: str, endpoint: str, name: str) -> list[str]:
    """Hosts come in any order; `nodes` may be a range."""
    return ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", name]


def environment(spec: LaunchSpec) -> dict[str, str]:
    """What torchrun gets besides this process's environment."""
    return (SHARED_STORE if spec.cluster.min_nodes is not None else {}) | spec.env


def text(spec: LaunchSpec, node_rank: int | None = None) -> str:
    """The whole line for a shell."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environment(spec).items()]
    return " ".join([*words, shlex.join(command(spec, node_rank))])


def execute(spec: LaunchSpec, node_rank: int | None = None) -> None:
    """Become torchrun. Does not return."""
    words = command(spec, node_rank)
    os.environ.update(environment(spec))
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise ConfigError(f"cannot start cluster.python={words[0]}: {error.strerror}") from error
