"""What the ranks of a test's world do with process groups and batches."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from spmd_rl.config.load import compose
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.ranked import plan_of
from spmd_rl.roles.model import merge_over, sum_over
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import read_environment
from spmd_rl.runtime.exchange import exchange, gather


@contextmanager
def runtime(*overrides: str) -> Iterator[Runtime]:
    config = compose(["experiment=tiny", *overrides])
    try:
        yield start(config, plan_of(config, read_environment()))
    finally:
        stop()


def some_batch(rng: random.Random, rows: int) -> Batch:
    """Columns of every kind; row_ids are neither consecutive nor in order."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    ids = rng.sample(range(1000), rows)
    batch = Batch(TensorDict({}, batch_size=[rows]))
    batch["row_id"] = torch.tensor(ids, dtype=torch.int64)
    batch["finished"] = torch.rand(rows, generator=generator) < 0.5
    batch["score"] = torch.randn(rows, generator=generator)
    batch["matrix"] = torch.randn(rows, 2, 3, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([rng.choice([0, 0, 1, 2, 7]) for _ in range(rows)], dtype=torch.int64)
    batch["tokens"] = Ragged(torch.randint(0, 1 << 40, (int(lengths.sum()),), generator=generator), lengths)
    longer = lengths + 1
    batch["hidden"] = Ragged(torch.randn(int(longer.sum()), 2, generator=generator).bfloat16(), longer)
    batch["text"] = [rng.choice(["", "é", "long " * 50, "𝄞"]) for _ in range(rows)]
    batch["extra"] = [{"id": i, "none": None, "deep": [1.5, (2,)]} for i in ids]
    return batch


def differences(got: Batch, expected: Batch) -> list[str]:
    """Names of the columns that are not the same to the last bit, type and order."""
    names = {*got.rows.keys(), *got.ragged, *got.objects} ^ {*expected.rows.keys(), *expected.ragged, *expected.objects}
    wrong = sorted(names) + ([] if len(got) == len(expected) else ["number of rows"])
    for name, column in expected.rows.items():
        wrong += [] if same(got.rows[name], column) else [name]
    for name, ragged in expected.ragged.items():
        mine = got.ragged[name]
        wrong += [] if same(mine.values, ragged.values) and same(mine.lengths, ragged.lengths) else [name]
    return wrong + [name for name, column in expected.objects.items() if got.objects[name] != column]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def move_batches(seeds: list[int]) -> list[str]:
    """Exchange and gather random batches that every rank knows whole; what came out wrong."""
    wrong = []
    with runtime() as here:
        size, rank = here.pool.size, here.pool_rank
        for seed in seeds:
            rng = random.Random(seed)
            whole = some_batch(rng, rng.choice([0, 1, 2, 5, 40]))
            holders = rng.sample(range(size), rng.randint(1, size))  # the others hold no row
            owner = [rng.choice(holders) for _ in range(len(whole))]
            mine = whole.select([i for i, r in enumerate(owner) if r == rank])
            places = [rng.sample(range(len(whole)), rng.randint(0, len(whole))) for _ in range(size)]
            wanted = [[int(whole["row_id"][i]) for i in some] for some in places]
            got = exchange(mine, wanted, here.everyone)
            wrong += [f"seed {seed}, exchange: {name}" for name in differences(got, whole.select(places[rank]))]
            columns = ["row_id", "score", "tokens", "text"]
            sorted_places = sorted(range(len(whole)), key=lambda i: int(whole["row_id"][i]))
            expected = Batch(TensorDict({}, batch_size=[len(whole)]))
            for name in columns:
                expected[name] = whole[name]
            gathered = gather(mine, columns[1:], here.everyone)
            wrong += [f"seed {seed}, gather: {n}" for n in differences(gathered, expected.select(sorted_places))]
    return wrong


def _said(act: Callable[[], Any]) -> str:
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def move_what_nobody_or_two_hold() -> list[str]:
    with runtime() as here:
        batch = some_batch(random.Random(0), 3)
        lost = _said(lambda: exchange(batch.select([]), [[5]] * here.pool.size, here.everyone))
        twice = _said(lambda: gather(batch, ["score"], here.everyone))
        return [lost, twice]


def members(*overrides: str) -> dict[str, Any]:
    """The pool ranks of this rank's groups along each axis of the actor's layout, and what FSDP's mesh is."""
    with runtime(*overrides) as here:
        layout, groups = here.layout("actor"), here.groups
        ranks = {
            axis: dist.get_process_group_ranks(groups.along(fold, axis))
            for fold in (layout.mesh, layout.batch)
            for axis in fold.names
        }
        expected = {
            axis: list(fold.group_of(here.pool_rank, axis))
            for fold in (layout.mesh, layout.batch)
            for axis in fold.names
        }
        mesh = groups.mesh(layout.mesh)
        sums = {
            axis: sum_over(torch.tensor([here.pool_rank]), groups.along(layout.batch, axis)).item()
            for axis in ("dp", "sp")
        }
        assert groups.mesh(layout.mesh) is mesh
        return {
            "ranks": ranks,
            "expected": expected,
            "mesh": (mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate()),
            "sums": sums,
            "control": (here.control.size(), here.control.name()),
        }


def add_up() -> tuple[list[int], dict[str, Any]]:
    """A sum whose order shows in its last bits, as raw bits; and merged metrics."""
    from spmd_rl.observe.metrics import finish, largest, mean, total

    with runtime() as here:
        r = here.pool_rank
        part = torch.tensor([1e8, 1.0, -1e8, 3.14159])[r % 4] * (1 + r / 7)
        bits = sum_over(part.reshape(1), here.everyone).view(torch.int32).tolist()
        merged = merge_over({"a": mean(r * 2.0, 2.0 * (r > 0)), "b": total(r), "c": largest(-r)}, here.everyone)
        return bits, finish(merged)
