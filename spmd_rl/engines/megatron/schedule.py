"""A pass over micro-batches through megatron-core's schedules: no pipeline, 1F1B, or interleaved 1F1B."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmd_rl.data.batch import Batch
from spmd_rl.data.routes import NONE, routes_of
from spmd_rl.engines.megatron.model import Model
from spmd_rl.engines.megatron.stream import Stream
from spmd_rl.models.packing import response_positions
from spmd_rl.runtime.mcore import P2PCommunicator, get_forward_backward_func

NO_TOKENS = torch.zeros((), dtype=torch.int32)
"""The count that megatron-core would divide gradients by; see `gradients`."""


@dataclass
class Micro:
    """A micro-batch as this rank computes it."""

    rows: Batch
    stream: Stream
    input_ids: Tensor
    """int64 [1, S]"""
    positions: Tensor
    """Places in the stream whose outputs predict the response tokens: int64 [R], ascending, on the host."""
    targets: Tensor
    """The response tokens: int64 [R], on the host."""

    @classmethod
    def of(cls, rows: Batch, model: Model) -> "Micro":
        """Rows of this dp rank, none of them to keep the others company in a collective."""
        prompts, responses = rows["prompts"], rows["responses"]
        pairs = zip(prompts.rows(), responses.rows(), strict=True)
        tokens = torch.cat([torch.empty(0, dtype=torch.int64), *(t for pair in pairs for t in pair)])
        lengths = (prompts.lengths + responses.lengths).tolist()
        tp = model.groups.tp.size() if model.config.sequence_parallel else 1
        stream = Stream.of(lengths, model.groups.cp, tp, model.device)
        model.rotate(stream)
        input_ids = stream.local(tokens)[None].to(model.device)
        positions = response_positions(prompts.lengths.tolist(), responses.lengths.tolist())
        if model.replays:
            stream.routes = _routes(rows, stream, model)
        return cls(rows, stream, input_ids, positions, responses.values)


def _routes(rows: Batch, stream: Stream, model: Model) -> dict[int, Tensor]:
    """What this rank's layers choose for its tokens; with sequence parallelism it routes a part of its stream."""
    tp = model.groups.tp
    local = stream.local(routes_of(rows), NONE).chunk(tp.size())[tp.rank()].to(model.device)
    mine = model.routings()
    return {layer: local[:, place] for place, layer in enumerate(model.moe_layers) if layer in mine}


OnLast = Callable[[Micro, Tensor], Any]
"""What the last stage makes of a micro-batch's hidden states [S or S/tp, 1, H]; in training (loss, info)."""


def run_schedule(
    model: Model, chunks: Sequence[Any], parts: Sequence[Micro], on_last: OnLast, train: bool
) -> list[Any]:
    """Forward (and backward) of all micro-batches. On the last stage: what `on_last` returned (in training the info) of
    each, in order; elsewhere nothing."""
    padded = [*parts, *_padding(model, parts)]
    interleaved = len(chunks) > 1
    run = get_forward_backward_func(model.stages, len(chunks) if interleaved else None)
    found = run(
        forward_step_func=partial(_step, on_last, train),
        data_iterator=[iter(padded) for _ in chunks] if interleaved else iter(padded),
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(padded),
        seq_length=padded[0].stream.total,
        micro_batch_size=1,
        forward_only=not train,
        p2p_communicator=P2PCommunicator(model.groups.pp, model.config) if model.stages > 1 else None,
        pg_collection=model.groups,
    )
    return list(found[: len(parts)])


def _padding(model: Model, parts: Sequence[Micro]) -> list[Micro]:
    """Empty micro-batches up to a multiple of pp, which the interleaved schedule needs."""
    missing = -len(parts) % model.stages if model.names.vpp > 1 else 0
    return [Micro.of(parts[0].rows.select([]), model)] * missing


def _step(on_last: OnLast, train: bool, parts: Any, chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """megatron-core's forward step: (what goes to the next stage, what the last stage makes of it)."""
    part: Micro = next(parts)
    hidden = chunk(part.input_ids, None, None, packed_seq_params=part.stream)
    return hidden, partial(_end, on_last, train, part)


def _end(on_last: OnLast, train: bool, part: Micro, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
    """(loss, number of tokens, what is kept): a triple, as a pair would be multiplied by cp and divided."""
    if not train:
        return hidden.new_zeros(()), NO_TOKENS, on_last(part, hidden)
    loss, info = on_last(part, hidden)
    return loss, NO_TOKENS, info
