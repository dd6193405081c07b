"""The rollout role: each replica samples its share of a step's prompts with the actor's current weights."""

from collections.abc import Sequence
from typing import Protocol

import torch

from spmd_rl.config import Config
from spmd_rl.data.batch import Batch
from spmd_rl.engines.base import Engine
from spmd_rl.roles.residency import Residency
from spmd_rl.rollout.base import Request, RolloutEngine, to_batch
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.topology.layout import split_rows
from spmd_rl.weights.held import Held
from spmd_rl.weights.sync import TableSync


class HasPrompt(Protocol):
    """What is sampled for: its number within the run and its token ids."""

    @property
    def uid(self) -> int: ...

    @property
    def prompt_ids(self) -> list[int]: ...


class Rollout:
    """Samples replies; takes the actor's weights whenever they have changed since the last time."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        engine: RolloutEngine,
        actor: Engine | None,
        residency: Residency | None = None,
    ) -> None:
        """`actor`: whose weights are taken; None where they come from another pool (`WeightSync`)."""
        self.config, self.runtime, self.layout = config, runtime, runtime.layout("rollout")
        self.pool_rank = runtime.pool_rank
        self.engine, self.actor = engine, actor
        self._path: TableSync | None = None
        self.residency = residency or Residency()
        self.synced_at = -1
        """The actor's version (optimizer steps) that the engine holds; -1 before the first sync."""

    def share(self, count: int) -> slice:
        """Which of `count` prompts this rank's replica samples: consecutive, even but for one (design, Dispatch)."""
        starts = split_rows(count, self.layout.dp_size)
        mine = self.layout.dp_rank(self.pool_rank)
        return slice(int(starts[mine]), int(starts[mine + 1]))

    @property
    def stale(self) -> bool:
        """Whether the actor has moved on since its weights were taken."""
        return self.actor is not None and self.synced_at != self.actor.version

    def sync(self) -> bool:
        """Weight sync, if the actor has moved on; whether there was one."""
        if self.actor is None or not self.stale:
            return False
        held = self.actor.held()
        if held is None or self.engine.held is None:
            self.engine.load_weights(self.actor.weights())
        else:
            self._connect(held, self.engine.held).run(self.config.rollout.verify_sync)
        self.engine.weights_changed()
        self.synced_at = self.actor.version
        return True

    def _connect(self, sources: list[Held], targets: list[Held]) -> TableSync:
        """The table of what goes where: made at the first sync, bound anew when tensors lie elsewhere than before."""
        if self._path is None:
            r = self.runtime
            self._path = TableSync(self.engine.specs, sources, targets, r.everyone, r.control, r.device)
        elif not self._path.bound_to(sources, targets):
            self._path.bind(sources, targets)
        return self._path

    def generate(self, prompts: Sequence[HasPrompt], params: SamplingParams, n: int, step: int, seed: int) -> Batch:
        """n replies for this replica's share of `prompts`; rows of one prompt are together, in `row_id` order.

        On ranks of a replica that do not collect, the batch has the same columns and no rows.
        """
        self.residency.enter("weight_sync" if self.stale else "decode")
        self.engine.wake("weights")
        self.sync()
        self.residency.enter("decode")
        self.engine.wake("kv_cache")
        share = self.share(len(prompts))
        requests = [Request(p.uid, p.prompt_ids, n) for p in prompts[share]]
        batch = to_batch(requests, self.engine.generate(requests, params, seed=seed, step=step))
        if not self.engine.sleep():
            self.synced_at = -1
        batch["row_id"] = torch.arange(share.start * n, share.start * n + len(batch))
        return batch if self.layout.collects(self.pool_rank) else batch.select([])

    def training_params(self) -> SamplingParams:
        """How to sample for training."""
        c = self.config.rollout
        return self._params(c.temperature, c.top_p, c.top_k)

    def greedy_params(self) -> SamplingParams:
        """The likeliest token each time, for a baseline."""
        return self._params(0.0, 1.0, -1)

    def validation_params(self) -> SamplingParams:
        """How to sample for validation."""
        c = self.config.rollout
        return self._params(c.val_temperature, c.val_top_p, -1)

    def _params(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        c = self.config.rollout
        limit = self.config.data.max_response_length
        return SamplingParams(temperature, top_p, top_k, limit, tuple(c.stop_token_ids), c.ignore_eos)
