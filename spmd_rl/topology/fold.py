"""From an engine's sizes to layouts, and what is wrong with sizes that do not fold.

Sources: docs/architecture.md; the order tp-cp-ep-dp-pp is megatron-core's `RankGenerator`.
"""

from spmd_rl.config import ConfigError
from spmd_rl.config.roles import EngineConfig, FsdpConfig, MegatronConfig, RolloutConfig
from spmd_rl.topology.layout import Layout, RoleLayout


def engine_layout(role: str, pool: str, size: int, engine: EngineConfig) -> RoleLayout:
    """The layout of a role that an engine holds, on a pool of `size` ranks. Raises ConfigError with every mistake."""
    if engine.name == "megatron":
        return megatron_layout(role, pool, size, engine.megatron)
    return fsdp_layout(role, pool, size, engine.fsdp)


def fsdp_layout(role: str, pool: str, size: int, fsdp: FsdpConfig) -> RoleLayout:
    """FSDP2 with Ulysses: mesh [fsdp] or [ddp, fsdp] for the weights, (dp, sp) over the same ranks for the rows."""
    demand(fsdp_mistakes(role, pool, size, fsdp))
    shards = size if not 0 < fsdp.fsdp_size < size else fsdp.fsdp_size
    mesh = Layout(("fsdp",), (size,)) if shards == size else Layout(("ddp", "fsdp"), (size // shards, shards))
    batch = Layout(("dp", "sp"), (size // fsdp.ulysses_size, fsdp.ulysses_size))
    return RoleLayout(role, pool, "fsdp", mesh, batch)


def megatron_layout(role: str, pool: str, size: int, megatron: MegatronConfig) -> RoleLayout:
    """megatron-core: (pp, dp, cp, tp), tp fastest; experts fold the same ranks as (pp, edp, ep, etp)."""
    demand(megatron_mistakes(role, pool, size, megatron))
    m, etp = megatron, megatron.tp if megatron.etp is None else megatron.etp
    mesh = Layout(("pp", "dp", "cp", "tp"), (m.pp, size // (m.pp * m.cp * m.tp), m.cp, m.tp))
    expert = Layout(("pp", "edp", "ep", "etp"), (m.pp, size // (m.pp * m.ep * etp), m.ep, etp))
    return RoleLayout(role, pool, "megatron", mesh, mesh, expert)


def rollout_layout(pool: str, size: int, rollout: RolloutConfig) -> RoleLayout:
    """(dp, infer_tp, infer_pp); a replica is one dp index."""
    demand(rollout_mistakes(pool, size, rollout))
    replica = rollout.infer_tp * rollout.infer_pp
    mesh = Layout(("dp", "infer_tp", "infer_pp"), (size // replica, rollout.infer_tp, rollout.infer_pp))
    return RoleLayout("rollout", pool, rollout.name, mesh, mesh)


def fsdp_mistakes(role: str, pool: str, size: int, fsdp: FsdpConfig) -> list[str]:
    """What keeps the sizes from folding a pool of `size` ranks; empty when nothing does."""
    mistakes = []
    name = f"{role}.engine.fsdp.fsdp_size"
    if fsdp.fsdp_size == 0:
        mistakes.append(f"{name}=0 is not a size; use -1 to shard over all {size} ranks of pool {pool!r}, or 1 for DDP")
    elif 0 < fsdp.fsdp_size < size and size % fsdp.fsdp_size:
        mistakes.append(not_dividing(name, fsdp.fsdp_size, f"the {size} ranks of pool {pool!r}", size))
    name = f"{role}.engine.fsdp.ulysses_size"
    if fsdp.ulysses_size < 1:
        mistakes.append(too_small(name, fsdp.ulysses_size))
    elif size % fsdp.ulysses_size:
        mistakes.append(not_dividing(name, fsdp.ulysses_size, f"the {size} ranks of pool {pool!r}", size))
    return mistakes


def megatron_mistakes(role: str, pool: str, size: int, megatron: MegatronConfig) -> list[str]:
    """What keeps the sizes from folding a pool of `size` ranks; empty when nothing does."""
    m, prefix = megatron, f"{role}.engine.megatron"
    axes = {"tp": m.tp, "pp": m.pp, "vpp": m.vpp, "cp": m.cp, "ep": m.ep}
    if m.etp is not None:
        axes["etp"] = m.etp
    mistakes = [too_small(f"{prefix}.{axis}", value) for axis, value in axes.items() if value < 1]
    if mistakes:
        return mistakes
    etp = m.tp if m.etp is None else m.etp
    dense, expert = m.tp * m.cp * m.pp, etp * m.ep * m.pp
    if size % dense:
        mistakes.append(
            f"{prefix}: tp·cp·pp = {m.tp}·{m.cp}·{m.pp} = {dense} does not divide the {size} ranks of pool {pool!r}; "
            f"use a product out of {one_of(divisors(size))}"
        )
    if size % expert and (m.ep > 1 or m.etp is not None):  # else the line above says it
        mistakes.append(
            f"{prefix}: etp·ep·pp = {etp}·{m.ep}·{m.pp} = {expert} does not divide the {size} ranks of pool {pool!r}; "
            f"use a product out of {one_of(divisors(size))}" + (" or set etp=1" if etp > 1 else "")
        )
    if m.vpp > 1 and m.pp == 1:
        mistakes.append(f"{prefix}.vpp={m.vpp} needs pipeline stages, but pp=1; use vpp=1 or pp of 2 and more")
    return mistakes


def rollout_mistakes(pool: str, size: int, rollout: RolloutConfig) -> list[str]:
    """What keeps the sizes from folding a pool of `size` ranks; empty when nothing does."""
    axes = {"infer_tp": rollout.infer_tp, "infer_pp": rollout.infer_pp}
    mistakes = [too_small(f"rollout.{axis}", value) for axis, value in axes.items() if value < 1]
    if mistakes:
        return mistakes
    replica = rollout.infer_tp * rollout.infer_pp
    if size % replica:
        mistakes.append(
            f"rollout: infer_tp·infer_pp = {rollout.infer_tp}·{rollout.infer_pp} = {replica} does not divide "
            f"the {size} ranks of pool {pool!r}; use a product out of {one_of(divisors(size))}"
        )
    return mistakes


def demand(mistakes: list[str]) -> None:
    """Raise one ConfigError that lists all mistakes, if there is any."""
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def one_of(values: list[int], most: int = 8) -> str:
    """`1, 2, 4 or 8`; long lists are cut in the middle."""
    texts = [str(v) for v in values]
    if len(texts) > most:
        texts = [*texts[: most - 2], "…", texts[-1]]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def not_dividing(name: str, value: int, what: str, number: int) -> str:
    """The message of a size that does not divide what it must."""
    return f"{name}={value} does not divide {what}; use {one_of(divisors(number))}"


def too_small(name: str, value: int, least: int = 1) -> str:
    """The message of a value below its smallest."""
    return f"{name}={value} must be at least {least}"
