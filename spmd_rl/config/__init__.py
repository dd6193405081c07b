"""Structured configs: dataclasses with a docstring per field, composed by Hydra (`load`), checked by `validate`."""

from dataclasses import dataclass, field

from spmd_rl.config.cluster import ClusterConfig
from spmd_rl.config.roles import (
    ActorConfig,
    CriticConfig,
    EngineConfig,
    RefConfig,
    RewardConfig,
    RolloutConfig,
    TeacherConfig,
)
from spmd_rl.config.run import (
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    ObserveConfig,
    PoolConfig,
    TrainerConfig,
)

__all__ = ["Config", "ConfigError", "EngineConfig", "PoolConfig", "how_to_install"]


class ConfigError(ValueError):
    """A mistake of the user's, found before a model is loaded: says what, with its values, and how to mend it."""


def how_to_install(extra: str) -> str:
    """How to get the packages of one of pyproject.toml's extras, for an error that says that one of them is missing."""
    names = ",".join(dict.fromkeys(("quickstart", extra)))
    return f"in the checkout: bash install.sh {names} (or pip install -e '.[{extra}]' -c constraints.txt)"


@dataclass
class Config:
    """The whole run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The machines."""
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Pools besides `global`; each role names the one it lives on. `global` gets the ranks that no other pool took."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The actor's start."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy that is trained."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scoring."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """Distillation."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages and KL."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The loop."""
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    """What is shown and kept."""
