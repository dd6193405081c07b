"""The policy: a transformers causal LM that answers with log-probs of asked-for tokens instead of logits.

Everything, the head included, happens inside `Policy.forward`, because a sharded model has its weights only there.

Shapes: S tokens of this rank (packed rows, see packing.py), R' asked-for positions among them.
"""

from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.models.attention import NAME, check_attention
from spmd_rl.models.distill import likeliest, reverse_kl
from spmd_rl.models.logprobs import check_head, token_logprobs
from spmd_rl.models.names import clean_name
from spmd_rl.models.packing import Packing


class Policy(nn.Module):
    """Holds the causal LM as `model`, so parameter names are the checkpoint's with `model.` before them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        check_attention(model.config)
        check_head(model.get_output_embeddings(), model.config)
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"Policy: build the model with attention {NAME!r}, it has {model.config._attn_implementation!r}"
            )
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packing: Packing,
        positions: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        chunk: int = 1024,
        top_k: int = 0,
        teacher_ids: Tensor | None = None,
        teacher_log_probs: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """`log_probs` of `targets` [R'] as the tokens that follow the places `positions` [R'] of input_ids [S].

        With them, when asked for, `entropy` and `sum_pi_squared`, [R'] each, all float32 (float64 for a float64 model).
        A teacher gives `top_ids` and `top_log_probs` [R', K] of its `top_k` likeliest tokens; a student that is shown
        them (`teacher_*`) gives `teacher_kl` [R'].
        Other positions cost no logits. R' may be 0: the call then still runs (and back-propagates through) every layer,
        as ranks that share a layout must.
        """
        hidden_1SH = self.model.get_decoder()(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packing=packing
        ).last_hidden_state
        hidden, head = hidden_1SH[0].index_select(0, positions), self.model.get_output_embeddings().weight
        stats = token_logprobs(
            hidden,
            head,
            targets,
            temperature,
            chunk=chunk,
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
        )
        columns: dict[str, Tensor | None]
        columns = {"log_probs": stats.logprobs, "entropy": stats.entropy, "sum_pi_squared": stats.sum_pi_squared}
        if top_k:
            columns["top_ids"], columns["top_log_probs"] = likeliest(hidden, head, top_k, temperature, chunk)
        if teacher_ids is not None and teacher_log_probs is not None:
            columns["teacher_kl"] = reverse_kl(hidden, head, teacher_ids, teacher_log_probs, temperature, chunk)
        return {name: column for name, column in columns.items() if column is not None}


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, first to last: what is sharded, recomputed and compiled one at a time."""
    inner = getattr(model, "model", None)
    lm = inner if isinstance(inner, PreTrainedModel) and not isinstance(model, PreTrainedModel) else model
    layers = getattr(lm.get_decoder(), "layers", None) if isinstance(lm, PreTrainedModel) else None
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(lm).__name__}: no list of decoder layers found")
    return list(layers)


def huggingface_name(name: str) -> str:
    """A parameter's name inside `Policy` (wrapped or not) -> its name in the transformers model."""
    return clean_name(name).removeprefix("model.")
