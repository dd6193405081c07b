"""Rollout with a plain transformers model and our own decode loop.

Rows of a wave share preallocated KV buffers; each row sits at its own length, so nothing is left-padded. A prompt is
prefilled once for its whole group. Finished rows are compacted away. The buffers live only while generating.

Shapes: B rows of a wave, P prompts, L places of the KV buffers, H heads, K key-value heads, D head size, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from spmd_rl.models.names import destinations
from spmd_rl.models.routing import Recorder
from spmd_rl.rollout.base import Reply, Request, request_keys
from spmd_rl.rollout.sampling import SamplingParams, sample
from spmd_rl.weights.held import held_by, specs_of

ATTENTION = "spmd_rl_rollout"


class KvCache:
    """Keys and values of every layer, [B, K, L, D] each; `lengths` [B] tokens are filled in each row."""

    def __init__(self, copies: int, capacity: int, lengths_P: Tensor) -> None:
        self.copies = copies
        self.capacity = capacity
        self.lengths = lengths_P.repeat_interleave(copies)
        self.longest = int(lengths_P.max())
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def prefill(self, layer: int, k_PKLD: Tensor, v_PKLD: Tensor) -> None:
        """Store right-padded prompts, each for all of its samples.

        Places past a row's length are masked, but must be finite all the same: 0 × nan is nan.
        """
        p, heads, length, dim = k_PKLD.shape
        shape = (p * self.copies, heads, self.capacity, dim)
        k, v = k_PKLD.new_zeros(shape), v_PKLD.new_zeros(shape)
        k[:, :, :length] = k_PKLD.repeat_interleave(self.copies, dim=0)
        v[:, :, :length] = v_PKLD.repeat_interleave(self.copies, dim=0)
        self.layers[layer] = (k, v)

    def append(self, layer: int, k_BK1D: Tensor, v_BK1D: Tensor) -> tuple[Tensor, Tensor]:
        """Put one token a row at its length; returns views of the filled part [B, K, longest + 1, D]."""
        k, v = self.layers[layer]
        at = torch.arange(len(k), device=k.device)
        k[at, :, self.lengths] = k_BK1D[:, :, 0]
        v[at, :, self.lengths] = v_BK1D[:, :, 0]
        return k[:, :, : self.longest + 1], v[:, :, : self.longest + 1]

    def mask(self) -> Tensor:
        """Which places a row's new token may see: bool [B, 1, 1, longest + 1]."""
        places = torch.arange(self.longest + 1, device=self.lengths.device)
        return (places <= self.lengths[:, None])[:, None, None]

    def grow(self) -> None:
        self.lengths = self.lengths + 1
        self.longest += 1

    def keep(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        for layer, (k, v) in self.layers.items():  # one at a time: never a second copy of all of them
            self.layers[layer] = (k[rows], v[rows])


def _attention(
    module: nn.Module,
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: KvCache,
    token_mask: Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if token_mask is None:  # prefill: right padding lies after every real token, so causality alone hides it
        cache.prefill(layer, k_BKTD, v_BKTD)
        gqa = q_BHTD.shape[1] != k_BKTD.shape[1]
        out = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2), None
    k, v = cache.append(layer, k_BKTD, v_BKTD)
    b, heads, _, dim = q_BHTD.shape
    grouped = q_BHTD.reshape(b, k.shape[1], heads // k.shape[1], dim)  # the heads of a KV head become queries
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=token_mask, scale=scaling)
    return out.reshape(b, 1, heads, dim), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


class TransformersRollout:
    """A `RolloutEngine` over one whole copy of the model on this rank (infer_tp = 1)."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_batch_rows: int,
        no_routes: Tensor | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.no_routes = no_routes
        self._recorder = Recorder(model, no_routes.dtype) if no_routes is not None else None
        self.device = next(model.parameters()).device
        self.eos = frozenset(eos_token_ids)
        self.max_batch_rows = max_batch_rows
        self._destinations = destinations(model)
        self.specs, self.held = specs_of(model), held_by(model)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        missing = set(self._destinations)
        for name, tensor in weights:
            if name not in self._destinations:
                raise RuntimeError(f"weight sync: {name} arrived, but the rollout's model has no such tensor")
            target = self._destinations[name]
            if target.shape != tensor.shape:
                raise RuntimeError(f"weight sync: {name} is {tuple(tensor.shape)}, rollout holds {tuple(target.shape)}")
            target.copy_(tensor)
            missing.discard(name)
        if missing:
            raise RuntimeError(f"weight sync: nothing arrived for {sorted(missing)[:5]}")

    def weights_changed(self) -> None:
        """Nothing to do: nothing is kept between calls."""

    def sleep(self) -> bool:
        """Nothing to do: the KV buffers live only inside `generate`, and the weights stay."""
        return True

    def wake(self, what: str) -> None:
        """Nothing to do."""

    def asleep_bytes(self) -> int:
        """None: nothing of it leaves the device."""
        return 0

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, new_tokens: int | None = None
    ) -> list[list[Reply]]:
        replies = [request.replies() for request in requests]
        for wave in self._waves(list(_starts(requests, replies, params.max_tokens))):
            rows = [(start.request, s) for start in wave for s in start.samples]
            keys = request_keys(seed, [(requests[i], s) for i, s in rows]).to(self.device)
            drawn = self._generate_wave(wave, params, keys, new_tokens or params.max_tokens)
            for (i, s), added in zip(rows, drawn, strict=True):
                replies[i][s] = replies[i][s].followed_by(*added)
        return replies

    def _waves(self, starts: Sequence["_Start"]) -> list[list["_Start"]]:
        """What is decoded together: equal numbers of rows a start, similar lengths, at most max_batch_rows rows."""
        waves: list[list[_Start]] = []
        for start in sorted(starts, key=lambda start: (len(start.samples), len(start.ids))):
            n = len(start.samples)
            fits = waves and len(waves[-1][0].samples) == n and (len(waves[-1]) + 1) * n <= self.max_batch_rows
            if fits:
                waves[-1].append(start)
            else:
                waves.append([start])
        return waves

    def _generate_wave(
        self, wave: Sequence["_Start"], params: SamplingParams, keys: Tensor, new_tokens: int
    ) -> list["_Added"]:
        """What is added to each row's reply."""
        n = len(wave[0].samples)
        lengths_P = torch.tensor([len(start.ids) for start in wave])
        begun = torch.tensor([start.begun for start in wave], device=self.device).repeat_interleave(n)
        limits = (params.max_tokens - begun).clamp(max=new_tokens)
        width = int(limits.max())
        cache = KvCache(n, int(lengths_P.max()) + width, lengths_P.to(self.device))
        logits = self._prefill(wave, cache).repeat_interleave(n, dim=0)

        writer = _Writer(limits, width, params, self.eos)
        paths = self._paths(wave, width)
        for place in range(width):
            tokens, logprobs = sample(logits, params, keys, begun + place)
            alive = writer.write(tokens, logprobs)
            if not len(alive):
                break
            if len(alive) < len(tokens):
                tokens, keys, begun = tokens[alive], keys[alive], begun[alive]
                cache.keep(alive)
            logits = self._decode(tokens, cache)
            if paths is not None and self._recorder is not None:
                paths.write(writer.rows, place, self._recorder.take())
        return writer.rows_so_far(paths)

    def _paths(self, wave: Sequence["_Start"], width: int) -> "_Paths | None":
        """After the prefill: its routes, and room for those of the decoding."""
        if self._recorder is None:
            return None
        routes = self._recorder.take().unflatten(0, (len(wave), -1))
        read = [row[: len(start.ids)] for row, start in zip(routes, wave, strict=True) for _ in start.samples]
        return _Paths(read, routes.new_empty(len(read), width, *routes.shape[2:]))

    def _prefill(self, wave: Sequence["_Start"], cache: KvCache) -> Tensor:
        """Logits [P, V] after each start."""
        width = max(len(start.ids) for start in wave)
        ids = torch.tensor([[*s.ids, *[0] * (width - len(s.ids))] for s in wave], device=self.device)
        hidden = self._run(ids, torch.arange(width, device=self.device)[None].expand_as(ids), cache, None)
        last = torch.tensor([len(start.ids) - 1 for start in wave], device=self.device)
        return self._head(hidden[torch.arange(len(wave), device=self.device), last])

    def _decode(self, tokens_B: Tensor, cache: KvCache) -> Tensor:
        """Feed one token a row; logits [B, V] for the next."""
        hidden = self._run(tokens_B[:, None], cache.lengths[:, None], cache, cache.mask())
        cache.grow()
        return self._head(hidden[:, 0])

    def _run(self, ids_BT: Tensor, positions_BT: Tensor, cache: KvCache, token_mask: Tensor | None) -> Tensor:
        out = self.model.base_model(
            input_ids=ids_BT, position_ids=positions_BT, use_cache=False, cache=cache, token_mask=token_mask
        )
        return out.last_hidden_state

    def _head(self, hidden_BD: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden_BD)


class _Start(NamedTuple):
    """Tokens that are prefilled once, and the samples of a request that go on from them."""

    request: int
    samples: list[int]
    ids: list[int]
    """The prompt, and what is begun of the reply."""
    begun: int
    """How many of them are the reply's."""


def _starts(requests: Sequence[Request], replies: Sequence[Sequence[Reply]], max_tokens: int) -> Iterator[_Start]:
    """Samples of which nothing is there yet go on from their prompt together, a begun one from its own tokens."""
    for i, (request, group) in enumerate(zip(requests, replies, strict=True)):
        fresh = [s for s, reply in enumerate(group) if not reply.token_ids]
        if fresh:
            yield _Start(i, fresh, list(request.prompt_ids), 0)
        for s, reply in enumerate(group):
            if reply.token_ids and not reply.done(max_tokens):
                yield _Start(i, [s], [*request.prompt_ids, *reply.token_ids], len(reply.token_ids))


class _Added(NamedTuple):
    """What a call adds to a reply: the arguments of `Reply.followed_by`."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool
    routes: Tensor | None


class _Paths(NamedTuple):
    """The experts that were chosen for a wave's tokens, on the host."""

    read: list[Tensor]
    """[tokens, L, k] of each row's prefill."""
    drawn: Tensor
    """[rows, width, L, k] of the tokens that were drawn and read; what lies past them is not set."""

    def write(self, rows: Tensor, place: int, routes: Tensor) -> None:
        """Those of each living row's token at `place`."""
        self.drawn[rows.cpu(), place] = routes

    def of(self, row: int, count: int) -> Tensor:
        """Those of the prefill and of `count` drawn tokens."""
        return torch.cat([self.read[row], self.drawn[row, :count]])


class _Writer:
    """Collects the tokens of a wave's rows; knows which rows are still alive."""

    def __init__(self, limits_B: Tensor, width: int, params: SamplingParams, eos: frozenset[int]) -> None:
        """`limits_B`: tokens that a row gets at most, `width` the largest of them."""
        rows, device = len(limits_B), limits_B.device
        self.limits = limits_B
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, width, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.rows = torch.arange(rows, device=device)
        ends = set() if params.ignore_eos else eos | set(params.stop_token_ids)
        self.stops = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        self.position = 0

    def write(self, tokens_B: Tensor, logprobs_B: Tensor) -> Tensor:
        """Append one token to each living row; returns the indices (into the living rows) that go on."""
        rows = self.rows
        self.tokens[rows, self.position] = tokens_B
        self.logprobs[rows, self.position] = logprobs_B
        self.lengths[rows] += 1
        self.position += 1
        ended = torch.isin(tokens_B, self.stops)
        self.finished[rows] = ended
        alive = (~ended & (self.limits[rows] > self.position)).nonzero()[:, 0]
        self.rows = rows[alive]
        return alive

    def rows_so_far(self, paths: "_Paths | None") -> list["_Added"]:
        """What was written to each row."""
        table = zip(
            self.tokens.tolist(), self.logprobs.tolist(), self.lengths.tolist(), self.finished.tolist(), strict=True
        )
        return [
            _Added(t[:n], p[:n], done, None if paths is None else paths.of(row, n - 1))
            for row, (t, p, n, done) in enumerate(table)
        ]
