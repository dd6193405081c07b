"""The picture of a run, from its metrics.jsonl. The only file that imports matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd_rl.config import ConfigError
from spmd_rl.observe.jsonl import read_metrics

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("critic/score/mean",)),
    ("loss", ("sft/loss", "train/loss")),
    ("response length (tokens)", ("response_length/mean",)),
    ("entropy", ("actor/entropy",)),
)


def draw(runs: Sequence[str | Path], picture: str | Path, title: str = "") -> Path:
    """Draw one PNG of one or several run folders (or metrics.jsonl files): validation first, then the panels present.

    Raises ConfigError when matplotlib is missing or a run has no metrics.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("drawing a curve needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {_name(run): _rows(Path(run)) for run in runs}
    panels = [(label, names) for label, names in (_validation(rows), *PANELS) if _present(rows, names)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.4), squeeze=False)
    for axis, (label, names) in zip(axes[0], panels, strict=True):
        for run, lines in rows.items():
            for name in names:
                points = [(line["step"], line[name]) for line in lines if name in line]
                legend = " ".join(part for part in (run if len(rows) > 1 else "", _short(name, names)) if part)
                if points:
                    marker = "o" if name.startswith("val-") else None
                    axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=legend or None)
        axis.set(title=label, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return Path(picture)


def _rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl" if run.is_dir() else run
    if not file.is_file():
        raise ConfigError(f"{run} holds no metrics.jsonl; train with jsonl among observe.trackers")
    rows = read_metrics(file)
    if not rows:
        raise ConfigError(f"{file} holds no metrics yet")
    return rows


def _name(run: str | Path) -> str:
    path = Path(run)
    return path.parent.name if path.suffix == ".jsonl" else path.name


def _validation(rows: dict[str, list[dict[str, Any]]]) -> tuple[str, tuple[str, ...]]:
    names = {name for lines in rows.values() for line in lines for name in line}
    return "validation", tuple(sorted(n for n in names if n.startswith("val-core/") and not n.endswith("/std")))


def _present(rows: dict[str, list[dict[str, Any]]], names: tuple[str, ...]) -> bool:
    return any(name in line for lines in rows.values() for line in lines for name in names)


def _short(name: str, names: tuple[str, ...]) -> str:
    return name.removeprefix("val-core/") if name.startswith("val-") else ""
