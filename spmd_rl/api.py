"""The public API: what a user's own code may import, and what stays as it is from one minor version to the next.

Your own advantage, loss, reward or role is a function in a file that the config names; see examples/own_*.py.
Everything else in the package may move.

    from spmd_rl.api import TokenBatch                       # a loss: batch, **settings -> loss of each token, metrics
    from spmd_rl.api import Batch, Config, Reward, Runtime   # a role: built_in, config, runtime -> role
    from spmd_rl.api import Cluster, Plan, compose           # Plan.from_config(compose([…]), Cluster.from_counts([8]))
"""

from spmd_rl.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    BatchTotals,
    Estimator,
    PolicyLoss,
    Statistics,
    TokenBatch,
    advantage_estimator,
    aggregate,
    kl_penalty,
    masked_mean,
    masked_whiten,
    policy_loss,
    value_loss,
)
from spmd_rl.config import Config, ConfigError
from spmd_rl.config.load import compose
from spmd_rl.data.batch import Batch, Ragged
from spmd_rl.data.prompts import Prompt, Prompts
from spmd_rl.data.rows import Row
from spmd_rl.data.shard import Shard
from spmd_rl.engines.base import Engine, Objective, StepResult
from spmd_rl.rewards import REWARDS, Completion, Scored, Scorer
from spmd_rl.roles.model import ModelRole
from spmd_rl.roles.reward import Reward
from spmd_rl.roles.rollout import Rollout
from spmd_rl.rollout.base import Reply, Request, RolloutEngine
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.runtime.bootstrap import Runtime
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan
from spmd_rl.trainer.trainer import Roles, Trainer

__all__ = [
    "ADVANTAGES",
    "POLICY_LOSSES",
    "REWARDS",
    "Batch",
    "BatchTotals",
    "Cluster",
    "Completion",
    "Config",
    "ConfigError",
    "Engine",
    "Estimator",
    "ModelRole",
    "Objective",
    "Plan",
    "PolicyLoss",
    "Prompt",
    "Prompts",
    "Ragged",
    "Reply",
    "Request",
    "Reward",
    "Roles",
    "Rollout",
    "RolloutEngine",
    "Row",
    "Runtime",
    "SamplingParams",
    "Scored",
    "Scorer",
    "Shard",
    "Statistics",
    "StepResult",
    "TokenBatch",
    "Trainer",
    "advantage_estimator",
    "aggregate",
    "compose",
    "kl_penalty",
    "masked_mean",
    "masked_whiten",
    "policy_loss",
    "value_loss",
]
