"""Which roles a run has, where they live and how they are held."""

from dataclasses import dataclass, replace

from spmd_rl.config import Config
from spmd_rl.config.roles import EngineConfig, OptimConfig


@dataclass(frozen=True)
class RoleSpec:
    """What the plan reads of a role's config. `engine` is None for the rollout, `optim` for what is not trained."""

    role: str
    pool: str
    engine: EngineConfig | None
    optim: OptimConfig | None
    path: str | None

    @property
    def trained(self) -> bool:
        """Whether it has gradients and optimizer state."""
        return self.optim is not None


def needs_ref(config: Config) -> bool:
    """Whether a KL term to the reference policy is asked for, in the loss or in the reward."""
    return config.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def role_specs(config: Config) -> dict[str, RoleSpec]:
    """The roles of the run in plan order. Supervised fine-tuning has only the actor."""
    c = config
    specs = [RoleSpec("actor", c.actor.pool, c.actor.engine, c.actor.optim, None)]
    if c.trainer.mode != "sft":
        specs.append(RoleSpec("rollout", c.rollout.pool, None, None, None))
        if needs_ref(c):
            specs.append(RoleSpec("ref", c.ref.pool, c.ref.engine, None, c.ref.path))
        if c.algorithm.adv_estimator == "gae":
            specs.append(RoleSpec("critic", c.critic.pool, c.critic.engine, c.critic.optim, c.critic.path))
        if c.reward.model.enable:
            specs.append(RoleSpec("reward", c.reward.model.pool, c.reward.model.engine, None, c.reward.model.path))
        if c.teacher.enable:
            specs.append(RoleSpec("teacher", c.teacher.pool, c.teacher.engine, None, c.teacher.path))
    return {spec.role: spec for spec in specs}


def only_sampling(config: Config) -> Config:
    """The config of a run that trains nothing (eval, generate): the actor and the rollout on all ranks, no other model,
    groups of any size."""
    algorithm = replace(config.algorithm, adv_estimator="reinforce_plus_plus", use_kl_in_reward=False)
    algorithm = replace(algorithm, filter_groups=replace(algorithm.filter_groups, enable=False))
    return replace(
        config,
        pools={},
        actor=replace(config.actor, pool="global", use_kl_loss=False, router_replay="none"),
        rollout=replace(config.rollout, pool="global"),
        reward=replace(config.reward, model=replace(config.reward.model, enable=False)),
        teacher=replace(config.teacher, enable=False),
        algorithm=algorithm,
        trainer=replace(config.trainer, mode="rl", schedule="colocated", staleness=1),
    )


def config_path(spec: RoleSpec) -> str:
    """Where the role's block is in the config (`reward.model` for the reward role)."""
    return "reward.model" if spec.role == "reward" else spec.role
