"""What a rollout engine is: a model that samples replies and takes the actor's weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.weights.held import Held, TensorSpec


@dataclass(frozen=True)
class Request:
    """One prompt to sample `n` replies for. `uid` and the sample's number key the noise."""

    uid: int
    prompt_ids: Sequence[int]
    n: int = 1


@dataclass
class Reply:
    """One sampled reply: token ids with the stop token, their log-probs, and whether it ended by a stop token."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool


class RolloutEngine(Protocol):
    """All ranks of a replica call every method in the same order with the same arguments."""

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> list[list[Reply]]:
        """n replies for each request, in order."""
        ...

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


def to_batch(requests: Sequence[Request], replies: Sequence[Sequence[Reply]]) -> Batch:
    """Rows in request order, samples inside: the columns that docs/architecture.md lists for a rollout."""
    flat = [(r, s, reply) for r, group in zip(requests, replies, strict=True) for s, reply in enumerate(group)]
    as_int = torch.int64
    rows = TensorDict(
        {
            "uid": torch.tensor([r.uid for r, _, _ in flat], dtype=as_int),
            "sample": torch.tensor([s for _, s, _ in flat], dtype=as_int),
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
    return Batch(rows, ragged)
