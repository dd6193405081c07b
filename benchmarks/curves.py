"""Draws the committed runs: `python -m benchmarks.curves` -> docs/algorithms.png and docs/quickstart_gpu.png."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path("benchmarks/results")
ACCURACY = "val-core/chain_sum/acc/mean@1"


def series(metrics: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    rows = [row for row in metrics if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def algorithms() -> None:
    """Mean over seeds, the seeds' range shaded, the untrained model as a line."""
    data = json.loads((RESULTS / "algorithms.json").read_text())
    by_name: dict[str, list[list[float]]] = {}
    for name, run in data["runs"].items():
        steps, values = series(run["metrics"], ACCURACY)
        by_name.setdefault(name.split("/")[0], []).append(values)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, seeds in by_name.items():
        columns = list(zip(*seeds, strict=True))
        axes.plot(steps, [mean(c) for c in columns], label=name.upper(), marker="o", markersize=3)
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.12)
    start = mean(seeds[0] for runs in by_name.values() for seeds in runs)
    axes.axhline(start, color="grey", linestyle="--", linewidth=1, label="untrained")
    axes.set(xlabel="step", ylabel="greedy accuracy, 200 unseen problems", ylim=(0, None))
    axes.set_title(f"SmolLM2-135M on sums, three seeds, {data['hardware']}")
    axes.legend(ncols=4, fontsize=8)
    figure.savefig("docs/algorithms.png", dpi=120)


def quickstart() -> None:
    """Training reward and validation accuracy of the 100-step run."""
    data = json.loads((RESULTS / "quickstart.json").read_text())
    metrics = data["runs"]["quickstart"]["metrics"]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(*series(metrics, "critic/score/mean"), label="training reward", linewidth=1, alpha=0.6)
    axes.plot(*series(metrics, ACCURACY), label="validation accuracy (greedy)", marker="o")
    axes.set(xlabel="step", ylim=(0, None), title=f"Quickstart preset, 100 steps, one {data['hardware']}")
    axes.legend()
    figure.savefig("docs/quickstart_gpu.png", dpi=120)


if __name__ == "__main__":
    algorithms()
    quickstart()
