"""`spmd-rl train`, or `torchrun … -m spmd_rl.train`: config -> plan -> inputs -> runtime -> loop -> run."""

import sys
from pathlib import Path

from spmd_rl.assemble import MODES, RunInputs
from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import parse_arguments, save_config
from spmd_rl.observe.tracking import check_trackers, open_trackers
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import LaunchEnvironment, read_environment
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan
from spmd_rl.trainer.checkpoint import Checkpointer, check_fingerprint, find_resume
from spmd_rl.trainer.loop import saved_step


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 for a mistake in the config, which every rank finds and rank 0 prints."""
    env = read_environment()
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        if text := arguments.text("train"):
            print(text if env.is_first else "", end="")
            return 0
        arguments.reject_others()
        train(arguments.config(), env)
    except ConfigError as error:
        if env.is_first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def train(config: Config, env: LaunchEnvironment) -> None:
    """The whole run, on one rank of many."""
    plan = Plan.from_config(config, cluster_of(env))
    check_trackers(config.observe.trackers)
    output_dir = Path(config.trainer.output_dir)
    resume_from = find_resume(config.trainer.resume, output_dir)
    inputs = MODES[config.trainer.mode](config, plan, env.rank)
    try:
        if resume_from is not None:
            check_fingerprint(resume_from, inputs.model.fingerprint)
        runtime = start(config, plan, env)
        if runtime.is_first:
            output_dir.mkdir(parents=True, exist_ok=True)
            save_config(config, output_dir / "config.yaml")
        run(config, inputs, runtime, resume_from)
    finally:
        inputs.close()
        stop()


def run(config: Config, inputs: RunInputs, runtime: Runtime, resume_from: Path | None) -> None:
    """Models and loop on a started runtime."""
    trackers = open_trackers(config, runtime.is_first, saved_step(resume_from), header(config, inputs, runtime))
    checkpointer = Checkpointer(Path(config.trainer.output_dir), config.trainer.checkpoint, runtime.control)
    try:
        inputs.loop(config, runtime, trackers, checkpointer).run(resume_from)
    finally:
        trackers.close()


def cluster_of(env: LaunchEnvironment) -> Cluster:
    """The hosts as the launcher started them."""
    return Cluster.from_counts([env.local_world_size] * (env.world_size // env.local_world_size))


def header(config: Config, inputs: RunInputs, runtime: Runtime) -> dict[str, str]:
    """Lines for the console's header."""
    actor = runtime.layout("actor")
    return {
        "model": f"{config.model.path} ({getattr(inputs.model.hf_config, 'model_type', '')})",
        "ranks": f"{runtime.plan.world_size} × {runtime.device.type}",
        "actor": f"{actor.engine}  {actor.mesh}  |  {actor.batch}",
        **inputs.facts(config, runtime),
        "steps": str(inputs.total_steps),
    }


if __name__ == "__main__":
    sys.exit(main())
