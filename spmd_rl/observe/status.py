"""`spmd-rl status OUTPUT_DIR`: what every rank of a run does now, and what ended the run when something did.

    spmd-rl status outputs/spmd_rl/run [--watch]

Reads <output_dir>/status.json, which the run's first rank writes anew every few seconds, and the message that a failed
run left in <output_dir>/failures/. Exit status 0 when the run works or is done, 1 when it failed or says nothing.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd_rl.config import ConfigError
from spmd_rl.observe.live import Report

STATUS = "status.json"
QUIET_S = 30.0
"""A status that was not written for so long is an old one."""
REFRESH_S = 2.0
SHOWN = 32
"""Ranks in a table; of more, those that differ from the rest come first."""


def main(argv: list[str] | None = None) -> int:
    """Print the table once, or with --watch until the run ends."""
    words = sys.argv[1:] if argv is None else argv
    watch, folders = "--watch" in words, [word for word in words if word != "--watch"]
    if len(folders) != 1 or folders[0].startswith("-"):
        print(__doc__)
        return 0 if "--help" in words or "-h" in words else 2
    folder = Path(folders[0])
    while True:
        text, code, works = describe(folder, time.time())
        print(f"\033[H\033[2J{text}" if watch and sys.stdout.isatty() else text, flush=True)
        if not (watch and works):
            return code
        time.sleep(REFRESH_S)


def describe(folder: Path, now: float) -> tuple[str, int, bool]:
    """What to print, the exit status, and whether the run still works. Raises ConfigError when there is no run."""
    status, failure = read_status(folder)
    reports = [Report.from_json(json.dumps(row)) for row in status["ranks"]]
    age = now - status["written"]
    ended = [report.ended for report in reports]
    errors = [words for words in ended if words not in ("", "done")]
    if failure or errors:
        return "\n".join([*table(reports, age), "", failure or f"ended by {errors[0]}"]), 1, False
    if all(ended):
        return "\n".join([*table(reports, age), "done"]), 0, False
    if age > QUIET_S:
        quiet = f"nothing was heard of this run for {age:.0f} s: its ranks are gone, or cannot write {folder}"
        return "\n".join([*table(reports, 0.0), quiet]), 1, False
    return "\n".join(table(reports, age)), 0, True


def table(reports: Sequence[Report], age: float = 0.0) -> list[str]:
    """A line a rank; `age`: seconds since they spoke."""
    chosen = sorted(reports, key=lambda r: (r.ended in ("", "done"), -r.unheard_s, r.rank))[:SHOWN]
    rows = [("rank", "pool", "host", "step", "phase", "since", "at")]
    for report in sorted(chosen, key=lambda r: r.rank):
        phase = "ended" if report.ended else report.phase
        place = report.ended or report.place
        if report.unheard_s > 0:
            place = f"no word for {report.unheard_s:.0f} s, but it runs; {place}"
        words = (str(report.rank), report.pool or "-", report.host, str(report.step), phase)
        rows.append((*words, "" if report.ended else _seconds(report.seconds + age), place))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[6]]) for row in rows]
    more = len(reports) - len(chosen)
    return lines + ([f"… and {more} more ranks"] if more else [])


def write_status(folder: Path, attempt: str, reports: Sequence[Report]) -> None:
    """Replace status.json at once."""
    rows = [json.loads(report.to_json()) for report in reports]
    text = json.dumps({"attempt": attempt, "written": time.time(), "ranks": rows})
    write_whole(folder / STATUS, text.encode())


def write_whole(file: Path, data: bytes) -> None:
    """Put the bytes in the file's place at once."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_bytes(data)
    os.replace(fresh, file)


def read_bytes(file: Path) -> bytes | None:
    """The file's bytes; None where there is none that can be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None


def read_status(folder: Path) -> tuple[dict[str, Any], str]:
    """status.json, and the message of what ended that start of the run ('' when nothing did)."""
    file = folder / STATUS
    if not file.is_file():
        raise ConfigError(f"{folder}: there is no status.json; give the trainer.output_dir of a run that has started")
    status: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    message = folder / "failures" / f"{status['attempt']}.txt"
    return status, message.read_text(encoding="utf-8").rstrip() if message.is_file() else ""


def write_failure(folder: Path, attempt: str, text: str) -> bool:
    """Put the message on the disk, flushed; False when another rank has done so. The first one counts."""
    place = folder / "failures" / f"{attempt}.txt"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("x", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


if __name__ == "__main__":
    sys.exit(main())
