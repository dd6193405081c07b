"""The one file that imports megatron-core: everything that is taken from it, and what it expects of its users done.

Transformer Engine and Apex are used by megatron-core where they are installed; neither is needed. Nothing here reads
or sets its `parallel_state`: groups are passed as a `ProcessGroupCollection`, so that models of different layouts can
live in one process. Raises ImportError when megatron-core is not installed.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says at length that Transformer Engine and Apex are not there
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import GPTModel
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

__all__ = [
    "MLP",
    "AttnMaskType",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MLPSubmodules",
    "MoELayer",
    "MoESubmodules",
    "ModuleSpec",
    "P2PCommunicator",
    "ProcessGroupCollection",
    "RankGenerator",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_bias_dropout_add",
    "get_forward_backward_func",
    "moe_utils",
    "parallel_state",
    "token_dispatcher",
]

if parallel_state._GLOBAL_MEMORY_BUFFER is None:
    parallel_state._set_global_memory_buffer()  # scratch memory of sequence parallelism; knows no groups
initialize_rng_tracker(inference_rng_tracker=True)  # nothing here drops out, so no generator is to be kept apart
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 reads a name that only Transformer Engine brings
