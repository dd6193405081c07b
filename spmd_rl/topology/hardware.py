"""What a card and its links can do at best: datasheet figures, for the memory estimate and the cost bound."""

from dataclasses import dataclass, replace

from spmd_rl.config import Config

GIB = 1024**3


@dataclass(frozen=True)
class Hardware:
    """One GPU of a kind and its links. Rates are peaks, so times computed with them are lower bounds."""

    name: str
    memory: int
    """Bytes."""
    flops: float
    """Dense bfloat16 FLOP/s."""
    hbm: float
    """Bytes/s to its own memory."""
    intra_node: float
    """Bytes/s a GPU can send to others of its host (one direction)."""
    inter_node: float
    """Bytes/s a GPU can send to other hosts."""
    host: float
    """Bytes/s to the host's memory."""
    host_memory: int
    """Bytes of a host's memory."""


def _gpu(name: str, gib: float, tflops: float, hbm: float, intra: float, inter: float, host: float) -> Hardware:
    return Hardware(name, int(gib * GIB), tflops * 1e12, hbm * 1e9, intra * 1e9, inter * 1e9, host * 1e9, 2048 * GIB)


HARDWARE = {
    # name, GiB that CUDA shows, dense bf16 TFLOP/s, then GB/s: HBM, NVLink or PCIe, network, host
    "h100": _gpu("h100", 79.1, 989.5, 3352, 450, 50, 64),
    "h200": _gpu("h200", 139.8, 989.5, 4800, 450, 50, 64),
    "a100": _gpu("a100", 79.2, 312, 2039, 300, 25, 32),
    "a100-40g": _gpu("a100-40g", 39.4, 312, 1555, 300, 25, 32),
    "b200": _gpu("b200", 178.4, 2250, 8000, 900, 50, 64),
    "l40s": _gpu("l40s", 44.4, 362, 864, 32, 25, 32),
    "l40": _gpu("l40", 44.4, 181, 864, 32, 25, 32),
}
LINKS = ("intra_node", "inter_node", "host")


def hardware(config: Config) -> Hardware:
    """The table's entry with the config's overrides. Raises KeyError for an unknown name (`check` reports it first)."""
    c, card = config.cluster, HARDWARE[config.cluster.gpu]
    if c.gpu_memory_gib is not None:
        card = replace(card, memory=int(c.gpu_memory_gib * GIB))
    if c.host_memory_gib is not None:
        card = replace(card, host_memory=int(c.host_memory_gib * GIB))
    rates = {link: c.bandwidth[link] * 1e9 if link in c.bandwidth else getattr(card, link) for link in LINKS}
    return replace(card, intra_node=rates["intra_node"], inter_node=rates["inter_node"], host=rates["host"])
