"""verl actor engine ``model_type=block_diffusion_lm``: log-probs by exact replay of the rollout's states.

Loaded through ``actor_rollout_ref.model.external_lib=trainers.engine``, before verl looks up its engines.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import fsdp2_load_full_state_dict
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, detach_tree

from dllm.attention import attention_for
from dllm.config import ConfigError, resolve
from dllm.decoding import SamplingBatch, SamplingParams
from dllm.likelihood.exact import pack_traces, router_tie_targets, scatter_targets, target_head
from dllm.models.checkpoint import load_model
from dllm.models.llada2 import LLaDA2MoeModelLM, Router
from dllm.replay import PackedBatch
from dllm.trace import RolloutTrace

EXTRA_OUTPUTS = ("router_tie",)
"""Per-token outputs of a forward-only pass beside verl's own."""


@EngineRegistry.register(model_type="block_diffusion_lm", backend=["fsdp2"], device=["cuda", "cpu"])
class BlockDiffusionFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine with our model and the packed forward of ``dllm.replay``.

    The model is the published architecture; nothing of the remote code of a checkpoint runs.
    """

    def _build_module(self) -> LLaDA2MoeModelLM:
        config = self.engine_config
        default = "bf16" if config.forward_only else "fp32"
        dtype = PrecisionType.to_dtype(config.model_dtype or default)
        module = load_model(self.model_config.local_path, dtype)
        self.block_diffusion = resolve(self.model_config.local_path)
        # What verl's wrapping and checkpointing ask of a transformers model; with auto_map it would copy our source.
        module.config = copy.deepcopy(self.model_config.hf_config)
        if hasattr(module.config, "auto_map"):
            del module.config.auto_map
        module.can_generate = lambda: False
        module.checkpoint_layers = bool(self.model_config.enable_gradient_checkpointing)
        return module

    def _build_fsdp_module(self, module: LLaDA2MoeModelLM) -> torch.nn.Module:
        """Shard with FSDP2: routers on their own in fp32, then layers, then the rest."""
        config = self.engine_config
        dtypes = config.mixed_precision or {}
        compute = PrecisionType.to_dtype(dtypes.get("param_dtype", "bf16"))
        reduce = PrecisionType.to_dtype(dtypes.get("reduce_dtype", "fp32"))
        if compute == torch.float16:
            raise ConfigError("mixed_precision.param_dtype=fp16 is not supported; use bf16 or fp32")
        self._autocast_dtype, self.scaler = compute, None
        offload = None
        if (config.offload_policy or config.forward_only) and get_device_name() != "cpu":
            offload = CPUOffloadPolicy(pin_memory=True)
            self._is_offload_param = self._is_offload_optimizer = False
            self._uses_fsdp2_cpu_offload_policy = True
        state = module.state_dict()
        shared = {"mesh": self.device_mesh, "offload_policy": offload or OffloadPolicy()}
        reshard = config.reshard_after_forward
        # The engine keeps router weights in fp32 whatever its dtype; a bf16 router would choose other experts.
        router = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce, cast_forward_inputs=False)
        rest = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=True)
        for part in module.modules():
            if isinstance(part, Router):
                fully_shard(part, mp_policy=router, reshard_after_forward=reshard, **shared)
        for layer in module.model.layers:
            fully_shard(layer, mp_policy=rest, reshard_after_forward=reshard, **shared)
        # Embedding, norm and head stay gathered between forward and backward: the head is recomputed in chunks.
        fully_shard(module, mp_policy=rest, reshard_after_forward=False, **shared)
        fsdp2_load_full_state_dict(module, state, self.device_mesh, offload)
        return module

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[torch.Tensor, dict]:
        """One micro-batch: replay, log-probs in verl's layout, loss."""
        device = get_device_id()
        micro_batch = micro_batch.to(device)
        rows = replay_rows(micro_batch, self.block_diffusion.block_size)
        traces = [row for row in rows if row is not None] or [dummy_trace(self.block_diffusion.block_size)]
        batch = pack_traces(traces, self._mask_id, device)
        sampling = SamplingBatch.from_params([t.sampling for t in traces], [0] * len(traces), device)
        entropy = bool(tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False))
        autocast = (
            nullcontext()
            if self._autocast_dtype == torch.float32
            else torch.autocast(get_device_name(), self._autocast_dtype)
        )
        with autocast:
            if forward_only:
                self.module.record_router_gaps(True)
            head = target_head(batch, sampling, self._mask_id, entropy)
            values = self.module(batch.input_ids, batch.position, attention_for(batch), head)
            outputs = {"log_probs": values.logprob}
            if entropy:
                outputs["entropy"] = values.entropy
            if forward_only:
                outputs["router_tie"] = router_tie_targets(batch, self.module.router_gap()).float()
                self.module.record_router_gaps(False)
            model_output = {name: to_jagged(value, batch, rows, micro_batch) for name, value in outputs.items()}
            if loss_function is None:
                loss, metrics = torch.tensor(1.0, device=device), {}
            else:
                loss, metrics = loss_function(
                    model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
                )
        output = {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}
        return loss, output

    @property
    def _mask_id(self) -> int:
        return self.block_diffusion.mask_id


def replay_rows(micro_batch: Any, block_size: int) -> list[RolloutTrace | None]:
    """The samples of a micro-batch as traces, without what a log-prob does not need.

    verl pads batches with synthetic rows that copy the log of a real sample beside one-token responses; those
    are None.
    """
    rows: list[RolloutTrace | None] = []
    columns = (micro_batch[key].unbind() for key in ("prompts", "responses", "dllm_reveal_step", "dllm_sampling"))
    for prompt, response, steps, sampling in zip(*columns, strict=True):
        count = len(response)
        if len(steps) != count or (len(prompt) + count) % block_size:
            rows.append(None)
            continue
        temperature, top_p, top_k, min_p = sampling.tolist()
        unused = np.zeros(count, dtype=np.float32)
        rows.append(
            RolloutTrace(
                prompt_ids=prompt.cpu().numpy(),
                replay_ids=response.cpu().numpy(),
                visible=count,
                reveal_step=steps.cpu().numpy().astype(np.int16),
                logprob=unused,
                logprob_raw=unused,
                confidence=unused,
                steps_per_block=[],
                weight_versions=[],
                block_size=block_size,
                sampling=SamplingParams(temperature, top_p, int(top_k), min_p),
            )
        )
    return rows


def dummy_trace(size: int) -> RolloutTrace:
    """A prompt and a response of one block each, never drawn: keeps a rank that has nothing but padding in step
    with the collectives of the others."""
    nothing = np.zeros(size, dtype=np.float32)
    return RolloutTrace(
        np.zeros(size, np.int32), np.zeros(size, np.int32), 0, np.full(size, -1, np.int16), nothing, nothing, nothing,
        [], [], size,
    )  # fmt: skip


def to_jagged(
    values: torch.Tensor, batch: PackedBatch, rows: list[RolloutTrace | None], micro_batch: Any
) -> torch.Tensor:
    """Per-target values in verl's layout: jagged over prompt + response, response token j at index P + j - 1.

    Rows that were not replayed, and tokens that were never drawn, are 0.
    """
    prompts = micro_batch["prompts"].offsets().diff().tolist()
    responses = micro_batch["responses"].offsets().diff().tolist()
    lengths = [n if row is not None else 0 for n, row in zip(responses, rows, strict=True)]
    replayed = [n for n in lengths if n]
    parts = iter(scatter_targets(batch, values, replayed) if replayed else ())
    pieces = []
    for prompt, response, row in zip(prompts, responses, rows, strict=True):
        drawn = next(parts) if row is not None else values.new_zeros(response)
        pieces += [values.new_zeros(prompt - 1), drawn, values.new_zeros(1)]
    joined = torch.cat(pieces) + 0.0 * values.sum()
    return torch.nested.nested_tensor_from_jagged(joined, micro_batch["input_ids"].offsets())
