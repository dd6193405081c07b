"""Rewrites bad_plans.yaml with what the plan says now: `python -m tests.topology.refresh_bad_plans`. Read the diff."""

from pathlib import Path

import yaml

from spmd_rl.config import ConfigError
from spmd_rl.topology.cluster import Cluster
from spmd_rl.topology.plan import Plan
from tests.topology.configured import configured

FILE = Path(__file__).parent / "bad_plans.yaml"


def mistakes_of(overrides: list[str]) -> list[str]:
    """The lines of the error; empty when the plan is possible."""
    config = configured(*overrides)
    try:
        Plan.from_config(config, Cluster.from_config(config))
    except ConfigError as error:
        return str(error).splitlines()
    return []


if __name__ == "__main__":
    head, _, body = FILE.read_text().partition("\n")
    found = [{"overrides": c["overrides"], "mistakes": mistakes_of(c["overrides"])} for c in yaml.safe_load(body)]
    text = yaml.safe_dump(found, width=10**6, allow_unicode=True, sort_keys=False)
    FILE.write_text(f"{head}\n{text}")
