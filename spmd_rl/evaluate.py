"""`spmd-rl eval`: validate `model.path`, or the checkpoint that `trainer.resume` names, and do nothing else.

Prints the metrics and leaves them in <trainer.output_dir>/eval/metrics.json, the replies in samples.jsonl beside it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.assemble.model import check_rollout_engine, load_model_facts
from spmd_rl.assemble.rl import make_scorer
from spmd_rl.assemble.sampler import open_rollout, read_prompts, wanted_checkpoint
from spmd_rl.config import Config
from spmd_rl.config.folders import writing
from spmd_rl.ranked import on_every_rank, plan_of
from spmd_rl.roles.reward import Reward
from spmd_rl.runtime.bootstrap import start, stop
from spmd_rl.runtime.environment import LaunchEnvironment
from spmd_rl.topology.roles import only_sampling
from spmd_rl.trainer.validation import sampled_here, validate


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 for a mistake in the config."""
    return on_every_rank("eval", sys.argv[1:] if argv is None else argv, evaluate)


def evaluate(config: Config, env: LaunchEnvironment) -> None:
    """`rollout.val_n` replies to each prompt of `data.val`, scored."""
    config = only_sampling(config)
    plan = plan_of(config, env)
    model = load_model_facts(config)
    check_rollout_engine(config, model)
    checkpoint = wanted_checkpoint(config, model)
    prompts = read_prompts(config, model, "val")
    folder = Path(config.trainer.output_dir) / "eval"
    with writing("trainer.output_dir", folder):
        pass  # before hours go into what cannot be kept; each rank finds it
    scorer = make_scorer(config, plan, env.rank, prompts)
    try:
        runtime = start(config, plan, env)
        rollout = open_rollout(config, model, runtime, checkpoint)
        metrics, samples = validate(
            prompts, sampled_here(rollout, Reward(scorer, model.tokenizer), config, runtime), config
        )
        if runtime.is_first:
            print(f"{checkpoint or config.model.path}: {len(prompts)} prompts")
            write(folder, metrics, samples)
    finally:
        scorer.close()
        stop()


def write(folder: Path, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
    """metrics.json and samples.jsonl, and the metrics on the terminal."""
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    lines = (json.dumps(row, ensure_ascii=False, default=str) for row in samples)
    (folder / "samples.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    for name in sorted(metrics):
        print(f"  {name} {metrics[name]:.4f}")
    print(f"written to {folder}")


if __name__ == "__main__":
    sys.exit(main())
