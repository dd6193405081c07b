"""Which experts a MoE model's routers choose: written down where replies are sampled, and chosen again in training.

Rollout routing replay (Ma et al. 2025, arXiv:2510.11370): training takes the rollout's experts, and weighs them by the
probabilities of the router that is trained, so that gradients still reach it.

Shapes: S tokens, L MoE layers of the model (dense layers have no entry), E experts, k of them for each token.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from spmd_rl.config import ConfigError
from spmd_rl.data.routes import NONE


def check_routers(hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for a model whose routers are not known here."""
    if hf_config.model_type != "qwen3_moe":
        raise ConfigError(
            f"actor.router_replay=rollout: the routers of {hf_config.model_type} are not known here, only those of "
            "qwen3_moe; set actor.router_replay=none"
        )


def moe_layers(hf_config: PretrainedConfig) -> list[int]:
    """The numbers of the layers that have experts, as transformers builds them."""
    c, dense = hf_config, hf_config.mlp_only_layers or ()
    return [i for i in range(c.num_hidden_layers) if i not in dense and (i + 1) % c.decoder_sparse_step == 0]


def no_routes(hf_config: PretrainedConfig) -> Tensor:
    """The choices for no token: [0, L, k], in the smallest type that has all experts."""
    dtype = torch.uint8 if hf_config.num_experts <= 256 else torch.int16
    return torch.empty(0, len(moe_layers(hf_config)), hf_config.num_experts_per_tok, dtype=dtype)


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a transformers model, first layer to last."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter  # dense models do without it

    return [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]


class Recorder:
    """Writes down what the routers choose in each forward."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._chosen: list[Tensor] = []
        for router in routers(model):
            router.register_forward_hook(self._note)

    def _note(self, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen.append(output[2])

    def take(self) -> Tensor:
        """The choices of the last forward, on the host: [S, L, k]."""
        chosen, self._chosen = torch.stack(self._chosen, 1), []
        return chosen.to(self.dtype).cpu()


class Replay:
    """Has the routers of a transformers model choose what `routes` says."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.routes: Tensor | None = None
        """[S, L, k] for the next forward, and for its recomputation in the backward; None: the routers choose."""
        self.differs = torch.zeros(2, dtype=torch.float64, device=device)
        """What `replayed` counted since `take`."""
        for place, router in enumerate(routers(model)):
            router.register_forward_hook(partial(self._choose, place))

    def _choose(
        self, place: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.routes is None:
            return None
        logits_SE, _, own_Sk = output
        chosen_Sk, differs = replayed(own_Sk, self.routes[:, place])
        self.differs += differs
        weights_Sk = logits_SE.softmax(-1, dtype=torch.float32).gather(1, chosen_Sk)
        if router.norm_topk_prob:
            weights_Sk = weights_Sk / weights_Sk.sum(-1, keepdim=True)
        return logits_SE, weights_Sk.to(logits_SE.dtype), chosen_Sk

    def take(self) -> Tensor:
        """The differences so far; counts from 0 again."""
        differs, self.differs = self.differs, torch.zeros_like(self.differs)
        return differs


def replayed(own_Sk: Tensor, given_Sk: Tensor) -> tuple[Tensor, Tensor]:
    """(The experts to take: the given ones, or the router's own where none are given [S, k]; how many of the given ones
    are not among the router's own, and how many are given: float64 [2])."""
    given_Sk = given_Sk.to(own_Sk)
    is_given = given_Sk != NONE
    is_own = (given_Sk[:, :, None] == own_Sk[:, None]).any(-1)
    counts = torch.stack([(is_given & ~is_own).sum(), is_given.sum()]).double()
    return torch.where(is_given, given_Sk, own_Sk), counts
