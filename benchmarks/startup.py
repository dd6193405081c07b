"""From launch to the first phase of the first step, against bare torchrun and against Ray's actors, 2 and 4 ranks.

    python benchmarks/startup.py --ray-python VENV/bin/python [--repeats 5] [--output benchmarks/results/startup.json]

| case | what is timed until the last rank (or actor) has it |
|---|---|
| `spmd_rl` | `spmd-rl train --nproc N`: plan, imports, ranks, data, groups, models; the first `generate` begins |
| `spmd_rl_torchrun` | the same by `torchrun -m spmd_rl.train`, where each rank makes the imports for itself |
| `torchrun` | torchrun, `import torch, transformers` (transformers imports nothing of its own yet) |
| `torchrun_auto` | torchrun, `import torch`, `from transformers import AutoModelForCausalLM, AutoTokenizer` |
| `ray` | `ray.init`, as many actors, each has answered once; they import nothing |
| `ray_auto` | the same, the actors having made the imports of `torchrun_auto` |

Cases take turns, so that a busy moment of the machine does not fall on one of them; medians, all times and the load are
written. Ray's Python is another environment; it sees this one's packages, as its actors have to import torch.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

IMPORTS = {
    "torchrun": "import torch, transformers",
    "torchrun_auto": "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer",
    "ray": "pass",
    "ray_auto": "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer",
}
TRAIN = """
import os, sys, time
from contextlib import contextmanager
from spmd_rl.train import main
from spmd_rl.observe.live import HERE
enter = HERE.phase
@contextmanager
def timed(name):
    if name == "generate":
        open(os.path.join({folder!r}, os.environ["RANK"]), "w").write(repr(time.time()) + " " + HERE.startup())
        time.sleep(5)  # the others come to it, too
        os._exit(1)
    with enter(name):
        yield
if __name__ == "__main__":
    HERE.phase = timed
    sys.exit(main({argv!r}))
"""
CLI = """
import sys
from spmd_rl import cli
cli.COMMANDS["train"] = cli.Command("timed_train", "")
sys.exit(cli.main(["train", "--nproc", "{ranks}", *{argv!r}]))
"""
BARE = """
import os, time
{imports}
open(os.path.join({folder!r}, os.environ["RANK"]), "w").write(repr(time.time()))
"""
RAY = """
import os, time, ray
ray.init(num_cpus={ranks}, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
@ray.remote(num_cpus=1)
class Actor:
    def __init__(self):
        {imports}
    def ready(self):
        return os.getpid()
actors = [Actor.remote() for _ in range({ranks})]
assert len(set(ray.get([actor.ready.remote() for actor in actors]))) == {ranks}
open(os.path.join({folder!r}, "0"), "w").write(repr(time.time()))
"""


def programs(case: str, ranks: int, folder: str) -> dict[str, str]:
    """File name -> text; `program.py` is the one to start."""
    if not case.startswith("spmd_rl"):
        template = RAY if case.startswith("ray") else BARE
        return {"program.py": template.format(folder=folder, ranks=ranks, imports=IMPORTS[case])}
    argv = ["experiment=tiny", f"trainer.output_dir={folder}/run", "observe.trackers=[]", "data.val.task=null"]
    train = TRAIN.format(folder=folder, argv=argv)
    if case == "spmd_rl_torchrun":
        return {"program.py": train}
    return {"program.py": CLI.format(ranks=ranks, argv=argv), "timed_train.py": train}


def measure(case: str, ranks: int, ray_python: str) -> tuple[float, str]:
    """Seconds from the launch to the last rank's word; what rank 0 says of its start-up."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in programs(case, ranks, folder).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if case == "spmd_rl":
            launcher = [sys.executable]
        if case.startswith("ray"):
            launcher = [ray_python]
            env["PYTHONPATH"] = sysconfig.get_path("purelib")
        begun = time.time()
        done = subprocess.run(
            [*launcher, str(Path(folder) / "program.py")],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        words = [(Path(folder) / str(r)) for r in range(1 if case.startswith("ray") else ranks)]
        if not all(word.exists() for word in words):
            raise RuntimeError(f"{case} on {ranks} ranks did not come up: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        texts = [word.read_text(encoding="utf-8") for word in words]
        return max(float(text.split()[0]) for text in texts) - begun, texts[0].partition(" ")[2]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray-python", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    cases = ["spmd_rl", "spmd_rl_torchrun", *IMPORTS]
    times: dict[str, dict[str, list[float]]] = {}
    loads: list[float] = []
    said: dict[str, str] = {}
    for ranks in (2, 4):
        found = times[str(ranks)] = {case: [] for case in cases}
        for case in cases:
            measure(case, ranks, options.ray_python)  # files into memory, byte code written
        for _ in range(options.repeats):
            for case in cases:
                loads.append(os.getloadavg()[0])
                seconds, text = measure(case, ranks, options.ray_python)
                found[case].append(round(seconds, 2))
                said |= {f"{case} on {ranks}": text} if text else {}
        medians = {case: statistics.median(values) for case, values in found.items()}
        print(f"{ranks} ranks: " + ", ".join(f"{case} {median:.2f} s" for case, median in medians.items()), flush=True)
    result = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_1min": {"median": round(statistics.median(loads), 1), "max": round(max(loads), 1)},
        "repeats": options.repeats,
        "seconds": times,
        "median": {n: {case: statistics.median(v) for case, v in found.items()} for n, found in times.items()},
        "startup_of_rank_0": said,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["median"], indent=1), said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
