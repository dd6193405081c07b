"""Where a step's rows come from: one round of sampling, or as many as DAPO's dynamic sampling takes (or, in
trainer/tails.py, what is complete when the step's sampling ends).

Whether to sample on is decided from the gathered scores alone, so every rank of every world decides the same.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from spmd_rl.algorithms.dapo import has_signal, refill
from spmd_rl.algorithms.masked import group_index
from spmd_rl.config import Config, ConfigError
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.prompts import Prompt, PromptOrder
from spmd_rl.rewards.calls import in_one_line
from spmd_rl.roles.reward import Reward
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.bridge import Bridge, from_bytes, to_bytes
from spmd_rl.runtime.exchange import gather
from spmd_rl.runtime.remote import Remote, local
from spmd_rl.trainer.finite import Guard
from spmd_rl.trainer.scoring import Scoring

logger = logging.getLogger("spmd_rl.trainer")

METRICS = {"score": "score", "acc": "acc", "seq_reward": "score"}
"""algorithm.filter_groups.metric -> column; a row's token rewards sum to its score."""


class Sampler(Protocol):
    """The trainer, as far as it is needed to collect a step's rows."""

    config: Config
    runtime: Runtime
    prompts: PromptOrder[Prompt]
    score: Scoring

    def sample(self, prompts: Sequence[Prompt], step: int) -> Batch | Remote:
        """This rank's part of their scored replies, whose row ids count from 0 over all ranks."""
        ...

    def phase(self, name: str) -> AbstractContextManager[Guard]:
        """A phase of the step."""
        ...


@dataclass
class Collected:
    """This rank's rows of a step (a reward model's own pool has none), and what was measured on the way."""

    batch: Batch | Remote
    metrics: dict[str, float]
    failed: str = ""
    """Why the run ends here: the reward failed for every reply. Some rank that holds replies says so."""


Collect = Callable[[Sampler, int], Collected | None]
"""The rows of a step by its number, `row_id` 0..N-1 over all ranks; None when the data has run out."""


def one_round(trainer: Sampler, step: int) -> Collected | None:
    """The replies to the next prompts, as they are."""
    prompts = trainer.prompts.take()
    return Collected(trainer.sample(prompts, step), {}) if prompts else None


def groups_with_signal(trainer: Sampler, step: int) -> Collected | None:
    """Rounds of new prompts until `train_batch_size` groups have replies that differ; the first of them, in order.

    Yu et al., DAPO, arXiv 2503.14476, equation 11. None when the data runs out before; the groups found by then are
    left, as in verl. ConfigError after `filter_groups.max_num_gen_batches` rounds.
    """
    config, runtime = trainer.config, trainer.runtime
    settings, wanted = config.algorithm.filter_groups, config.data.train_batch_size
    rounds: list[Batch | Remote] = []
    kept = sampled = 0
    scores: list[Tensor] = []
    while True:
        prompts = trainer.prompts.take()
        if prompts:
            batch = trainer.sample(prompts, step)
            metric = METRICS[settings.metric]
            whole = gather(batch, ["uid", "score", metric, "error"], hearers(runtime))
            if all(whole["error"]) and decides(len(whole), config):  # another round would find no signal either
                return Collected(batch, {}, _all_failed(whole["error"], len(whole), step, config))
            signal = has_signal(whole[metric], group_index(whole["uid"])).view(len(prompts), -1)[:, 0]
            rounds.append(local(partial(_renumbered, signal_P=signal, before=kept, config=config), batch))
            kept, sampled = kept + int(signal.sum()), sampled + len(prompts)
            scores.append(whole["score"])
        todo = refill(kept, wanted, len(rounds), settings.max_num_gen_batches, exhausted=not prompts)
        if todo == "train":
            together = local(lambda *parts: Batch.concat(parts), *rounds)
            return Collected(together, _metrics(len(rounds), sampled, kept, wanted, scores))
        if todo == "stop":
            _explain(not prompts, kept, sampled, config, runtime)
            return None


def note_failures(found: Collected, reward: Reward, step: int, config: Config, runtime: Runtime) -> None:
    """Add how many replies the reward functions failed for, over all ranks; `found.failed` when it was every one.

    All ranks of the rollout's pool call it; elsewhere it does nothing.
    """
    if isinstance(found.batch, Remote):
        return
    found.metrics |= reward.counts(runtime.everyone)
    count, errors = (found.metrics.get(f"reward/{name}", 0.0) for name in ("replies", "errors"))
    if count == errors and decides(int(count), config) and len(found.batch):
        found.failed = _all_failed(found.batch["error"], int(count), step, config)


def decides(replies: int, config: Config) -> bool:
    """Whether there is nothing to learn from if the functions failed for all of so many replies: they are no less than
    a step's (an epoch's last rows may be few), and no model scores them as well."""
    return replies >= config.data.train_batch_size * config.rollout.n and not config.reward.model.enable


def _all_failed(errors: Sequence[str], count: int, step: int, config: Config) -> str:
    return (
        f"the reward failed for {count} of the {count} replies of step {step}, so there is nothing to learn from; the "
        f"last one: {in_one_line(errors[-1])}. The first ones are in the log with their tracebacks. Mend "
        f"reward.functions={list(config.reward.functions)} (reward.num_workers=0 calls them in the rank, for a "
        f"debugger), or raise reward.timeout_s={config.reward.timeout_s:g} where they are only slow; the same command "
        f"then goes on from the last checkpoint. reward.on_error={config.reward.on_error:g} scores failures of some "
        "replies only; a function that may fail for all of them has to catch that itself and return a score"
    )


def nothing_to_train_on(found: Collected | Remote | None, runtime: Runtime) -> bool:
    """Whether the data has run out. ConfigError when the reward failed for every reply. All ranks call it."""
    failed = found.failed if isinstance(found, Collected) else ""
    if not runtime.job.any(found is None or bool(failed)):
        return False
    said = [from_bytes(words) for words in runtime.job.all_gather(to_bytes(failed))]
    if words := next(filter(None, said), ""):
        raise ConfigError(words)
    return True


def hearers(runtime: Runtime) -> Bridge:
    """The ranks that produce a step, and so decide together: the rollout's and the reward model's."""
    return runtime.bridge("rollout", "reward" if "reward" in runtime.plan.roles else "rollout")


def mask_truncated(batch: Batch) -> None:
    """Tokens of replies that did not end are not trained on (DAPO's overlong filtering, arXiv 2503.14476, 3.4)."""
    mask: Ragged = batch["response_mask"]
    batch["response_mask"] = Ragged(mask.values * batch["finished"].repeat_interleave(mask.lengths), mask.lengths)


def _renumbered(batch: Batch, signal_P: Tensor, before: int, config: Config) -> Batch:
    """The rows of groups with signal, numbered on after `before` groups; those past the batch's size are left out."""
    n, wanted = config.rollout.n, config.data.train_batch_size
    place_P = torch.where(signal_P, before + signal_P.cumsum(0) - 1, wanted)
    place = place_P[batch["row_id"] // n]
    keep = (place < wanted).nonzero()[:, 0]
    out = batch.select(keep)
    out["row_id"] = place[keep] * n + out["sample"]
    return out


def _metrics(rounds: int, sampled: int, kept: int, wanted: int, scores: list[Tensor]) -> dict[str, float]:
    """`train/*`: how much had to be sampled, and the scores of all of it (critic/score/* are of the groups kept)."""
    return {
        "train/num_gen_batches": float(rounds),
        "train/num_sampled_prompts": float(sampled),
        "train/signal_ratio": kept / sampled,
        "train/num_surplus_groups": float(kept - wanted),
        "train/sampled_score/mean": float(torch.cat(scores).double().mean()),
    }


def _explain(exhausted: bool, kept: int, sampled: int, config: Config, runtime: Runtime) -> None:
    """Say why there is no batch: the end of the data is an end of the run, too many rounds are an error."""
    wanted, most = config.data.train_batch_size, config.algorithm.filter_groups.max_num_gen_batches
    found = f"{kept} of the {wanted} groups with signal were found among {sampled} prompts"
    if not exhausted:
        raise ConfigError(
            f"dynamic sampling: {found} in max_num_gen_batches={most} rounds. The replies to a prompt hardly ever "
            f"differ in {config.algorithm.filter_groups.metric}: check that the problems are neither too hard nor too "
            "easy; or raise algorithm.filter_groups.max_num_gen_batches (0: no bound), or raise rollout.n"
        )
    if runtime.pool_rank == 0 and runtime.plays("rollout"):
        logger.warning("dynamic sampling: the data ran out when %s; the run ends here", found)
