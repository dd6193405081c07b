"""From a `ModelConfig` to a filled module: tokenizer, config, a model on the meta device, and its weights."""

import copy
import json
from importlib.resources import files
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from spmd_rl.config import ConfigError
from spmd_rl.config.run import ModelConfig
from spmd_rl.models.attention import NAME, register
from spmd_rl.models.checkpoint import save_folder
from spmd_rl.models.filling import allocate, materialise
from spmd_rl.models.sources import resolve

__all__ = [
    "allocate",
    "build_meta",
    "load_generation_config",
    "load_hf_config",
    "load_tokenizer",
    "materialise",
    "resolve",
    "save_folder",
]


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with a pad token and with `model.chat_template` (text or a file) when that is set."""
    path = model.tokenizer or model.path
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = resolve(path, weights=False, trust_remote_code=model.trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: no tokenizer that transformers can read: {error}") from error
    if model.chat_template:
        file = Path(model.chat_template).expanduser()
        is_file = len(model.chat_template) < 1024 and file.is_file()
        tokenizer.chat_template = file.read_text() if is_file else model.chat_template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_hf_config(model: ModelConfig, path: str | None = None) -> PretrainedConfig:
    """The transformers config of `path` (default: model.path); for a random start, of `model.shape` if that is set."""
    if path is None and model.random_init and model.shape:
        shape = files("spmd_rl") / "topology" / "shapes" / f"{model.shape}.json"
        if shape.is_file():
            return AutoConfig.for_model(**json.loads(shape.read_text()))
        path = model.shape
    folder = resolve(path or model.path, weights=not model.random_init, trust_remote_code=model.trust_remote_code)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}/config.json: transformers cannot read it: {error}") from error


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """generation_config.json of a model folder (its eos ids end replies), if there is one."""
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None


def build_meta(
    hf_config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    attention: str = NAME,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal LM on the meta device: names and shapes, no bytes. `materialise` fills it."""
    register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )
    model.config.use_cache = False
    return model
