"""Long tails: a step's groups are sampled in rounds, the step ends when enough of them are complete or a limit is
reached, and what is left is carried to the next step or dropped (docs/tails.md).

All ranks hear after every round how far each group is, and decide from that alone: the same on any number of ranks,
whatever replica samples what. Only a clock is asked on one rank; it tells the others.

Partial rollouts: Kimi k1.5, arXiv 2501.12599, section 2.6.2. Over-sampling with an early stop: as in verl and AReaL.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from spmd_rl.config import Config, ConfigError
from spmd_rl.data.batch import Batch
from spmd_rl.data.order import Rows
from spmd_rl.data.prompts import Prompt, PromptOrder
from spmd_rl.data.routes import COLUMN
from spmd_rl.roles.rollout import Groups, Rollout
from spmd_rl.rollout.base import Reply, Request
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.runtime.exchange import exchange, gather
from spmd_rl.runtime.remote import Remote, here, local, on
from spmd_rl.topology.tails import in_flight
from spmd_rl.trainer.ahead import load_rows, saved_rows
from spmd_rl.trainer.collect import Collected, Sampler, hearers
from spmd_rl.trainer.lengths import Lengths

FOLDER = "carried"
"""Of a checkpoint: <pool rank>.rows, the carried rows that one rank of the rollout held."""


@dataclass(frozen=True)
class Group:
    """What every rank knows of a group that is under way."""

    uid: int
    step: int
    """In which it was begun: whose noise it draws."""
    left: int
    """Replies that are not done."""
    tokens: int = 0
    """Drawn so far, of all replies together."""
    truncated: int = 0
    """Replies that are done and did not end by a stop token."""


class Tails:
    """A `Collect` that chooses among groups; keeps those that a step leaves over."""

    def __init__(self, config: Config, runtime: Runtime, rollout: Rollout | Remote, lengths: Lengths) -> None:
        self.config, self.runtime, self.rollout, self.lengths = config, runtime, rollout, lengths
        self.carried: list[Group] = []
        """Oldest first."""
        self.rows: Batch | Remote = Remote(("rollout",))
        """This rank's part of their replies; `row_id` counts from 0 over the carried groups."""

    def __call__(self, trainer: Sampler, step: int) -> Collected | None:
        """The first `train_batch_size` groups that are complete, in the order in which they were begun."""
        flight = self._flight(trainer.prompts, step)
        if not flight:
            return None
        with trainer.phase("generate") as guard, self._awake():
            now, groups, ending = self._rounds(flight, self._requests(flight, trainer.prompts.rows))
            chosen = self._choose(now)
            kept = self._keep(now, chosen)
            batch = self._rows(groups, chosen)
            local(lambda rows: guard.check(rows, ["rollout_log_probs"]), batch)
        self.carried, self.rows = [now[place] for place in kept], self._rows(groups, kept)
        metrics = ending | _metrics(flight, now, chosen, kept, step)
        return Collected(trainer.score(batch, trainer.prompts.rows, self.config.rollout.n), metrics)

    def _flight(self, order: PromptOrder[Prompt], step: int) -> list[Group]:
        """The groups of this step: those that were carried to it, then fresh ones."""
        room = in_flight(self.config) - len(self.carried)
        fresh = order.take(room) if room > 0 else []
        return self.carried + [Group(prompt.uid, step, self.config.rollout.n) for prompt in fresh]

    def _awake(self) -> AbstractContextManager[None]:
        return nullcontext() if isinstance(self.rollout, Remote) else self.rollout.awake()

    @on("rollout")
    def _requests(self, flight: Sequence[Group], prompts: Rows[Prompt]) -> Groups:
        """What this rank's replica samples; carried replies move to where they go on."""
        rollout, n = here(self.rollout), self.config.rollout.n
        shares = rollout.shares(len(flight), self._costs(flight))
        begun: dict[int, list[Reply]] = {}
        if self.carried:
            carried = [[p * n + s for p in share if p < len(self.carried) for s in range(n)] for share in shares]
            begun = _replies(here(exchange(self.rows, carried, self.runtime.edge("rollout", "rollout"))), n)
        mine = {place: flight[place] for place in shares[rollout.layout.dp_rank(self.runtime.pool_rank)]}
        return {
            place: Request(group.uid, prompts.at(group.uid).prompt_ids, n, group.step, begun.get(place, ()))
            for place, group in mine.items()
        }

    def _costs(self, flight: Sequence[Group]) -> list[int]:
        """Tokens that each group still takes: of each reply that is not done, what is expected beyond what there is."""
        n = self.config.rollout.n
        expected = self.lengths.expected([group.uid for group in flight]) or [1] * len(flight)
        return [g.left * max(1, length - g.tokens // n) for g, length in zip(flight, expected, strict=True)]

    def _rounds(
        self, flight: list[Group], groups: Groups | Remote
    ) -> tuple[list[Group], Groups | Remote, dict[str, float]]:
        """Sample on until the step may end: how far the groups are then, their replies, and how it ended."""
        started, rounds, spent = monotonic(), 0, 0
        while not (why := self._ended(flight, spent, started)):
            new_tokens = self._segment(spent)
            groups = self._draw(groups, new_tokens)
            flight = self._agree(flight, groups)
            rounds, spent = rounds + 1, spent + new_tokens
        stopped = {f"rollout/stopped_by_{limit}": float(why == limit) for limit in ("tokens", "clock")}
        return flight, groups, {"rollout/rounds": float(rounds), **stopped}

    def _ended(self, flight: Sequence[Group], spent: int, started: float) -> str:
        """Why the step's sampling ends here: enough | done | tokens | clock; empty: it goes on.

        A step needs a group to train on, so the limits wait for the first one.
        """
        limit, usable = self.config.rollout.max_new_tokens_per_step, sum(map(self._usable, flight))
        if usable >= self.config.data.train_batch_size:
            return "enough"
        if not any(group.left for group in flight):
            return "done"
        if usable and 0 < limit <= spent:
            return "tokens"
        return "clock" if usable and spent and self._late(started) else ""

    def _late(self, started: float) -> bool:
        """What the first rank of the rollout's clock says."""
        limit = self.config.rollout.time_limit_s
        if not limit:
            return False
        first = self.runtime.plan.pools[self.runtime.layout("rollout").pool].ranks[0]
        return bool(hearers(self.runtime).say(monotonic() - started > limit, first))

    def _segment(self, spent: int) -> int:
        """Tokens of the next round, a reply."""
        rollout, sizes = self.config.rollout, [self.config.data.max_response_length]
        if rollout.segment_tokens:
            sizes.append(rollout.segment_tokens)
        if limit := rollout.max_new_tokens_per_step:
            sizes.append(limit - spent % limit)
        return min(sizes)

    @on("rollout")
    def _draw(self, groups: Groups | Remote, new_tokens: int) -> Groups:
        """A round: up to `new_tokens` more of each reply."""
        rollout = here(self.rollout)
        return rollout.draw(here(groups), rollout.training_params(), self.config.trainer.seed, new_tokens)

    def _agree(self, flight: Sequence[Group], groups: Groups | Remote) -> list[Group]:
        """How far every group is, from those who sample them."""
        whole = gather(self._progress(groups), ["progress"], hearers(self.runtime))
        return [
            replace(group, left=left, tokens=tokens, truncated=truncated)
            for group, (left, tokens, truncated) in zip(flight, whole["progress"].tolist(), strict=True)
        ]

    @on("rollout")
    def _progress(self, groups: Groups | Remote) -> Batch:
        """Of the groups whose replies this rank collects."""
        mine = here(groups) if here(self.rollout).layout.collects(self.runtime.pool_rank) else {}
        longest = self.config.data.max_response_length
        rows = [_progress(request.replies(), longest) for request in mine.values()]
        batch = Batch.empty_like(len(mine))
        batch["row_id"] = torch.tensor(list(mine), dtype=torch.int64)
        batch["progress"] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        return batch

    def _usable(self, group: Group) -> bool:
        """Whether the step may train on it: it is complete, and no reply is cut off where that is not wanted."""
        return not group.left and not (group.truncated and self.config.rollout.truncated == "drop_group")

    def _choose(self, flight: Sequence[Group]) -> list[int]:
        """Places of the groups that the step trains on. ConfigError when none is left."""
        usable = [place for place, group in enumerate(flight) if self._usable(group)]
        if not usable:
            raise ConfigError(
                f"rollout.truncated=drop_group: each of the step's {len(flight)} groups has a reply of "
                f"data.max_response_length={self.config.data.max_response_length} tokens, so none is left to train on; "
                "raise that length or rollout.over_sampling, or set rollout.truncated=mask"
            )
        return usable[: self.config.data.train_batch_size]

    def _keep(self, flight: Sequence[Group], chosen: Sequence[int]) -> list[int]:
        """Places of the groups that the next step goes on with: all others that it could train on some day."""
        rest = [place for place in range(len(flight)) if place not in set(chosen)]
        return [p for p in rest if self.config.rollout.partial and (flight[p].left or self._usable(flight[p]))]

    @on("rollout")
    def _rows(self, groups: Groups | Remote, places: Sequence[int]) -> Batch:
        """This rank's rows of some groups, numbered anew."""
        mine = here(groups)
        return here(self.rollout).collected({i: mine[place] for i, place in enumerate(places) if place in mine})

    def state(self) -> dict[str, Any]:
        """What is carried, for a checkpoint's JSON part."""
        groups = [vars(group) for group in self.carried]
        return {"n": self.config.rollout.n, "router_replay": self.config.actor.router_replay, "groups": groups}

    def files(self) -> dict[str, Tensor]:
        """A checkpoint's files of this rank."""
        return saved_rows(f"{FOLDER}/", self.rows, self.runtime) if self.carried else {}

    def load(self, state: dict[str, Any], folder: Path) -> None:
        """Go on with what a checkpoint carries, on any number of rollout ranks."""
        self.carried = [Group(**group) for group in state["groups"]]
        if self.carried and self.runtime.plays("rollout"):
            self.rows = load_rows(f"{FOLDER}/", folder, self.runtime)


def _progress(replies: Sequence[Reply], longest: int) -> tuple[int, int, int]:
    """(replies that are not done, tokens of all, replies that are done by their length alone)."""
    done = [reply for reply in replies if reply.done(longest)]
    tokens = sum(len(reply.token_ids) for reply in replies)
    return len(replies) - len(done), tokens, sum(not reply.finished for reply in done)


def _replies(rows: Batch, n: int) -> dict[int, list[Reply]]:
    """Place of a group -> its replies; rows of a group follow each other."""
    tokens, log_probs = ([row.tolist() for row in rows[name].rows()] for name in ("responses", "rollout_log_probs"))
    routes = rows[COLUMN].rows() if COLUMN in rows else [None] * len(rows)
    replies = [Reply(*reply) for reply in zip(tokens, log_probs, rows["finished"].tolist(), routes, strict=True)]
    places = (rows["row_id"][::n] // n).tolist()
    return {place: replies[i * n : (i + 1) * n] for i, place in enumerate(places)}


def _metrics(
    before: Sequence[Group], now: Sequence[Group], chosen: Sequence[int], kept: Sequence[int], step: int
) -> dict[str, float]:
    """`rollout/*`: what became of the step's groups, and how old what it trains on is."""
    dropped = [place for place in range(len(now)) if place not in {*chosen, *kept}]
    trained = sum(now[place].tokens for place in chosen)
    return {
        "rollout/groups": float(len(chosen)),
        "rollout/new_tokens": float(sum(b.tokens - a.tokens for a, b in zip(before, now, strict=True))),
        "rollout/carried_groups": float(len(kept)),
        "rollout/carried_tokens": float(sum(now[place].tokens for place in kept)),
        "rollout/dropped_groups": float(len(dropped)),
        "rollout/dropped_tokens": float(sum(now[place].tokens for place in dropped)),
        "rollout/earlier_tokens_ratio": sum(before[place].tokens for place in chosen) / trained,
        "rollout/steps_in_flight/max": float(max(step - now[place].step for place in chosen)),
    }
