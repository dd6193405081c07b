"""Which rank of a job failed first, and with what words: the others only lost their peer."""

import json
from dataclasses import dataclass
from pathlib import Path

TAIL = 15
"""Lines of its log that are shown of a rank that left no traceback."""


@dataclass(frozen=True)
class Failure:
    """One rank's record."""

    rank: int
    host: str
    message: str
    traceback: str
    at: float
    """When it was written (the shared folder's clock, seconds)."""


def failures(folder: Path) -> list[Failure]:
    """The records of one attempt that failed (`errors/rank_R@HOST.json`), the first one first.

    A rank that has raised may not have ended yet when the others have: its record still lies beside `errors/`.
    """
    if not (folder / "errors").is_dir():
        return []
    found = [_read(path) for place in ("", "errors/") for path in folder.glob(f"{place}rank_*@*.json")]
    return sorted(found, key=lambda failure: (failure.at, failure.rank))


def describe(folder: Path) -> str | None:
    """The first failing rank's traceback under a line that says whose it is; None when no rank failed."""
    found = failures(folder)
    if not found:
        return None
    first, others = found[0], len(found) - 1
    after = f"; {others} more failed after it" if others else ""
    log = _log(folder, first.rank)
    words = first.traceback or _tail(log)
    return f"rank {first.rank} on {first.host} failed first{after}: {first.message}\n{words}its whole log: {log}\n"


def _read(path: Path) -> Failure:
    rank, _, host = path.stem.removeprefix("rank_").partition("@")
    message = json.loads(path.read_text(encoding="utf-8"))["message"]
    if isinstance(message, str):
        message = {"message": message}
    traceback = str(message.get("extraInfo", {}).get("py_callstack") or "")
    return Failure(int(rank), host, str(message["message"]), traceback, path.stat().st_mtime)


def _log(attempt: Path, rank: int) -> Path:
    """submitit's log of the rank: beside JOB.attempts/N lies JOB_R_log.out."""
    job = attempt.parent
    return job.parent / f"{job.name.removesuffix('.attempts')}_{rank}_log.out"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "".join(f"{line}\n" for line in lines[-TAIL:])
