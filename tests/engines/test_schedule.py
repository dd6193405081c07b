import math

import pytest

from spmd_rl.config.roles import OptimConfig
from spmd_rl.engines.schedule import learning_rate


def rates(total: int, **settings: object) -> list[float]:
    return [learning_rate(OptimConfig(lr=2.0, **settings), step, total) for step in range(total)]  # type: ignore[arg-type]


def test_constant() -> None:
    assert rates(4) == [2.0] * 4


def test_warm_up_rises_to_the_rate_and_never_is_zero() -> None:
    assert rates(6, warmup_steps=3) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert rates(10, warmup_ratio=0.3) == pytest.approx([0.5, 1.0, 1.5, *[2.0] * 7])
    assert rates(4, warmup_steps=1, warmup_ratio=0.75) == pytest.approx([1.0, 2.0, 2.0, 2.0])


def test_cosine_from_the_rate_to_its_floor() -> None:
    got = rates(9, warmup_steps=1, schedule="cosine", min_lr_ratio=0.1)
    assert got[0] == 1.0
    assert got[1:] == pytest.approx([2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8))) for k in range(8)])
    config = OptimConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(config, 9, 9) == pytest.approx(0.2)
    assert learning_rate(config, 50, 9) == pytest.approx(0.2)  # past the end: a run that was made longer
