"""Validation: the current weights on prompts that are never trained on."""

from collections.abc import Callable, Sequence
from typing import Any

from spmd_rl.config import Config
from spmd_rl.data.batch import Batch
from spmd_rl.data.prompts import Prompt, Prompts
from spmd_rl.observe.validation import validation_metrics
from spmd_rl.roles.reward import Reward
from spmd_rl.roles.rollout import Rollout
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.exchange import gather
from spmd_rl.runtime.remote import Remote, local

NOISE_STEP = -1
"""Validation draws the same noise every time (no training step has this number), so that rounds compare."""


Round = Callable[[Sequence[Prompt], Sequence[str]], Batch | Remote]
"""(prompts, columns) -> those columns of all their scored replies, in prompt order."""
SHOWN = (
    "uid", "sample", "score", "acc", "length", "prompt", "text", "data_source", "ground_truth", "prediction", "error"
)  # fmt: skip


def validate(prompts: Prompts, sample: Round, config: Config) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """mean@n, best@k and maj@k by data source, and the replies; the same on every rank that hears of the replies."""
    every = [prompts.at(i) for i in range(len(prompts))]
    size = config.data.val_batch_size or len(every)
    parts = [sample(every[at : at + size], SHOWN) for at in range(0, len(every), size)]
    found = local(lambda *rounds: _measured(rounds, config), *parts)
    return ({}, []) if isinstance(found, Remote) else found


def sampled_here(rollout: Rollout, reward: Reward, config: Config, runtime: Runtime) -> Round:
    """Rounds of a rollout and a reward that live on this rank's pool."""

    def sample(prompts: Sequence[Prompt], names: Sequence[str]) -> Batch:
        return gather(scored(prompts, rollout, reward, config), names, runtime.everyone)

    return sample


def scored(prompts: Sequence[Prompt], rollout: Rollout, reward: Reward, config: Config) -> Batch:
    """This rank's part of the replies to some prompts, with scores and lengths."""
    n = config.rollout.val_n
    batch = rollout.generate(prompts, rollout.validation_params(), n, NOISE_STEP, config.trainer.seed)
    of_uid = {prompt.uid: prompt for prompt in prompts}
    batch = reward.score(batch, [of_uid[uid] for uid in batch["uid"][::n].tolist()], n)
    batch["length"] = batch["responses"].lengths
    return batch


def _measured(parts: Sequence[Batch], config: Config) -> tuple[dict[str, float], list[dict[str, Any]]]:
    sources = [s for part in parts for s in part["data_source"]]
    columns = {name: [v for part in parts for v in part[name].tolist()] for name in ("uid", "score", "acc")}
    predictions = [str(p) for part in parts for p in part["prediction"]]
    metrics = validation_metrics(
        sources,
        columns["uid"],
        {"acc": columns["acc"], "reward": columns["score"]},
        predictions if any(p != "None" for p in predictions) else None,
        seed=config.trainer.seed,
    )
    lengths = [n for part in parts for n in part["length"].tolist()]
    metrics["val-aux/response_length/mean"] = sum(lengths) / len(lengths)
    metrics["val-aux/reward/errors"] = float(sum(bool(error) for part in parts for error in part["error"]))
    return metrics, [row for part in parts for row in _rows(part)]


def _rows(part: Batch) -> list[dict[str, Any]]:
    return [
        {
            "uid": int(part["uid"][i]),
            "sample": int(part["sample"][i]),
            "prompt": part["prompt"][i],
            "response": part["text"][i],
            "ground_truth": part["ground_truth"][i],
            "score": float(part["score"][i]),
            **({"error": part["error"][i]} if part["error"][i] else {}),
        }
        for i in range(len(part))
    ]
