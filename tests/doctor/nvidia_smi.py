"""A stand-in for the device alone: an executable `nvidia-smi` that prints what the real one prints for two H100s."""

import stat
from collections.abc import Sequence
from pathlib import Path

GPUS = """0, GPU-aaaaaaaa-0000-4000-8000-000000000000, NVIDIA H100 80GB HBM3, 81559, {used}, 570.86.15, 00000000:1B:00.0
1, GPU-bbbbbbbb-0000-4000-8000-000000000000, NVIDIA H100 80GB HBM3, 81559, 4, 570.86.15, 00000000:43:00.0
"""
TOPOLOGY = """\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\t0-51\t0\t\tN/A
GPU1\tNV18\t X \t0-51\t0\t\tN/A

Legend:

  X    = Self
"""
SCRIPT = """#!/bin/sh
case "$1" in
--query-gpu=*) cat "{folder}/gpus" ;;
--query-compute-apps=*) cat "{folder}/apps" ;;
topo) cat "{folder}/topology" ;;
*) echo "Invalid option: $1" >&2; exit 1 ;;
esac
"""
BROKEN = """#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
exit 9
"""


def install(folder: Path, apps: Sequence[tuple[str, int, str, int]] = (), used: int = 4, broken: bool = False) -> Path:
    """Put it into `folder`, for the front of PATH. `apps`: (uuid, pid, name, MiB)."""
    folder.mkdir()
    (folder / "gpus").write_text(GPUS.format(used=used))
    (folder / "apps").write_text("".join(f"{uuid}, {pid}, {name}, {mib}\n" for uuid, pid, name, mib in apps))
    (folder / "topology").write_text(TOPOLOGY)
    tool = folder / "nvidia-smi"
    tool.write_text(BROKEN if broken else SCRIPT.format(folder=folder))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return folder
