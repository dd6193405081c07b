"""Which layouts of the actor and the rollout fit the cluster, fastest first by the lower bound, and why others fail."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

from spmd_rl.config import Config, ConfigError
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.memory import card_bytes
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.text import gib, seconds, table

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Suggestion:
    """One candidate: where it differs from the config, and the plan's figures or why it does not fit."""

    overrides: tuple[str, ...]
    peak: int = 0
    """Bytes of the fullest rank in the fullest phase."""
    bound: float = 0.0
    """Least seconds of a step."""
    reason: str = ""


def suggestions(config: Config, cluster: Cluster) -> list[Suggestion]:
    """Every candidate, those that fit first, the ones with the smallest bound (then peak) at the front."""
    found = [_try(config, cluster, values) for values in _candidates(config, cluster)]
    return sorted(found, key=lambda s: (bool(s.reason), s.bound, s.peak))


def suggest_text(config: Config, cluster: Cluster, most: int = 12) -> str:
    """The table of the best candidates, and the others by reason."""
    found = suggestions(config, cluster)
    fits = [s for s in found if not s.reason]
    limit = card_bytes(config)
    rows = [[_shown(s), gib(s.peak), gib(limit - s.peak), seconds(s.bound)] for s in fits[:most]]
    text = f"LAYOUTS THAT FIT ({len(fits)} of {len(found)} tried; `at least` is a step's lower bound, no forecast)\n"
    text += table(["overrides", "peak", "head-room", "at least"], rows, right=(1, 2, 3)) if rows else "  none"
    reasons: dict[str, list[Suggestion]] = {}
    for s in found[len(fits) :]:
        reasons.setdefault(s.reason, []).append(s)
    lines = [f"  {_shown(same[0])}{_more(same)}\n    {reason}" for reason, same in list(reasons.items())[:most]]
    return text + ("\n\nTHE OTHERS\n" + "\n".join(lines) if lines else "") + "\n"


def _shown(suggestion: Suggestion) -> str:
    return " ".join(suggestion.overrides) or "as configured"


def _more(same: list[Suggestion]) -> str:
    return f" (and {len(same) - 1} more)" if len(same) > 1 else ""


def _candidates(config: Config, cluster: Cluster) -> Iterator[dict[str, int | str | bool]]:
    """The sizes that matter most: FSDP shards, Ulysses and recompute, or tp, pp and ep; and the rollout's tp."""
    a_host = int(cluster.counts[0])
    infer = SIZES if config.rollout.name == "vllm" and config.trainer.mode != "sft" else (1,)
    for fsdp, sp, recompute, tp in product(sorted({-1, a_host}), SIZES, (True, False), infer):
        yield {
            "actor.engine.name": "fsdp",
            "actor.engine.fsdp.fsdp_size": fsdp,
            "actor.engine.fsdp.ulysses_size": sp,
            "actor.engine.gradient_checkpointing": recompute,
            "rollout.infer_tp": tp,
        }
    if config.actor.engine.name == "megatron":
        for tp, pp, ep, rollout_tp in product(SIZES, SIZES, SIZES, infer):
            yield {
                "actor.engine.name": "megatron",
                "actor.engine.megatron.tp": tp,
                "actor.engine.megatron.pp": pp,
                "actor.engine.megatron.ep": ep,
                "rollout.infer_tp": rollout_tp,
            }


def _get(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _try(config: Config, cluster: Cluster, values: dict[str, int | str | bool]) -> Suggestion:
    candidate = deepcopy(config)
    engine = type(candidate.actor.engine)()
    for name in ("fsdp", "megatron"):
        setattr(candidate.actor.engine, name, getattr(engine, name))
    for key, value in values.items():
        section, _, last = key.rpartition(".")
        setattr(_get(candidate, section), last, value)
    overrides = tuple(f"{key}={str(value).lower()}" for key, value in values.items() if _get(config, key) != value)
    try:
        plan = Plan.from_config(candidate, cluster)
    except ConfigError as error:
        return Suggestion(overrides, reason=str(error).splitlines()[0])
    peak = max((m.peak for m in plan.memory), default=0)
    return Suggestion(overrides, peak, sum(bound.seconds for bound in plan.bounds))
