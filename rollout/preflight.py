"""Everything that can be refused before a weight is loaded or a process is started.

Reads the checkpoint's files and the engine's flags, never SGLang: the same checks run in the training recipe,
in ``rollout.server``, in ``rollout.generate`` and inside stock SGLang's own start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dllm.config import KNOWN_ARCHITECTURES, BlockDiffusionConfig, ConfigError, load_hf_config, resolve
from dllm.decoding import DECODERS, check_options, decoder_class, make_decoder
from dllm.models import MODELS

FLAGS = (
    "model_path",
    "device",
    "dtype",
    "dllm_algorithm",
    "dllm_algorithm_config",
    "max_running_requests",
    "attention_backend",
    "disable_cuda_graph",
    "page_size",
    "chunked_prefill_size",
    "tp_size",
    "pp_size",
    "enable_lora",
    "disaggregation_mode",
    "quantization",
    "sleep_on_idle",
    "max_total_tokens",
)
"""Names of SGLang's server arguments that the checks read or may set."""

CPU_ATTENTION = "torch_native"
CPU_MAX_RUNNING = 64
CPU_MAX_TOTAL_TOKENS = 1 << 17
GPU_MAX_RUNNING = 256
# Copies of a [block, vocabulary] fp32 matrix alive in one denoise step: logits, softmax and the draw's work space.
LOGIT_COPIES = 3


@dataclass
class Report:
    """Outcome of a preflight.

    Attributes:
        requested: flags as given.
        effective: flags as the engine will run with them.
        reasons: why a flag was changed.
        block_diffusion: block size, mask id and stop ids, or None for an autoregressive model.
    """

    requested: dict[str, Any]
    effective: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    block_diffusion: BlockDiffusionConfig | None = None

    def set(self, name: str, value: Any, reason: str) -> None:
        self.effective[name] = value
        self.reasons[name] = reason

    def describe(self) -> str:
        """One line per setting that was filled in or changed, and the block-diffusion settings."""
        lines = [f"{n}: {self.requested.get(n)} -> {self.effective[n]} ({why})" for n, why in self.reasons.items()]
        if self.block_diffusion is not None:
            lines.insert(0, self.block_diffusion.describe())
        return "\n".join(lines)


def read_algorithm_config(algorithm: str, path: str | Path | None) -> dict[str, Any]:
    """Options of an algorithm from its YAML file, checked; ``block_size`` is allowed beside them.

    Returns:
        Options with defaults filled in for our decoders, as written for SGLang's own.

    Raises:
        ConfigError: the file is missing, empty or not a mapping, or a key is misspelt or has a wrong type.
    """
    options: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise ConfigError(f"dllm_algorithm_config {str(path)!r} does not exist; pass a YAML file or leave it out")
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ConfigError(f"dllm_algorithm_config {str(path)!r} is not valid YAML: {error}") from error
        if not isinstance(loaded, dict) or not loaded:
            raise ConfigError(
                f"dllm_algorithm_config {str(path)!r} is empty or not a mapping; write 'key: value' lines "
                "(e.g. 'threshold: 0.95') or leave the flag out to use the defaults"
            )
        options = dict(loaded)
    block_size = options.pop("block_size", None)
    if is_ours(algorithm):
        options = check_options(algorithm, options)
    if block_size is not None:
        options["block_size"] = block_size
    return options


def is_ours(algorithm: str) -> bool:
    """Whether the name is one of our decoders or of a third party's, and not SGLang's (whose modules this one never
    imports).

    Raises:
        ConfigError: there is no such algorithm.
    """
    if algorithm.startswith("sglang."):
        return False
    return hasattr(decoder_class(algorithm), "options")


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """dtype of the checkpoint's weights as config.json names it; bfloat16 if it does not."""
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")


def engine_dtype(config: Mapping[str, Any], device: str) -> str:
    """dtype of an engine that was asked for none: the checkpoint's, but bfloat16 for an fp32 checkpoint on a GPU."""
    dtype = checkpoint_dtype(config)
    return "bfloat16" if dtype == "float32" and device != "cpu" else dtype


def choose_max_running_requests(vocab_size: int, block_size: int, memory_bytes: int, limit: int) -> int:
    """Largest power of two of blocks whose logits fit into a tenth of the memory, at most ``limit``."""
    per_request = vocab_size * block_size * 4 * LOGIT_COPIES
    fitting = max(2, memory_bytes // 10 // per_request)
    return min(limit, 1 << (int(fitting).bit_length() - 1))


def device_memory_bytes(device: str) -> int:
    """Total memory of the device; of the first GPU, read without creating a CUDA context."""
    if device == "cpu":
        import psutil

        return psutil.virtual_memory().total
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of keys and values of one token over all layers, in the checkpoint's dtype."""
    width = 4 if checkpoint_dtype(config) == "float32" else 2
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"]) * int(heads) * int(head_dim) * width


def cpu_kv_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of a KV cache in host memory: a twentieth of it, at most ``CPU_MAX_TOTAL_TOKENS``."""
    fitting = device_memory_bytes("cpu") // 20 // kv_bytes_per_token(config)
    return max(4096, min(CPU_MAX_TOTAL_TOKENS, fitting // 4096 * 4096))


def default_device() -> str:
    """cuda if a GPU is visible and the CPU engine was not asked for, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" else "cpu"


def check_server(flags: Mapping[str, Any], *, training: bool = False) -> Report:
    """Check the flags of an engine and fill in what SGLang would choose badly.

    Args:
        flags: values of ``FLAGS`` as the user gave them; missing or None means unset.
        training: the engine serves a trainer, so its weights will be refreshed and batches matter.

    Raises:
        ConfigError: something would fail or silently go wrong later.
    """
    report = Report(dict(flags), dict(flags))
    get = lambda name: report.effective.get(name)
    config = load_hf_config(flags["model_path"])
    architecture = (config.get("architectures") or ["unknown"])[0]
    algorithm = get("dllm_algorithm")
    if algorithm is None:
        if architecture in KNOWN_ARCHITECTURES:
            raise ConfigError(
                f"dllm_algorithm is not set for {architecture}: the engine would decode it token by token and return "
                f"newlines; pass --dllm-algorithm (one of {sorted(DECODERS)})"
            )
        return report

    options = read_algorithm_config(algorithm, get("dllm_algorithm_config"))
    diffusion = resolve(flags["model_path"], block_size=options.pop("block_size", None))
    report.block_diffusion = diffusion
    if is_ours(algorithm):
        decoder = make_decoder(algorithm, diffusion.mask_id, options)
        if training and getattr(decoder, "greedy", False):
            raise ConfigError(
                f"dllm_algorithm={algorithm!r} draws nothing: the responses of a group would be identical and have no "
                "advantage; use SelectThenSample"
            )
    elif training:
        raise ConfigError(
            f"dllm_algorithm={algorithm!r} logs no log-probs to train on; use one of {sorted(DECODERS)} or a decoder "
            "of your own as 'package.module:Class'"
        )
    if training and architecture not in MODELS:
        raise ConfigError(
            f"architecture {architecture!r} of {flags['model_path']} cannot be trained; use one of {sorted(MODELS)}"
        )
    _check_parallelism(report, training)
    _fill_device(report, config)
    _check_geometry(report, diffusion.block_size)
    running = get("max_running_requests")
    if running is None:
        device = str(get("device"))
        limit = CPU_MAX_RUNNING if device == "cpu" else GPU_MAX_RUNNING
        chosen = choose_max_running_requests(
            int(config["vocab_size"]), diffusion.block_size, device_memory_bytes(device), limit
        )
        report.set("max_running_requests", chosen, "unset; chosen from memory, SGLang would take 1")
    elif running < 1:
        raise ConfigError(f"max_running_requests={running} is not positive; leave it unset to choose it from memory")
    elif running == 1 and training:
        raise ConfigError(
            "max_running_requests=1 decodes a training batch one response at a time; set it to at least 2 or leave it "
            "unset (in verl: actor_rollout_ref.rollout.max_num_seqs)"
        )
    return report


def _check_parallelism(report: Report, training: bool) -> None:
    get = report.effective.get
    if (get("pp_size") or 1) > 1:
        raise ConfigError(f"pp_size={get('pp_size')} is not supported for block diffusion; use tp_size")
    if get("enable_lora"):
        raise ConfigError("enable_lora=True is not supported for block diffusion; merge the adapter into the weights")
    if get("disaggregation_mode") not in (None, "null"):
        raise ConfigError(
            f"disaggregation_mode={get('disaggregation_mode')!r} is not supported for block diffusion: prompt and "
            "response share their boundary block; leave it unset"
        )
    if training and get("quantization") is not None:
        raise ConfigError(
            f"quantization={get('quantization')!r} cannot be combined with weight refresh: refreshed weights are not "
            "re-quantised; leave it unset"
        )


def _fill_device(report: Report, config: Mapping[str, Any]) -> None:
    get = report.effective.get
    if get("device") is None:
        report.set("device", default_device(), "unset")
    if get("dtype") in (None, "auto"):
        dtype = engine_dtype(config, str(get("device")))
        why = "the checkpoint's own; SGLang's auto would turn fp32 into fp16"
        if dtype != checkpoint_dtype(config):
            why = f"the checkpoint's own, {checkpoint_dtype(config)}, does not run in SGLang's CUDA kernels"
        report.set("dtype", dtype, why)
    if get("device") == "cpu":
        if get("attention_backend") is None:
            report.set("attention_backend", CPU_ATTENTION, "the CPU engine's")
        elif get("attention_backend") != CPU_ATTENTION:
            raise ConfigError(
                f"attention_backend={get('attention_backend')!r} does not run block diffusion on a CPU; use "
                f"{CPU_ATTENTION!r} or leave it unset"
            )
        if not get("disable_cuda_graph"):
            report.set("disable_cuda_graph", True, "no GPU")
        if not get("sleep_on_idle"):
            report.set("sleep_on_idle", True, "an idle scheduler would spin on a whole core")
        if get("max_total_tokens") is None:
            report.set("max_total_tokens", cpu_kv_tokens(config), "unset; a KV cache of at most 5 % of the memory")
        return
    if get("dtype") == "float32":
        raise ConfigError(
            "dtype='float32' does not run on a GPU: SGLang's norm kernels take bfloat16 and float16; use one"
        )
    if get("attention_backend") is None:
        report.set("attention_backend", "flashinfer", "runs with CUDA graphs")
    if not get("disable_cuda_graph") and get("attention_backend") != "flashinfer":
        raise ConfigError(
            f"attention_backend={get('attention_backend')!r} cannot capture CUDA graphs of block diffusion; use "
            "'flashinfer' or add --disable-cuda-graph"
        )


def _check_geometry(report: Report, block_size: int) -> None:
    for name in ("page_size", "chunked_prefill_size"):
        value = report.effective.get(name)
        if value is None or value <= 0 or (name == "page_size" and value == 1):
            continue
        if value % block_size:
            raise ConfigError(
                f"{name}={value} is not a multiple of the block size {block_size}; use one, or leave it unset"
            )
