"""The rollout role: each replica samples its share of a step's prompts with the actor's current weights."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from spmd_rl.config import Config
from spmd_rl.data.balance import balance
from spmd_rl.data.batch import Batch
from spmd_rl.engines.base import Engine
from spmd_rl.roles.residency import Residency
from spmd_rl.rollout.base import Request, RolloutEngine, to_batch
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.topology.layout import split_rows
from spmd_rl.weights.held import Held
from spmd_rl.weights.sync import TableSync

Groups = dict[int, Request]
"""Some of a step's groups: place in the step -> its request, with what is begun of its replies."""


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

    def shares(self, count: int, costs: Sequence[int] | None = None) -> list[list[int]]:
        """Which of `count` prompts each replica samples, ascending: consecutive, even but for one (design, Dispatch);
        with `costs` such that their sums are even."""
        if costs is not None:
            return balance(costs, self.layout.dp_size, cost=list)
        starts = split_rows(count, self.layout.dp_size).tolist()
        return [list(range(a, b)) for a, b in itertools.pairwise(starts)]

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

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The engine is ready to generate, with the actor's current weights; afterwards it gives the GPU back."""
        self.residency.enter("weight_sync" if self.stale else "decode")
        self.engine.wake("weights")
        self.sync()
        self.residency.enter("decode")
        self.engine.wake("kv_cache")
        yield
        if not self.engine.sleep():
            self.synced_at = -1

    def generate(
        self,
        prompts: Sequence[HasPrompt],
        params: SamplingParams,
        n: int,
        step: int,
        seed: int,
        costs: Sequence[int] | None = None,
    ) -> Batch:
        """n replies for this replica's share of `prompts`; rows of one prompt are together, in `row_id` order.

        `costs`: tokens that each prompt's replies are expected to have. On ranks of a replica that do not collect, the
        batch has the same columns and no rows.
        """
        share = self.shares(len(prompts), costs)[self.layout.dp_rank(self.pool_rank)]
        groups = {place: Request(prompts[place].uid, prompts[place].prompt_ids, n, step) for place in share}
        with self.awake():
            groups = self.draw(groups, params, seed)
        return self.collected(groups)

    def draw(self, groups: Groups, params: SamplingParams, seed: int, new_tokens: int | None = None) -> Groups:
        """The same groups with up to `new_tokens` (unset: all) more tokens of each reply; the engine is awake."""
        asked = list(groups.values())
        replies = self.engine.generate(asked, params, seed=seed, new_tokens=new_tokens)
        drawn = [replace(request, begun=found) for request, found in zip(asked, replies, strict=True)]
        return dict(zip(groups, drawn, strict=True))

    def collected(self, groups: Groups) -> Batch:
        """What there is of the groups' replies as rows in `row_id` order, where this rank collects; else none."""
        places = sorted(groups)
        batch = to_batch([groups[place] for place in places], self.engine.no_routes)
        ids = [place * groups[place].n + s for place in places for s in range(groups[place].n)]
        batch["row_id"] = torch.tensor(ids, dtype=torch.int64)
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
