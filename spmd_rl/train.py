"""`spmd-rl train`, or `torchrun … -m spmd_rl.train`: config -> plan -> inputs -> runtime -> loop -> run."""

import sys
from pathlib import Path

from spmd_rl.assemble import MODES, RunInputs
from spmd_rl.config import Config
from spmd_rl.config.changes import changes
from spmd_rl.config.load import save_config
from spmd_rl.observe.live import HERE
from spmd_rl.observe.tracking import check_trackers, open_trackers
from spmd_rl.ranked import on_every_rank, plan_of
from spmd_rl.runtime.bootstrap import Runtime, start, stop
from spmd_rl.runtime.environment import LaunchEnvironment
from spmd_rl.runtime.joining import NothingToDo
from spmd_rl.topology.text import header_lines
from spmd_rl.trainer.checkpoint import Checkpointer, check_fingerprint, find_resume
from spmd_rl.trainer.loop import saved_step
from spmd_rl.trainer.rehearse import rehearse


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 for a mistake in the config, which every rank finds and rank 0 prints."""
    return on_every_rank("train", sys.argv[1:] if argv is None else argv, train)


def train(config: Config, env: LaunchEnvironment) -> None:
    """The whole run, on one rank of many."""
    plan = plan_of(config, env)
    for warning in plan.warnings if env.is_first else []:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    check_trackers(config.observe.trackers)
    output_dir, changed = Path(config.trainer.output_dir), ""
    resume_from = find_resume(config.trainer.resume, output_dir)
    inputs = MODES[config.trainer.mode](config, plan, env.rank)
    try:
        if resume_from is not None:
            check_fingerprint(resume_from, inputs.model.fingerprint)
            if not config.trainer.rehearse:
                check_left_to_do(resume_from, inputs.total_steps, config)
        runtime = start(config, plan.with_shape(inputs.model.hf_config.to_dict()), env)
        if config.trainer.rehearse:
            report = rehearse(config, inputs, runtime)
            print(report if runtime.is_first else "", end="", flush=True)
            return
        if runtime.is_first:
            output_dir.mkdir(parents=True, exist_ok=True)
            changed = changed_since(resume_from, config) if resume_from is not None else ""
            save_config(config, output_dir / "config.yaml")
        run(config, inputs, runtime, resume_from, changed)
    finally:
        inputs.close()
        stop()


def check_left_to_do(checkpoint: Path, total_steps: int, config: Config) -> None:
    """Raise NothingToDo when the checkpoint is of the run's last step, or of a later one."""
    done = saved_step(checkpoint)
    if done < total_steps:
        return
    last = f"the last of {total_steps} steps" if done == total_steps else f"beyond the last of {total_steps} steps"
    more = "total_epochs" if config.trainer.total_training_steps is None else "total_training_steps"
    raise NothingToDo(
        f"nothing to do: {checkpoint} is {last}; raise trainer.{more}, set trainer.resume=never to begin anew, or "
        "another trainer.output_dir"
    )


def changed_since(checkpoint: Path, config: Config) -> str:
    """What differs from the config that lies with the checkpoint's run, in one line; empty where nothing does."""
    saved = checkpoint.absolute().parents[1] / "config.yaml"
    found = changes(saved, config)
    return f"changed against {saved}: {', '.join(found)}" if found else ""


def run(config: Config, inputs: RunInputs, runtime: Runtime, resume_from: Path | None, changed: str = "") -> None:
    """Models and loop on a started runtime. `changed`: what the user is told of a resumed run's config."""
    trackers = open_trackers(config, runtime.is_first, saved_step(resume_from), header(config, inputs, runtime))
    if runtime.is_first:
        HERE.listeners.append(trackers.live)
        if changed:
            trackers.say(changed)
    checkpointer = Checkpointer(Path(config.trainer.output_dir), config.trainer.checkpoint, runtime)
    try:
        inputs.loop(config, runtime, trackers, checkpointer).run(resume_from)
    finally:
        HERE.listeners.clear()
        trackers.close()


def header(config: Config, inputs: RunInputs, runtime: Runtime) -> dict[str, str]:
    """Lines for the console's header."""
    return {
        "model": f"{config.model.path} ({getattr(inputs.model.hf_config, 'model_type', '')})",
        "ranks": f"{runtime.plan.world_size} × {runtime.device.type}",
        **header_lines(runtime.plan),
        **inputs.facts(config, runtime),
        "steps": str(inputs.total_steps),
    }


if __name__ == "__main__":
    sys.exit(main())
