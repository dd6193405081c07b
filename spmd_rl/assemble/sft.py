"""A supervised fine-tuning run: conversations, one role, one loop."""

from dataclasses import dataclass

from spmd_rl.assemble.model import Model, let_move, load_model_facts, make_engine, make_order, updates_a_step
from spmd_rl.config import Config
from spmd_rl.data.chat import ChatRow, ChatRows
from spmd_rl.data.order import PromptOrder
from spmd_rl.data.rows import is_set, load_rows
from spmd_rl.observe.tracking import Trackers
from spmd_rl.roles.model import ModelRole
from spmd_rl.roles.residency import Residency
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.topology.plan import Plan
from spmd_rl.trainer.checkpoint import Checkpointer
from spmd_rl.trainer.sft import SftTrainer


@dataclass
class SftInputs:
    """Everything of an SFT run that needs no device."""

    model: Model
    order: PromptOrder[ChatRow]
    validation: ChatRows | None
    total_steps: int

    def facts(self, config: Config, runtime: Runtime) -> dict[str, str]:
        """Lines for the console's header that only an SFT run has."""
        return {
            "batch": f"{config.data.train_batch_size} conversations a step",
            "rows": f"{len(self.order.rows)} to train on, {len(self.validation or [])} to validate on",
        }

    def loop(self, config: Config, runtime: Runtime, trackers: Trackers, checkpointer: Checkpointer) -> SftTrainer:
        """The actor on its engine, and the loop over it."""
        residency = Residency()
        engine = make_engine(
            "actor", config, self.model, config.actor.engine, runtime,
            folder=self.model.folder, optim=config.actor.optim, total_steps=self.total_steps * updates_a_step(config),
        )  # fmt: skip
        let_move(residency, "actor", engine, config.actor.engine, runtime.device)
        actor = ModelRole("actor", engine, runtime.groups.along(runtime.layout("actor").batch, "dp"))
        return SftTrainer(
            config, runtime, actor, residency, self.order, self.validation, trackers, checkpointer, self.total_steps,
            self.model.fingerprint,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing was started."""


def load_inputs(config: Config, plan: Plan, job_rank: int) -> SftInputs:
    """Read and tokenise the conversations."""
    model = load_model_facts(config)
    data = config.data
    train = ChatRows.build(data, data.train, model.tokenizer)
    validation = None
    if is_set(data.val):
        validation = ChatRows.build(data, data.val, model.tokenizer, train_rows=load_rows(data.train, data))
    order, total = make_order(config, train)
    return SftInputs(model, order, validation, total)
