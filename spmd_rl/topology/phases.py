"""The phases of a step: which roles work, on which pool, and what decides how much."""

from dataclasses import dataclass

from spmd_rl.config import Config
from spmd_rl.config.roles import EngineConfig
from spmd_rl.topology.layout import RoleLayout

TIMED = {
    "generate": "generate",
    "reward": "reward",
    "old log-probs": "old_log_prob",
    "ref log-probs": "ref",
    "teacher log-probs": "teacher",
    "values": "values",
    "advantages": "adv",
    "critic update": "update_critic",
    "update": "update_actor",
}
"""The phases as the loop times and measures them. The weight sync is in `generate`."""
UPDATES = {"actor": "update", "critic": "critic update"}
"""Trained role -> the phase of its optimizer steps."""


@dataclass(frozen=True)
class Phase:
    """One line of the step. `role` is None where only the CPU works; `pool` is where it runs."""

    name: str
    role: str | None
    pool: str
    why_skipped: str = ""
    """Not empty: the phase is not needed, and why."""


def step_phases(config: Config, roles: dict[str, RoleLayout]) -> list[Phase]:
    """The phases of one step in program order (design: the seven phases; PPO adds the critic's two)."""
    home = roles["actor"].pool
    if config.trainer.mode == "sft":
        return [Phase("prompts", None, home), Phase("update", "actor", home)]
    correction = config.algorithm.rollout_correction.under(config.trainer.schedule, config.rollout.partial)
    early = config.algorithm.use_kl_in_reward or correction.rollout_is or correction.rollout_rs
    one_update = updates_a_step(config) == 1 and not early
    old = "one update a step: equal to the update's own" if one_update else ""
    if config.algorithm.rollout_correction.bypass_mode:
        old = "bypass mode: the rollout's log-probs stand in"
    phases = [
        Phase("prompts", None, roles["rollout"].pool),
        Phase("generate", "rollout", roles["rollout"].pool),
        Phase("reward", "reward" if "reward" in roles else None, roles.get("reward", roles["rollout"]).pool),
        Phase("old log-probs", "actor", home, old),
        Phase("ref log-probs", "ref", roles["ref"].pool)
        if "ref" in roles
        else Phase("ref log-probs", "ref", home, "no KL term is asked for"),
    ]
    if "teacher" in roles:
        phases.append(Phase("teacher log-probs", "teacher", roles["teacher"].pool))
    if "critic" in roles:
        phases.append(Phase("values", "critic", roles["critic"].pool))
    phases.append(Phase("advantages", None, home))
    if "critic" in roles:
        phases.append(Phase("critic update", "critic", roles["critic"].pool))
    return [*phases, Phase("update", "actor", home)]


def updates_a_step(config: Config) -> int:
    """Optimizer steps of the actor in one step."""
    return -(-config.data.train_batch_size // config.actor.ppo_mini_batch_size) * config.actor.ppo_epochs


def samples_a_prompt(config: Config) -> int:
    """rollout.n, but 1 in supervised fine-tuning."""
    return 1 if config.trainer.mode == "sft" else config.rollout.n


def row_tokens(config: Config) -> int:
    """Tokens of the longest row."""
    return config.data.max_prompt_length + config.data.max_response_length


@dataclass(frozen=True)
class Load:
    """The worst case of one dp rank of a role, in a micro-batch and in a pass: every row is as long as allowed."""

    rows: int
    """Rows of the step's batch on one dp rank."""
    rows_a_micro_batch: int
    tokens: int
    """Tokens of the fullest micro-batch."""
    logit_tokens: int
    """Response tokens of it."""
    micro_batches: int
    """Micro-batches of one optimizer step."""
    passes: int
    """Micro-batches of one pass over the step's batch."""


def load(config: Config, layout: RoleLayout, engine: EngineConfig, mini_batch_prompts: int) -> Load:
    """The worst case on one dp rank (all rows at full length)."""
    n, longest = samples_a_prompt(config), row_tokens(config)
    rows = -(-config.data.train_batch_size * n // layout.dp_size)
    mini = -(-min(mini_batch_prompts, config.data.train_batch_size) * n // layout.dp_size)
    fit = max(engine.max_tokens_per_micro_batch // longest, 1)
    together = min(fit, mini)
    return Load(
        rows,
        together,
        together * longest,
        together * config.data.max_response_length,
        -(-mini // fit),
        -(-rows // fit),
    )
