"""Rollout by vLLM in this process: the engine core runs on the rank, its weights are written in place.

All ranks of a replica walk the same loop: the same requests in the same order, the same number of engine steps. What
one rank alone could know (a clock that ran out) it must tell the others before anybody acts on it.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from spmd_rl.rollout.base import Reply, Request, request_keys
from spmd_rl.rollout.keyed import KeyedDraws
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.rollout.vllm_versions import Done, Settings, Vllm
from spmd_rl.weights.held import Held, TensorSpec
from spmd_rl.weights.trace import Load, Untraceable, prove, trace

logger = logging.getLogger("spmd_rl.rollout")


class VllmRollout:
    """A `RolloutEngine`; `infer_tp` × `infer_pp` ranks of the pool hold one replica."""

    def __init__(
        self,
        settings: Settings,
        specs: list[TensorSpec],
        eos_token_ids: Sequence[int],
        sleep_level: int,
        no_routes: Tensor | None = None,
    ) -> None:
        """Start the engine with empty weights and learn where each tensor of the checkpoint (`specs`) goes."""
        self.vllm = Vllm(settings)
        self.device, self.eos, self.sleep_level = settings.device, frozenset(eos_token_ids), sleep_level
        self.asleep, self.no_routes = False, no_routes
        self.specs, self.held = specs, self._trace(specs)

    def _trace(self, specs: Sequence[TensorSpec]) -> list[Held] | None:
        """Where this rank's slices lie; None (and a line in the log) where only vLLM's own loader can put them."""
        model = self.vllm.model
        reason = self.vllm.writable()
        if reason is None:
            try:
                load = cast(Load, model.load_weights)
                held = trace(load, specs, dict(model.named_parameters()))
                prove(load, specs, held)
                return held
            except Untraceable as error:
                reason = str(error)
        logger.warning("weight sync goes through vLLM's reload_weights, which is slower: %s", reason)
        return None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.vllm.reload(weights)

    def weights_changed(self) -> None:
        self.vllm.reset_prefix_cache()

    def sleep(self) -> bool:
        """Give the KV cache's memory back, and the weights': at level 1 to the host, at level 2 for good."""
        if self.sleep_level and self.device.type == "cuda":
            self.vllm.sleep(self.sleep_level)
            self.asleep = True
        return not self.asleep or self.sleep_level < 2

    def wake(self, what: str) -> None:
        if self.asleep:
            self.vllm.wake([what])
            self.asleep = what != "kv_cache"

    def asleep_bytes(self) -> int:
        return self.vllm.pool_bytes() if self.asleep else 0

    def close(self) -> None:
        self.vllm.close()

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, new_tokens: int | None = None
    ) -> list[list[Reply]]:
        replies = [request.replies() for request in requests]
        rows = [(i, s) for i, group in enumerate(replies) for s, r in enumerate(group) if not r.done(params.max_tokens)]
        if not rows:
            return replies
        begun = [replies[i][s].token_ids for i, s in rows]
        limits = [min(new_tokens or params.max_tokens, params.max_tokens - len(ids)) for ids in begun]
        keys = request_keys(seed, [(requests[i], s) for i, s in rows])
        draws = KeyedDraws(params, keys, torch.tensor([len(requests[i].prompt_ids) for i, _ in rows]), self.device)
        self.vllm.sampler.draws = draws
        try:
            read = [[*requests[i].prompt_ids, *ids] for (i, _), ids in zip(rows, begun, strict=True)]
            drawn = self._loop(read, limits, params, draws)
        finally:
            self.vllm.sampler.draws = None
        log_probs = draws.log_probs_RM.tolist()
        for row, (i, s) in enumerate(rows):
            (token_ids, finished, routes), at = drawn[row], len(begun[row])
            if routes is not None and self.no_routes is not None:
                routes = routes.to(self.no_routes.dtype)
            drawn_at = log_probs[row][at : at + len(token_ids)]
            replies[i][s] = replies[i][s].followed_by(token_ids, drawn_at, finished, routes)
        return replies

    def _loop(
        self, read: Sequence[list[int]], limits: Sequence[int], params: SamplingParams, draws: KeyedDraws
    ) -> dict[int, Done]:
        """Queue every reply, then step the engine until all are done, by row.

        `read`: the prompt and what is begun of the reply; `limits`: new tokens at most.
        """
        ends = frozenset() if params.ignore_eos else self.eos | set(params.stop_token_ids)
        with_ends = replace(params, stop_token_ids=tuple(sorted(ends)))
        for row, (ids, limit) in enumerate(zip(read, limits, strict=True)):
            draws.row_of[self.vllm.add(str(row), ids, with_ends, limit)] = row
        done: dict[int, Done] = {}
        while self.vllm.busy():
            done |= {int(name): reply for name, reply in self.vllm.step()}
        return done
