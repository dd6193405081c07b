"""What goes where: every wanted element once, from a rank that holds it, in buckets that are bounded. Pure."""

import pytest
import torch

from spmd_rl.weights.held import Box, TensorSpec, covers
from spmd_rl.weights.table import Manifest, SyncError, Table, build_table
from tests.weights.layouts import LAYOUTS, SPECS, manifests, split


def tables(source: str, target: str, ranks: int, bucket_bytes: int = 1 << 20) -> list[Table]:
    everyone = manifests(source, target, ranks)
    return [build_table(SPECS, everyone, rank, bucket_bytes) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_each_wanted_element_comes_once_and_both_ends_agree(source: str, target: str, ranks: int) -> None:
    everyone, made = manifests(source, target, ranks), tables(source, target, ranks)
    for rank, table in enumerate(made):
        arriving = [p.box for p, _ in table.local] + [p.box for b in table.buckets for r in b.recv for p in r]
        for want in everyone[rank].wants:
            parts = [box for box in arriving if box.overlap(want) == box]
            assert covers(parts, [TensorSpec(want.name, want.size)]) == []
            assert sum(torch.Size(p.size).numel() for p in parts) == torch.Size(want.size).numel()
        for peer in range(ranks):
            for mine, theirs in zip(table.buckets, made[peer].buckets, strict=True):
                assert [(p.box, p.dtype) for p in mine.recv[peer]] == [(p.box, p.dtype) for p in theirs.send[rank]]
        sent = [p.box for b in table.buckets for r in b.send for p in r]
        assert all(any(box.overlap(held) == box for held in everyone[rank].holds) for box in sent)


@pytest.mark.parametrize("source", LAYOUTS)
def test_what_a_rank_holds_itself_is_not_sent_to_it(source: str) -> None:
    for rank, table in enumerate(tables(source, "whole", 4)):
        holds = manifests(source, "whole", 4)[rank].holds
        got = [p.box for b in table.buckets for r in b.recv for p in r]
        assert not [box for box in got for held in holds if box.overlap(held)]


def test_replicas_send_to_those_beside_them() -> None:
    """ddp=2 × fsdp=2 over ranks 0..3: each pair of ranks holds everything, so nothing crosses between the pairs."""
    for rank, table in enumerate(tables("ddp2_fsdp2", "whole", 4)):
        peers = {peer for b in table.buckets for peer, pieces in enumerate(b.recv) if pieces}
        assert peers == {rank ^ 1}


@pytest.mark.parametrize("limit", [64, 1000, 4096])
def test_buckets_are_bounded(limit: int) -> None:
    widest_row = max(torch.Size(s.shape[1:]).numel() * 2 for s in SPECS)
    for table in tables("fsdp", "whole", 4, limit):
        for bucket in table.buckets:
            received = sum(p.nbytes for pieces in bucket.recv for p in pieces)
            assert received <= max(limit, widest_row)


def test_a_tensor_that_nobody_holds_is_named() -> None:
    everyone = [Manifest(tuple(m.holds[1:]), m.wants, m.dtypes) for m in manifests("fsdp", "whole", 2)]
    with pytest.raises(SyncError, match=r"parts of embed \(of 1 tensors\) are held by no rank"):
        build_table(SPECS, everyone, 0, 1 << 20)


def test_a_tensor_that_the_actor_does_not_have_is_named() -> None:
    mine = manifests("fsdp", "whole", 1)[0]
    more = Manifest(mine.holds, (*mine.wants, Box("extra", (0,), (3,))), (*mine.dtypes, torch.float32))
    with pytest.raises(SyncError, match="wants extra, and the actor has no such tensor"):
        build_table(SPECS, [more], 0, 1 << 20)


def test_a_tensor_that_has_no_place_in_the_rollout_is_named() -> None:
    mine = manifests("fsdp", "whole", 1)[0]
    with pytest.raises(SyncError, match="no rank of the rollout has a place for embed"):
        build_table(SPECS, [Manifest(mine.holds, mine.wants[1:], mine.dtypes[1:])], 0, 1 << 20)


def test_the_layouts_of_these_tests_are_what_they_say() -> None:
    assert split(Box("w", (0, 0), (5, 3)), 0, 2, 1) == Box("w", (3, 0), (2, 3))
    assert len(manifests("ddp2_fsdp2", "tp2", 4)[1].holds) == len(SPECS) - 1  # a row of one stays with the first
