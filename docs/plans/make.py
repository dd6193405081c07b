"""Writes the plan pages of this folder with the tool itself: `python docs/plans/make.py`."""

import re
from pathlib import Path

from spmd_rl.config.load import compose
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.page import page
from spmd_rl.topology.plan import Plan
from spmd_rl.topology.text import plan_text, rank_text

HERE = Path(__file__).parent
ONE, TWO = ["cluster.gpus_per_node=8"], ["cluster.nodes=2", "cluster.gpus_per_node=8"]
DENSE = ["model.shape=qwen3-4b", "actor.use_kl_loss=true"]
MEGATRON = [
    "engine=megatron",
    "rollout=vllm",
    "actor.engine.offload_params=true",
    "actor.engine.offload_optimizer=true",
]
PLANS: dict[str, tuple[str, list[str], int]] = {
    "megatron_tp2_dp4": (
        "Megatron: TP2 · DP4 on 8 ranks",
        [*ONE, *MEGATRON, "model.shape=qwen3-4b", "actor.engine.megatron.tp=2"],
        5,
    ),
    "megatron_tp2_pp2_dp4": (
        "Megatron: TP2 · PP2 · DP4 on 16 ranks, rollout TP4",
        [*TWO, *MEGATRON, "model.shape=qwen3-8b", "actor.engine.megatron.tp=2", "actor.engine.megatron.pp=2",
         "rollout.infer_tp=4"],
        5,
    ),
    "megatron_tp2_ep4": (
        "Megatron: TP2 · EP4 on 16 ranks, a mixture of experts",
        [*TWO, *MEGATRON, "model.shape=qwen3-30b-a3b", "actor.engine.megatron.tp=2", "actor.engine.megatron.ep=4",
         "rollout.infer_tp=4", "cluster.gpu=h200"],
        5,
    ),
    "fsdp8": ("FSDP over 8 ranks", [*ONE, *DENSE], 5),
    "ddp2_fsdp4": ("Hybrid shards: DDP2 × FSDP4 on 8 ranks", [*ONE, *DENSE, "actor.engine.fsdp.fsdp_size=4"], 5),
    "fsdp8_ulysses2": ("FSDP8 with Ulysses 2", [*ONE, *DENSE, "actor.engine.fsdp.ulysses_size=2"], 5),
    "pools_one_step_off": (
        "Two pools, one step off: 8 ranks sample while 8 train",
        [*TWO, "model.shape=qwen3-8b", "rollout=vllm", "pools.rollout.n_gpus_per_node=8", "rollout.pool=rollout",
         "rollout.infer_tp=2", "trainer.schedule=one_step_off"],
        9,
    ),
    "pools_uneven": (
        "Four pools: rollout, reward model and teacher on their own",
        [*TWO, "model.shape=qwen3-4b", "rollout=vllm", "pools.rollout.n_gpus_per_node=4", "rollout.pool=rollout",
         "pools.reward.n_gpus_per_node=1", "reward.model.pool=reward", "reward.model.enable=true",
         "reward.model.path=qwen3-4b", "pools.teacher.n_gpus_per_node=2", "teacher.pool=teacher",
         "teacher.enable=true", "teacher.path=qwen3-8b", "trainer.schedule=one_step_off"],
        12,
    ),
}  # fmt: skip
"""File name -> title, overrides, the rank whose story is told."""


def render(name: str) -> tuple[str, str]:
    """(Markdown, HTML) of one plan."""
    title, overrides, rank = PLANS[name]
    config = compose(overrides)
    plan = Plan.from_config(config, Cluster.from_config(config))
    command = "spmd-rl plan " + " ".join(overrides)
    parts = [
        f"# {title}",
        f"Made by the tool itself; the drawn page is [{name}.html]({name}.html).",
        f"```\n$ {command}\n\n{plan_text(plan)}```",
        f"```\n$ {command} --rank {rank}\n\n{rank_text(plan, rank)}```",
    ]
    return "\n\n".join(parts) + "\n", page(plan)


POOLS = HERE.parent / "pools.md"
BLOCK = re.compile(r"(?<=<!-- spmd-rl plan -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
SECTIONS = ("POOLS\n", "POOLS IN A STEP", "PHASES")


def pools_page() -> str:
    """The page of pools with what the tool says of the uneven ones."""
    _, overrides, _ = PLANS["pools_uneven"]
    config = compose(overrides)
    parts = plan_text(Plan.from_config(config, Cluster.from_config(config))).split("\n\n")
    shown = [part for part in parts if part.startswith(SECTIONS)]
    block = "```\n$ spmd-rl plan " + " ".join(overrides) + "\n\n" + "\n\n".join(shown) + "\n```"
    return BLOCK.sub(lambda _: block, POOLS.read_text(encoding="utf-8"))


def main() -> None:
    """Write every page and the list of them."""
    lines = ["# Plans, made by `spmd-rl plan`", ""]
    for name, (title, _, _) in PLANS.items():
        text, html = render(name)
        (HERE / f"{name}.md").write_text(text, encoding="utf-8")
        (HERE / f"{name}.html").write_text(html, encoding="utf-8")
        lines.append(f"- [{title}]({name}.md), [drawn]({name}.html)")
    POOLS.write_text(pools_page(), encoding="utf-8")
    (HERE / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
