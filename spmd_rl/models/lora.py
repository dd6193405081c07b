"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by peft: put into the model in place, merged when it leaves.

The base weights are frozen; only `lora_A` [r, in] and `lora_B` [out, r] train. W' = W + alpha / r * B A.
"""

import re
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.config import ConfigError, how_to_install
from spmd_rl.config.run import LoraConfig
from spmd_rl.models.names import Export


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> PreTrainedModel:
    """Put adapters into a model on the meta device, in place, and freeze the rest.

    Raises ConfigError when peft is missing, no module goes by the names in `target_modules`, or some are experts.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora.rank={config.rank} needs peft; {how_to_install('lora')}") from error
    targets = list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules={targets}: {error}") from error
    if any(".experts.base_layer." in name for name, _ in model.named_parameters()):
        raise ConfigError(config.takes_experts())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return model


def merged(model: nn.Module, name: str, clean: str) -> Export:
    """The export of an adapted weight: base, A and B -> W + alpha / r * B A, summed in float32."""
    owner = name[: name.rindex(".base_layer.")]
    target = clean.replace(".base_layer.", ".")
    if not name.endswith(".weight"):
        return Export(target, (name,))
    scale = float(model.get_submodule(owner).scaling["default"])  # type: ignore[index, union-attr]
    factors = (f"{owner}.lora_A.default.weight", f"{owner}.lora_B.default.weight")
    return Export(target, (name, *factors), None, partial(_merge, scale))


def _merge(scale: float, sources: Sequence[Tensor]) -> Tensor:
    base, a, b = sources
    return (base.float() + scale * (b.float() @ a.float())).to(base.dtype)


def base_name(name: str) -> str:
    """The name that a parameter has without adapters: the checkpoint's."""
    return re.sub(r"\.base_layer\.", ".", name)
