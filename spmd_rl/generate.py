"""`spmd-rl generate`: only sample replies to prompts, from `model.path` or the checkpoint that `trainer.resume` names.

    spmd-rl generate experiment=tiny model.path=FOLDER rollout.n=4 [--data train|val] [--output replies.jsonl]

`rollout.n` replies a prompt, drawn as in training; a line of JSON each, in the order of the prompts. Without options:
the prompts of data.val where there are any, else of data.train, into <trainer.output_dir>/replies.jsonl.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmd_rl.assemble.model import check_rollout_engine, load_model_facts
from spmd_rl.assemble.sampler import open_rollout, read_prompts, wanted_checkpoint
from spmd_rl.config import Config, ConfigError
from spmd_rl.config.folders import writing
from spmd_rl.config.load import take_option
from spmd_rl.data.batch import Batch
from spmd_rl.data.prompts import Prompt
from spmd_rl.data.rows import is_set
from spmd_rl.ranked import on_every_rank, plan_of
from spmd_rl.roles.rollout import Rollout
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import LaunchEnvironment
from spmd_rl.runtime.exchange import gather
from spmd_rl.topology.roles import only_sampling


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 for a mistake in the config or in an option."""
    argv, source = take_option(sys.argv[1:] if argv is None else argv, "--data")
    argv, output = take_option(argv, "--output")
    return on_every_rank("generate", argv, partial(generate, source=source, output=output))


def generate(config: Config, env: LaunchEnvironment, source: str | None = None, output: str | None = None) -> None:
    """Sample on every rank's share of the prompts; rank 0 writes all of them."""
    config = only_sampling(config)
    source = chosen_source(config, source)
    plan = plan_of(config, env)
    model = load_model_facts(config)
    check_rollout_engine(config, model)
    checkpoint = wanted_checkpoint(config, model)
    prompts = read_prompts(config, model, source)
    every = [prompts.at(i) for i in range(len(prompts))]
    file = Path(output) if output else Path(config.trainer.output_dir) / "replies.jsonl"
    with writing("--output" if output else "trainer.output_dir", file.parent):
        pass  # before hours go into what cannot be kept; each rank finds it
    try:
        runtime = start(config, plan, env)
        rollout = open_rollout(config, model, runtime, checkpoint)
        size = config.data.val_batch_size or len(every)
        rows: list[dict[str, Any]] = []
        for at in range(0, len(every), size):
            rows += sample(every[at : at + size], rollout, model.tokenizer, config, runtime)
        if runtime.is_first:
            file.write_text("".join(json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in rows), "utf-8")
            print(f"{checkpoint or config.model.path}: {len(rows)} replies to {len(every)} prompts -> {file}")
    finally:
        stop()


def chosen_source(config: Config, source: str | None) -> str:
    """`val` or `train`. Raises ConfigError for another word."""
    if source not in (None, "train", "val"):
        raise ConfigError(f"--data {source}: give train or val, for the prompts of data.train or data.val")
    return source or ("val" if is_set(config.data.val) else "train")


def sample(
    prompts: Sequence[Prompt], rollout: Rollout, tokenizer: PreTrainedTokenizerBase, config: Config, runtime: Runtime
) -> list[dict[str, Any]]:
    """One dict a reply, in prompt order, on every rank."""
    n = config.rollout.n
    batch = rollout.generate(prompts, rollout.training_params(), n, 0, config.trainer.seed)
    replies = [row.tolist() for row in batch["responses"].rows()]
    batch["text"] = list(tokenizer.batch_decode(replies, skip_special_tokens=True)) if replies else []
    batch["length"] = batch["responses"].lengths
    whole = gather(batch, ["uid", "sample", "text", "finished", "length"], runtime.everyone)
    return [row_of(prompts[i // n], whole, i) for i in range(len(whole))]


def row_of(prompt: Prompt, whole: Batch, i: int) -> dict[str, Any]:
    """What is written of reply `i`."""
    return {
        "uid": prompt.uid,
        "sample": int(whole["sample"][i]),
        "prompt": prompt.text,
        "response": whole["text"][i],
        "response_tokens": int(whole["length"][i]),
        "finished": bool(whole["finished"][i]),
        "data_source": prompt.row.data_source,
        "ground_truth": prompt.row.ground_truth,
    }


if __name__ == "__main__":
    sys.exit(main())
