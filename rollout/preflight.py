"""Everything that can be refused before a weight is loaded or a process is started.

    python -m rollout.preflight --model-path DIR --dllm-algorithm SelectThenSample [any flag of the server] [--json]

Reads the checkpoint's files and the engine's flags, never SGLang: the same checks run in the training recipe,
in ``rollout.server``, in ``rollout.generate`` and inside stock SGLang's own start. Prints requested against effective
settings; ends with 0, or with 2 and everything that would go wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dllm.config import (
    KNOWN_ARCHITECTURES,
    BlockDiffusionConfig,
    ConfigError,
    architecture_name,
    attention_heads,
    load_hf_config,
    positive_int,
    resolve,
)
from dllm.decoding import DECODERS, make_decoder
from dllm.models import MODELS
from rollout.algorithm_config import is_ours, read_algorithm_config
from rollout.backends import default_device, fill_attention, graphs_disabled
from rollout.features import check_features, check_refresh
from rollout.memory import (
    KV_BLOCKS,
    checkpoint_dtype,
    choose_max_running_requests,
    device_memory_bytes,
    engine_dtype,
    estimate,
    kv_bytes_per_token,
)
from rollout.report import Refusals, Report
from rollout.versions import check_plugin, check_versions

FLAGS = (
    "model_path",
    "device",
    "dtype",
    "dllm_algorithm",
    "dllm_algorithm_config",
    "max_running_requests",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
    "cuda_graph_config",
    "cuda_graph_backend_decode",
    "cuda_graph_max_bs_decode",
    "page_size",
    "disable_radix_cache",
    "chunked_prefill_size",
    "context_length",
    "tp_size",
    "pp_size",
    "enable_lora",
    "lora_paths",
    "disaggregation_mode",
    "speculative_algorithm",
    "quantization",
    "torchao_config",
    "enable_mixed_chunk",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_deterministic_inference",
    "sleep_on_idle",
    "max_total_tokens",
    "mem_fraction_static",
)
"""Names of SGLang's server arguments that the checks read or may set."""

CPU_MAX_RUNNING = 64
CPU_MAX_TOTAL_TOKENS = 1 << 17
GPU_MAX_RUNNING = 256


def cpu_kv_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of a KV cache in host memory: a twentieth of it, at most ``CPU_MAX_TOTAL_TOKENS``."""
    fitting = device_memory_bytes("cpu") // 20 // kv_bytes_per_token(config)
    return max(4096, min(CPU_MAX_TOTAL_TOKENS, fitting // 4096 * 4096))


def check_server(flags: Mapping[str, Any], *, training: bool = False, gpu_bytes: int | None = None) -> Report:
    """Check the flags of an engine and fill in what SGLang would choose badly.

    Args:
        flags: values of ``FLAGS`` as the user gave them; missing or None means unset.
        training: the engine serves a trainer, so its weights will be refreshed and batches matter.
        gpu_bytes: memory of the GPU to plan for; None asks the first one.

    Raises:
        ConfigError: something would fail or silently go wrong later; one line for each.
    """
    report, refusals = Report(dict(flags), dict(flags)), Refusals()
    config = load_hf_config(flags["model_path"])
    algorithm, architecture = flags.get("dllm_algorithm"), architecture_name(config)
    if algorithm is None:
        if architecture in KNOWN_ARCHITECTURES:
            raise ConfigError(
                f"dllm_algorithm is not set for {architecture}: the engine would decode it token by token and return "
                f"newlines; pass --dllm-algorithm (one of {sorted(DECODERS)})"
            )
        return report
    if report.effective.get("device") is None:
        report.set("device", default_device(), "unset")
    if report.effective.get("dtype") in (None, "auto"):
        dtype = engine_dtype(config, str(report.effective["device"]))
        why = "the checkpoint's own; SGLang's auto would turn fp32 into fp16"
        if dtype != checkpoint_dtype(config):
            why = f"the checkpoint's own, {checkpoint_dtype(config)}, does not run in SGLang's CUDA kernels"
        report.set("dtype", dtype, why)
    with refusals.note():
        check_plugin()
    with refusals.note():
        report.versions = check_versions(str(report.effective["device"]), training)
    with refusals.note():
        _check_algorithm(report, str(algorithm), training)
    with refusals.note():
        if training and architecture not in MODELS:
            raise ConfigError(
                f"architecture {architecture!r} of {flags['model_path']} cannot be trained; use one of {sorted(MODELS)}"
            )
    with refusals.note():
        check_features(report.effective)
    with refusals.note():
        _check_sizes(report.effective, config)
    if training:
        with refusals.note():
            check_refresh(report.effective, config)
    with refusals.note():
        for name, (value, reason) in fill_attention(report.effective, config).items():
            report.set(name, value, reason)
    if report.block_diffusion is not None:
        block_size = report.block_diffusion.block_size
        with refusals.note():
            _check_geometry(report, block_size)
        with refusals.note():
            _fill_batch(report, config, block_size, training, gpu_bytes)
        with refusals.note():
            _check_memory(report, config, block_size, gpu_bytes)
    refusals.raise_all()
    return report


def _check_algorithm(report: Report, algorithm: str, training: bool) -> None:
    """Options, block size and mask id; whether the decoder can be trained with."""
    options = read_algorithm_config(algorithm, report.effective.get("dllm_algorithm_config"))
    report.block_diffusion = resolve_trained(report.effective["model_path"], options.pop("block_size", None))
    if is_ours(algorithm):
        decoder = make_decoder(algorithm, report.block_diffusion.mask_id, options)
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


def resolve_trained(model_path: str, block_size: int | None) -> BlockDiffusionConfig:
    """Settings of the checkpoint; a block size given beside it must be the one it was trained with.

    Raises:
        ConfigError: they differ, or something cannot be resolved.
    """
    if block_size is None:
        return resolve(model_path)
    given = resolve(model_path, block_size=block_size)
    try:
        trained = resolve(model_path)
    except ConfigError:
        # The checkpoint names none: the flag is how to give it.
        return given
    if trained.block_size != block_size:
        raise ConfigError(
            f"block_size={block_size} of the algorithm's options is not the {trained.block_size} that the checkpoint "
            f"was trained with ({trained.sources['block_size']}); leave it out, or correct 'block_size' in config.json "
            "if that is wrong"
        )
    return given


def _check_sizes(flags: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """What SGLang asserts while it loads, or never looks at."""
    found = []
    for name in ("tp_size", "context_length", "max_total_tokens"):
        if flags.get(name) is not None and flags[name] < 1:
            found.append(f"{name}={flags[name]} is not positive; leave it unset or give a positive number")
    fraction = flags.get("mem_fraction_static")
    if fraction is not None and not 0 < fraction < 1:
        found.append(f"mem_fraction_static={fraction} is no share of a GPU's memory; use 0 to 1")
    heads, tp_size = attention_heads(config)[0], flags.get("tp_size") or 1
    if tp_size > 0 and heads % tp_size:
        found.append(f"tp_size={tp_size} does not divide the {heads} attention heads; use one that does")
    if found:
        raise ConfigError("\n".join(found))


def _check_geometry(report: Report, size: int) -> None:
    get, found = report.effective.get, []
    for name in ("page_size", "chunked_prefill_size"):
        value = get(name)
        if value is None or value <= 0 or (name == "page_size" and value == 1):
            continue
        if value % size:
            found.append(f"{name}={value} is not a multiple of the block size {size}; use one, or leave it unset")
    room = get("max_total_tokens")
    if room is not None and room < KV_BLOCKS * size:
        found.append(
            f"max_total_tokens={room} has no room for a prompt and a response, {size} tokens each; give more, "
            "or leave it unset"
        )
    if found:
        raise ConfigError("\n".join(found))
    if not get("disable_radix_cache") and get("page_size") != size:
        report.set("page_size", size, "the radix cache keeps whole blocks")


def _fill_batch(
    report: Report, config: Mapping[str, Any], block_size: int, training: bool, gpu_bytes: int | None
) -> None:
    """Batch limit, and the size of the KV cache on a CPU."""
    get = report.effective.get
    running, device = get("max_running_requests"), str(get("device"))
    if device == "cpu" and get("max_total_tokens") is None:
        report.set("max_total_tokens", cpu_kv_tokens(config), "unset; a KV cache of at most 5 % of the memory")
    if running is None:
        limit = CPU_MAX_RUNNING if device == "cpu" else GPU_MAX_RUNNING
        memory = device_memory_bytes(device) if gpu_bytes is None or device == "cpu" else gpu_bytes
        chosen = choose_max_running_requests(positive_int(config, "vocab_size"), block_size, memory, limit)
        report.set("max_running_requests", chosen, "unset; chosen from memory, SGLang would take 1")
    elif running < 1:
        raise ConfigError(f"max_running_requests={running} is not positive; leave it unset to choose it from memory")
    elif running == 1 and training:
        raise ConfigError(
            "max_running_requests=1 decodes a training batch one response at a time; set it to at least 2 or leave it "
            "unset (in verl: actor_rollout_ref.rollout.max_num_seqs)"
        )


def _check_memory(report: Report, config: Mapping[str, Any], block_size: int, gpu_bytes: int | None) -> None:
    """Estimate for a card of that size; None asks the first one, and leaves it out with a note if there is none."""
    get = report.effective.get
    running = get("max_running_requests")
    if get("device") == "cpu" or running is None:
        return
    if gpu_bytes is None:
        try:
            gpu_bytes = device_memory_bytes(str(get("device")))
        except ConfigError as error:
            report.notes.append(f"GPU memory is not checked: {error}")
            return
    report.memory = estimate(
        config,
        gpu_bytes,
        running=int(running),
        block_size=block_size,
        dtype=str(get("dtype")),
        tp_size=int(get("tp_size") or 1),
        graph_batch=0 if graphs_disabled(report.effective) else get("cuda_graph_max_bs_decode"),
        context_length=get("context_length"),
        kv_tokens=get("max_total_tokens"),
        fraction=get("mem_fraction_static"),
    )
    if get("quantization") or config.get("quantization_config"):
        report.notes.append("the weights are quantised: they take less than the estimate says")
        return
    report.memory.check()


def check_network(flags: Mapping[str, Any]) -> None:
    """Refuse what ``rollout.server`` refuses before its engine starts.

    Raises:
        ConfigError: it could be reached from other machines without a key, or has tokenizers that cannot serve it.
    """
    from rollout.plugin.http import check_reachable, check_tokenizers

    refusals = Refusals()
    with refusals.note():
        check_reachable(str(flags.get("host") or "127.0.0.1"), flags.get("admin_api_key"))
    with refusals.note():
        check_tokenizers(int(flags.get("tokenizer_worker_num") or 1))
    refusals.raise_all()


def main(argv: Sequence[str] | None = None) -> int:
    from rollout.plugin.arguments import parse

    arguments = list(sys.argv[1:] if argv is None else argv)
    flags: dict[str, Any] = {}
    try:
        flags, ours = parse(arguments)
        check_network(flags)
        gpu_bytes = None if ours.gpu_memory_gb is None else int(ours.gpu_memory_gb * 1e9)
        report = check_server(flags, training=ours.training, gpu_bytes=gpu_bytes)
    except ConfigError as error:
        if "--json" in arguments:
            print(json.dumps({"ok": False, "requested": flags, "refused": str(error).splitlines()}, default=str))
        for line in str(error).splitlines():
            print(f"refused: {line}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict(), default=str) if ours.json else report.describe() + "\npreflight: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
