"""What a rollout engine is: a model that samples replies and takes the actor's weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.routes import COLUMN
from spmd_rl.rollout.sampling import SamplingParams, row_keys
from spmd_rl.weights.held import Held, TensorSpec


@dataclass(frozen=True)
class Reply:
    """One sampled reply: token ids with the stop token, their log-probs as they were drawn, and whether it ended by a
    stop token."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool
    routes: Tensor | None = field(default=None, compare=False)
    """[prompt + reply - 1, L, k] experts that each MoE layer chose for each token that was read: all but the last one.
    None where the engine does not tell them."""

    def done(self, max_tokens: int) -> bool:
        """Whether nothing is to be added: it has ended, or is as long as a reply may be."""
        return self.finished or len(self.token_ids) >= max_tokens

    def followed_by(
        self, token_ids: list[int], log_probs: list[float], finished: bool, routes: Tensor | None = None
    ) -> "Reply":
        """The reply with further tokens. `routes`: of all tokens from the prompt's first on; those that were read again
        to go on keep the choices under which they were drawn."""
        if routes is not None and self.routes is not None:
            routes = torch.cat([self.routes, routes[len(self.routes) :]])
        return Reply(self.token_ids + token_ids, self.log_probs + log_probs, finished, routes)


@dataclass(frozen=True)
class Request:
    """One prompt to sample `n` replies for. `step`, `uid` and the sample's number key the noise."""

    uid: int
    prompt_ids: Sequence[int]
    n: int
    step: int
    """In which the replies are begun; it stays when they go on in a later one."""
    begun: Sequence[Reply] = ()
    """What there is of each of the n replies, to be continued where it stands; empty: nothing yet."""

    def __post_init__(self) -> None:
        if self.begun and len(self.begun) != self.n:
            raise ValueError(f"Request {self.uid}: {len(self.begun)} replies are begun, but n={self.n}")

    def replies(self) -> list[Reply]:
        """What there is of each reply."""
        return list(self.begun) or [Reply([], [], False) for _ in range(self.n)]


def request_keys(seed: int, rows: Sequence[tuple[Request, int]]) -> Tensor:
    """The noise's key of each (request, sample): int64 [B]."""
    steps, uids, samples = torch.tensor([(r.step, r.uid, s) for r, s in rows]).T
    return row_keys(seed, steps, uids, samples)


class RolloutEngine(Protocol):
    """All ranks of a replica call every method in the same order with the same arguments."""

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, new_tokens: int | None = None
    ) -> list[list[Reply]]:
        """n replies for each request, in order, with what was begun; each gets at most `new_tokens` more in this call.

        A reply that is drawn in several calls is the one that a single call draws, under the same weights.
        """
        ...

    no_routes: Tensor | None
    """Where the replies have `routes`: those of no token [0, L, k]; else None."""
    specs: list[TensorSpec]
    """The tensors of the checkpoint that it is made from."""
    held: list[Held] | None
    """Where this rank's part of each checkpoint tensor lies, to be written in place; None where only `load_weights`
    can put them in."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take (Hugging Face name, full tensor) pairs into the engine's own parameters."""
        ...

    def weights_changed(self) -> None:
        """After every weight sync: forget what was computed with the old ones."""
        ...

    def sleep(self) -> bool:
        """Give the GPU back: the KV cache, and the weights where the engine can. Whether the weights are kept."""
        ...

    def wake(self, what: str) -> None:
        """Be ready for new `weights`, or (after them) to generate: `kv_cache`."""
        ...

    def asleep_bytes(self) -> int:
        """Of what torch's allocator counts, the bytes that are not on the GPU because the engine sleeps."""
        ...


def to_batch(requests: Sequence[Request], no_routes: Tensor | None = None) -> Batch:
    """What there is of their replies, rows in request order, samples inside: the columns that docs/architecture.md
    lists for a rollout. `no_routes`: the engine's."""
    flat = [(r, s, reply) for r in requests for s, reply in enumerate(r.replies())]
    as_int = torch.int64
    rows = TensorDict(
        {
            "uid": torch.tensor([r.uid for r, _, _ in flat], dtype=as_int),
            "sample": torch.tensor([s for _, s, _ in flat], dtype=as_int),
            "begun_at": torch.tensor([r.step for r, _, _ in flat], dtype=as_int),
            "finished": torch.tensor([reply.finished for _, _, reply in flat], dtype=torch.bool),
        },
        batch_size=[len(flat)],
    )
    responses = Ragged.from_rows([torch.tensor(reply.token_ids, dtype=as_int) for _, _, reply in flat], as_int)
    ragged = {
        "prompts": Ragged.from_rows([torch.tensor(r.prompt_ids, dtype=as_int) for r, _, _ in flat], as_int),
        "responses": responses,
        "rollout_log_probs": Ragged.from_rows(
            [torch.tensor(reply.log_probs, dtype=torch.float32) for _, _, reply in flat], torch.float32
        ),
        "response_mask": responses.map(lambda v: torch.ones(len(v), dtype=torch.float32)),
    }
    if no_routes is not None:
        routes = [no_routes if reply.routes is None else reply.routes for _, _, reply in flat]
        lengths = torch.tensor([len(found) for found in routes], dtype=as_int)
        ragged[COLUMN] = Ragged(torch.cat([no_routes, *routes]), lengths)
    return Batch(rows, ragged)
