"""Write the policy of a training run as a Hugging Face directory.

    python -m recipes.export outputs/grpo_llada2/RUN --out DIR                # its last checkpoint
    python -m recipes.export outputs/grpo_llada2/RUN --out DIR --step best    # by held-out accuracy, or a number

``rollout.generate``, stock SGLang and ``weight_sync.push`` load the directory.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from dllm.config import ConfigError, load_hf_config
from dllm.models import meta_model
from dllm.models.checkpoint import save_checkpoint
from recipes.run_checkpoint import Checkpoint, find_checkpoint, shard_names
from recipes.tiny import CONFIGURATION_MODULE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_shards(actor: Path) -> dict[str, Tensor]:
    """Whole tensors of the policy, in the dtype of the trainer.

    Files are mapped, not read, and no code in them runs.

    Raises:
        ConfigError: a file cannot be read or holds something else, or the ranks do not fit together.
    """
    # torch warns that collectives on the stored mesh would fail; none are made here.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    shards = []
    for file in (actor / name for name in shard_names(actor)):
        try:
            shard = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # whatever class a damaged byte leads the unpickler to
            raise ConfigError(
                f"{file} cannot be read ({error}); it was cut off or damaged, use another step"
            ) from error
        if not isinstance(shard, dict):
            raise ConfigError(f"{file} holds a {type(shard).__name__}, no tensors by name; use another step")
        for name, value in shard.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise ConfigError(f"{file} holds {name!r}: {type(value).__name__}, no tensor by name; use another step")
        shards.append(shard)
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise ConfigError(f"the shards of {actor} hold different tensors; the checkpoint is damaged, use another step")
    try:
        return {name: merge(name, [shard[name] for shard in shards]) for name in shards[0]}
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:  # parts of several kinds, meshes or shapes
        raise ConfigError(f"the shards of {actor} do not fit together ({error}); use another step") from error


def merge(name: str, parts: Sequence[Tensor]) -> Tensor:
    """One tensor from those of all ranks, in the order of ranks.

    Raises:
        ConfigError: it is sharded in another way than FSDP's.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    ranks = first.device_mesh.mesh
    for placement in first.placements[:-1]:
        if not placement.is_replicate():
            raise ConfigError(f"tensor {name!r} is sharded by {first.placements}; only FSDP checkpoints are exported")
        ranks = ranks[0]
    placement = first.placements[-1]
    local = [parts[rank]._local_tensor for rank in ranks.tolist()]
    if placement.is_replicate():
        return local[0]
    if not placement.is_shard():
        raise ConfigError(f"tensor {name!r} is sharded by {first.placements}; only FSDP checkpoints are exported")
    whole = local[0] if len(local) == 1 else torch.cat(local, placement.dim)
    if whole.shape != first.shape:
        raise ConfigError(f"tensor {name!r} has shape {tuple(whole.shape)} of {tuple(first.shape)}; a shard is damaged")
    return whole


def check_names(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Refuse a state dict that is not that of the config's model.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape.
    """
    expected = meta_model(config).state_dict()
    if missing := sorted(expected.keys() - state.keys()):
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors, e.g. {missing[0]}; it holds no whole policy")
    if unknown := sorted(state.keys() - expected.keys()):
        raise ConfigError(
            f"the checkpoint has {len(unknown)} unknown tensors, e.g. {unknown[0]}; adapters are not merged"
        )
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            raise ConfigError(f"tensor {name!r} has shape {tuple(state[name].shape)}, its config says {tensor.shape}")


def export(checkpoint: Checkpoint, out: Path, dtype: str = "auto") -> dict[str, Any]:
    """Write the policy of ``checkpoint`` to ``out``, which appears when it is complete.

    Args:
        dtype: "float32", "bfloat16", or "auto" for the one that config.json names. Routers stay in fp32.

    Returns:
        Number of tensors and bytes, and the dtype.

    Raises:
        ConfigError: ``out`` is taken or cannot be written, or the checkpoint is damaged.
    """
    # A finished directory cannot take the place of a link.
    if os.path.islink(out):
        raise ConfigError(f"--out={str(out)!r} is a symbolic link; choose a directory that is none")
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out={str(out)!r} exists and is not empty; choose another directory")
    trained = checkpoint.actor / "huggingface"
    config = {k: v for k, v in load_hf_config(trained).items() if k != "transformers_version"}
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16") if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} of {trained / 'config.json'} is none of {sorted(DTYPES)}; pass --dtype")
    config["dtype"] = name
    state = load_shards(checkpoint.actor)
    check_names(state, config)
    partial = None
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        partial.chmod(0o777 & ~_umask())
        modules = copy_companions(trained, checkpoint.base, partial, config)
        save_checkpoint(partial, state, config | modules, DTYPES[name])
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--out={str(out)!r} cannot be written: {error}; choose another place") from error
    finally:
        if partial is not None:  # after the rename there is none
            shutil.rmtree(partial, ignore_errors=True)
    nbytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return {"step": checkpoint.step, "tensors": len(state), "bytes": nbytes, "dtype": name}


def copy_companions(trained: Path, base: Path | None, out: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what belongs beside the weights: tokenizer, generation settings, Python classes of the architecture.

    The tokenizer is the run's; the trainer does not keep the rest, which comes from the model it started from. Without
    that, a LLaDA2 gets our configuration class, which is all that stock SGLang needs.

    Returns:
        Keys that config.json needs for the classes.
    """
    sources = [trained] if base is None else [trained, base]
    for source in sources:
        for file in sorted(source.iterdir()):
            companion = file.suffix in (".json", ".jinja", ".py", ".model", ".txt") and "safetensors" not in file.name
            if companion and file.name != "config.json" and not (out / file.name).exists():
                shutil.copyfile(file, out / file.name)
    auto_map = load_hf_config(base).get("auto_map") if base is not None else None
    if auto_map is None and config.get("model_type") == "llada2_moe":
        shutil.copyfile(CONFIGURATION_MODULE, out / CONFIGURATION_MODULE.name)
        auto_map = {"AutoConfig": f"{CONFIGURATION_MODULE.stem}.LLaDA2MoeConfig"}
    return {} if auto_map is None else {"auto_map": auto_map}


def _umask() -> int:
    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "probe"
        probe.mkdir()
        return 0o777 & ~probe.stat().st_mode


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m recipes.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("run_dir", help="directory of a run, or one of its checkpoints/global_step_N")
    p.add_argument("--out", required=True, help="directory to write; it must not exist, or be empty")
    p.add_argument("--step", default="last", help="last (the default), best by held-out accuracy, or a number")
    p.add_argument(
        "--dtype", default="auto", choices=("auto", *DTYPES), help="default: that of the model's config.json"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        checkpoint = find_checkpoint(args.run_dir, args.step)
        written = export(checkpoint, Path(args.out), args.dtype)
    except (ConfigError, OSError) as error:  # an OSError names the file of the run that may not be read
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"step {written['step']}: {written['tensors']} tensors, {written['bytes']:,} bytes, {written['dtype']}")
    print(f"checkpoint {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
