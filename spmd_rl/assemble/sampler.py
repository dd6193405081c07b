"""A policy that only samples: from `model.path`, or from a checkpoint saved at any world size."""

from pathlib import Path

from spmd_rl.assemble.model import Model, make_engine, make_rollout_engine
from spmd_rl.config import Config, ConfigError
from spmd_rl.data.prompts import Prompts
from spmd_rl.data.rows import load_rows
from spmd_rl.roles.rollout import Rollout
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.trainer.checkpoint import Checkpointer, check_fingerprint, find_checkpoint


def wanted_checkpoint(config: Config, model: Model) -> Path | None:
    """The checkpoint that `trainer.resume` names; None for model.path (also under auto: only a name asks for one).

    Raises ConfigError when there is none, or it holds another model.
    """
    if config.trainer.resume in ("auto", "never"):
        return None
    try:
        folder = find_checkpoint(Path(config.trainer.resume))
    except ConfigError as error:
        raise ConfigError(f"trainer.resume={config.trainer.resume}: {error}") from None
    check_fingerprint(folder, model.fingerprint)
    return folder


def read_prompts(config: Config, model: Model, source: str) -> Prompts:
    """The prompts of `data.val` (without those of data.train, as configured) or of `data.train`."""
    data = config.data
    if source == "train":
        return Prompts.build(data, data.train, model.tokenizer)
    train_rows = load_rows(data.train, data) if data.train.files or data.train.task else []
    return Prompts.build(data, data.val, model.tokenizer, train_rows=train_rows)


def open_rollout(config: Config, model: Model, runtime: Runtime, checkpoint: Path | None) -> Rollout:
    """The rollout role over a frozen actor that holds the weights."""
    actor = make_engine("actor", config, model, config.actor.engine, runtime, folder=model.folder)
    if checkpoint is not None:
        tensors = {"actor": actor.state()}
        checkpointer = Checkpointer(checkpoint.parents[1], config.trainer.checkpoint, runtime)
        state = checkpointer.load(checkpoint, tensors)
        actor.load_state(tensors["actor"], state["versions"]["actor"])
    return Rollout(config, runtime, make_rollout_engine(config, model, runtime), actor)
