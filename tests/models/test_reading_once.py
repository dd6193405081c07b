"""What a node's ranks ask of the same weight files comes from the disk once: the kernel counts it for each process."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.models.checkpoint import Checkpoint
from tests.world import Worlds

ROWS, WIDTH, TENSORS, RANKS = 1024, 2048, 8, 2
BYTES = ROWS * WIDTH * TENSORS * 4


def from_disk() -> int:
    """Bytes that this process has had fetched from a disk."""
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(words["read_bytes"])


def read(folder: Path, parts: int) -> tuple[int, int]:
    """(bytes from the disk, bytes read): this rank's part of every tensor, all of it where there is one part."""
    checkpoint, before, got = Checkpoint(folder), from_disk(), 0
    part = int(os.environ.get("RANK", "0")) % parts
    rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    for key in sorted(checkpoint.keys()):
        got += checkpoint.read([key], (ROWS, WIDTH), (rows, slice(0, WIDTH))).clone().nbytes
    return from_disk() - before, got


def forget(file: Path) -> None:
    """Have the kernel drop the file from its page cache."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("parts", [1, RANKS])
def test_a_byte_is_read_from_the_disk_once_a_node(parts: int, tmp_path: Path, worlds: Worlds) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"w{i}": torch.full((ROWS, WIDTH), float(i)) for i in range(TENSORS)}, file)
    forget(file)
    cold, _ = read(tmp_path, 1)
    if cold < 0.5 * BYTES:
        pytest.skip(f"{tmp_path} is on no disk: {cold} of {BYTES} bytes came from one")
    forget(file)
    found = worlds[RANKS].run(read, tmp_path, parts)
    assert sum(got for _, got in found) == BYTES * (RANKS if parts == 1 else 1)
    assert 0.5 * BYTES < sum(disk for disk, _ in found) <= 1.05 * BYTES
