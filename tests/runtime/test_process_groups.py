"""The groups that exist are the plan's."""

import pytest

from tests.runtime import ranks
from tests.world import Worlds

FSDP = "actor.engine.fsdp"
CASES: dict[str, tuple[int, list[str], tuple[tuple[str, ...], list[int]]]] = {
    "alone": (1, [], (("fsdp",), [1])),
    "fsdp 2": (2, [], (("fsdp",), [2])),
    "ulysses 2": (2, [f"{FSDP}.ulysses_size=2"], (("fsdp",), [2])),
    "ddp 2": (2, [f"{FSDP}.fsdp_size=1"], (("ddp", "fsdp"), [2, 1])),
    "ddp 2 x fsdp 2": (4, [f"{FSDP}.fsdp_size=2"], (("ddp", "fsdp"), [2, 2])),
    "fsdp 4, ulysses 2": (4, [f"{FSDP}.ulysses_size=2"], (("fsdp",), [4])),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_and_mesh_follow_the_layout(worlds: Worlds, case: str) -> None:
    size, overrides, (names, sizes) = CASES[case]
    for rank, found in enumerate(worlds[size].run(ranks.members, *overrides)):
        assert found["ranks"] == found["expected"]
        assert all(rank in members for members in found["ranks"].values())
        mesh_names, mesh, place = found["mesh"]
        assert mesh_names == names
        lookup = mesh
        for at in place:
            lookup = lookup[at]
        assert lookup == rank
        assert [len(found["ranks"][axis]) for axis in names] == sizes
        assert found["sums"] == {axis: sum(found["ranks"][axis]) for axis in ("dp", "sp")}
        assert found["control"] == (size, "gloo")
