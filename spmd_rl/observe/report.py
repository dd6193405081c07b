"""`spmd-rl report`: the end of a run in a few lines, and its curve as a PNG."""

from pathlib import Path

from spmd_rl.config import ConfigError
from spmd_rl.observe.curve import draw
from spmd_rl.observe.jsonl import read_metrics


def main(argv: list[str]) -> int:
    """`spmd-rl report RUN [RUN …] [-o curve.png]`: one picture of all runs, and start and end of each validation."""
    output = None
    if "-o" in argv:
        at = argv.index("-o")
        output, argv = "".join(argv[at + 1 : at + 2]), argv[:at] + argv[at + 2 :]
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: spmd-rl report RUN_FOLDER [RUN_FOLDER …] [-o curve.png]")
        return 0 if argv else 2
    picture = draw(argv, output or Path(argv[0]) / "curve.png", title=", ".join(Path(run).name for run in argv))
    for run in argv:
        print("\n".join([run, *summary(Path(run))]))
    print(f"curve: {picture}")
    return 0


def summary(run: Path) -> list[str]:
    """A line for each validation metric: first, best and last value with their steps."""
    rows = read_metrics(run / "metrics.jsonl" if run.is_dir() else run)
    if not rows:
        raise ConfigError(f"{run} holds no metrics yet")
    lines = [f"  steps: {max(row['step'] for row in rows)}"]
    for name in sorted({name for row in rows for name in row if name.startswith("val-core/")}):
        points = [(row["step"], row[name]) for row in rows if name in row]
        first, last, best = points[0], points[-1], max(points, key=lambda point: point[1])
        places = (f"{value:.3f} (step {step})" for step, value in (first, best, last))
        lines.append("  {}: start {}, best {}, end {}".format(name.removeprefix("val-core/"), *places))
    return lines
