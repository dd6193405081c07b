"""`spmd-rl from-verl`: print a verl command line or script in our words, then plan it and say what cannot run."""

import sys
from dataclasses import replace

from spmd_rl.config import Config, ConfigError
from spmd_rl.config.from_verl import Translation, read, render, translate
from spmd_rl.config.load import compose
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan

USAGE = """usage: spmd-rl from-verl SCRIPT.sh | spmd-rl from-verl 'actor_rollout_ref.actor.optim.lr=1e-6 …'

Prints the translation to stdout; to stderr what verl's command line left to our defaults, and what cannot run.

Exit code: 0 the translation can be planned, 2 it is impossible or not valid.
"""


def main(argv: list[str]) -> int:
    """Run `spmd-rl from-verl`. Returns the exit code; raises ConfigError for a script that cannot be read."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    script = read(argv)
    made = translate(script.words, script.module)
    made.unsure = script.unsure
    print(render(made, script.module), flush=True)
    try:
        config = compose(made.overrides)
    except ConfigError as error:
        print(f"\nthe translation is not a valid config yet: {error}", file=sys.stderr)
        return 2
    notes, status = checked(made, config)
    if notes:
        print("", *notes, sep="\n", file=sys.stderr)
    return status


def checked(made: Translation, config: Config) -> tuple[list[str], int]:
    """(what there is to say of a translation that composed to `config`, a line each; the exit code)."""
    notes = []
    if "model.path" not in made.values:
        notes.append(f"not given, so it is our default: model.path={config.model.path}")
        # The user's own model will come there: the default's heads and layers say nothing about it.
        config = replace(config, model=replace(config.model, path="(not given)"))
    if not config.data.train.files:
        notes.append("not given, and a run needs it: data.train.files")
    try:
        plan = Plan.from_config(config, Cluster.from_config(config))
    except ConfigError as error:
        return [*notes, "the translation cannot run:", *(f"  - {line}" for line in str(error).splitlines())], 2
    if plan.shape is None:
        notes.append(
            "planned without the model's shape (no config.json at hand): whether heads and layers can be divided and "
            "memory suffices is not checked; for that, plan with model.path=FOLDER, or model.shape=qwen3-8b or another"
        )
    return notes + [f"warning: {warning}" for warning in plan.warnings], 0
