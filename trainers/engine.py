"""verl actor engine ``model_type=block_diffusion_lm``: log-probs by exact replay of the rollout's states.

Loaded through ``actor_rollout_ref.model.external_lib=trainers.engine``, before verl looks up its engines; the losses of
``trainers.losses`` are registered with it.

Another likelihood comes from ``actor_rollout_ref.model.override_config``, which verl hands to every engine, actor and
reference alike: ``{model_config: {}, dllm: {likelihood: elbo, likelihood_options: {samples: 2}}}``. With
``model_config`` beside it verl does not take the rest for keys of the model's config.json. ``dllm.algorithm`` and
``dllm.options`` there say how the engine decodes, which schedule flips are measured with.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
from dllm.decoding import Decoder, SamplingBatch, SamplingParams, SelectionRule, make_decoder
from dllm.likelihood import Elbo, Exact, Likelihood, States, make_likelihood
from dllm.likelihood.elbo import sandwich, upper_bounds
from dllm.likelihood.exact import action_logprobs, router_tie_targets, target_head
from dllm.likelihood.states import content_generator, pack_states, target_shares, token_sums
from dllm.likelihood.subsample import inclusion_probabilities, slice_signals, subsample
from dllm.models.base import BlockDiffusionLM
from dllm.models.checkpoint import load_model
from dllm.trace import RolloutTrace
from rollout.verl.server import decoder_settings
from trainers.flips import MEASURE, NO_FLIPS, logged_routing, recorded_routing, router_flips, schedule_probe, with_flips
from trainers.losses import loss_inputs
from trainers.objective import check_subsampling

REPLAY_COLUMNS = ("dllm_reveal_step", "dllm_logprob", "dllm_sampling", "dllm_selection", "dllm_edits")
"""Columns of ``rollout.verl.agent_loop.replay_columns``."""

EXTRA_OUTPUTS = ("router_tie", "schedule_flip", "router_flip")
"""Per-token outputs of a forward-only pass beside verl's own; the flips only where ``MEASURE`` asks for them."""


@EngineRegistry.register(model_type="block_diffusion_lm", backend=["fsdp2"], device=["cuda", "cpu"])
class BlockDiffusionFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine with our model and the packed forward of ``dllm.replay``.

    The model is the published architecture; nothing of the remote code of a checkpoint runs.
    """

    def _build_module(self) -> BlockDiffusionLM:
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

    def _build_fsdp_module(self, module: BlockDiffusionLM) -> torch.nn.Module:
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
        # What the engine keeps in fp32 whatever its dtype (LLaDA2's routers); in bf16 they would choose other experts.
        router = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce, cast_forward_inputs=False)
        rest = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=True)
        for part in module.fp32_modules():
            fully_shard(part, mp_policy=router, reshard_after_forward=reshard, **shared)
        for layer in module.model.layers:
            fully_shard(layer, mp_policy=rest, reshard_after_forward=reshard, **shared)
        # Embedding, norm and head stay gathered between forward and backward: the head is recomputed in chunks.
        fully_shard(module, mp_policy=rest, reshard_after_forward=False, **shared)
        fsdp2_load_full_state_dict(module, state, self.device_mesh, offload)
        return module

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[torch.Tensor, dict]:
        """One micro-batch: states, log-probs in verl's layout, loss."""
        device = get_device_id()
        micro_batch = micro_batch.to(device)
        size, likelihood = self.block_diffusion.block_size, self.likelihood
        rows = replay_rows(micro_batch, size)
        traces = [row for row in rows if row is not None] or [dummy_trace(size)]
        states = [likelihood.states(trace, self._mask_id) for trace in traces]
        kept = None
        if not forward_only and isinstance(likelihood, Exact) and likelihood.keep < 1:
            check_subsampling(likelihood, loss_function.keywords["config"])
            micro_batch = micro_batch.copy()
            states, kept = subsampled(states, likelihood, rows, micro_batch)
        batch, weights = pack_states(states, size, device)
        # Only the decoder's own states have its sampling distribution; others score the model's.
        exact = isinstance(likelihood, Exact)
        params = [t.sampling if exact else SamplingParams() for t in traces]
        sampling = SamplingBatch.from_params(params, [0] * len(params), device)
        entropy = bool(tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False))
        autocast = (
            nullcontext()
            if self._autocast_dtype == torch.float32
            else torch.autocast(get_device_name(), self._autocast_dtype)
        )
        with autocast:
            if forward_only:
                self.module.record_router_gaps(True)
            wanted = int(tu.get_non_tensor_data(data=micro_batch, key=MEASURE, default=NO_FLIPS))
            measure = forward_only and exact and wanted != NO_FLIPS
            probe, decoder = None, self.decoder if measure else None
            if decoder is not None:
                probe = schedule_probe(batch, traces, decoder, sampling, wanted)
            head = with_flips(target_head(batch, sampling, self._mask_id, entropy), probe)
            routing = logged_routing(rows, micro_batch) if measure else []
            with recorded_routing(self.module, batch, any(r is not None for r in routing)) as hashes:
                values, flips = self.module(batch.input_ids, batch.position, attention_for(batch), head)
            lengths = [len(t.replay_ids) for t in traces]
            jagged = lambda per_target: to_jagged(token_sums(batch, per_target, lengths), rows, micro_batch)
            share = target_shares(batch, lengths)
            model_output = {"log_probs": jagged(weights * action_logprobs(batch, values))}
            if entropy:
                model_output["entropy"] = jagged(share * values.entropy)
            if forward_only:
                ties = router_tie_targets(batch, self.module.router_gap())
                model_output["router_tie"] = jagged(share * ties)
                self.module.record_router_gaps(False)
            if measure:
                flipped = probe.per_target(flips, len(share)) if probe else torch.zeros_like(share)
                model_output["schedule_flip"] = jagged(share * flipped)
                model_output["router_flip"] = jagged(share * router_flips(batch, hashes, routing))
            if kept is not None:
                model_output["log_probs"] = reweighted(model_output["log_probs"], kept, rows, micro_batch)
            if loss_function is None:
                loss, metrics = torch.tensor(1.0, device=device), {}
            else:
                negative = None
                if isinstance(likelihood, Elbo):
                    bounds = upper_bounds(batch, values.logprob, weights, lengths, likelihood.beta)
                    upper = to_jagged(bounds, rows, micro_batch)
                    negative = sandwich(model_output["log_probs"], upper, -torch.ones_like(upper), likelihood.mix)
                steps = to_jagged([step_ids(t, device) for t in traces], rows, micro_batch)
                with loss_inputs(steps, negative, micro_batch):
                    loss, metrics = loss_function(
                        model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
                    )
        output = {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}
        return loss, output

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of ``override_config.dllm``, exact without one."""
        given = (self.model_config.override_config or {}).get("dllm") or {}
        return make_likelihood(given.get("likelihood", "exact"), given.get("likelihood_options"))

    @property
    def decoder(self) -> Decoder | None:
        """Decoder of ``override_config.dllm`` with its options; None if it is not told."""
        given = (self.model_config.override_config or {}).get("dllm") or {}
        if "algorithm" not in given:
            return None
        settings = decoder_settings({"sglang_dllm": {k: given[k] for k in ("algorithm", "options") if k in given}})
        return make_decoder(settings["algorithm"], self._mask_id, settings["options"])

    @property
    def _mask_id(self) -> int:
        return self.block_diffusion.mask_id


def replay_rows(micro_batch: Any, block_size: int) -> list[RolloutTrace | None]:
    """The samples of a micro-batch as traces, without what a log-prob does not need.

    verl pads batches with synthetic rows that copy the log of a real sample beside one-token responses; those
    are None.
    """
    rows: list[RolloutTrace | None] = []
    columns = (micro_batch[key].unbind() for key in ("prompts", "responses", *REPLAY_COLUMNS))
    for prompt, response, steps, logprob, sampling, selection, edits in zip(*columns, strict=True):
        count = len(response)
        if len(steps) != count or (len(prompt) + count) % block_size:
            rows.append(None)
            continue
        temperature, top_p, top_k, min_p = sampling.tolist()
        threshold, tokens = selection.tolist()
        unused = np.zeros(count, dtype=np.float32)
        rows.append(
            RolloutTrace(
                prompt_ids=prompt.cpu().numpy(),
                replay_ids=response.cpu().numpy(),
                visible=count,
                reveal_step=steps.cpu().numpy().astype(np.int16),
                logprob=logprob.float().cpu().numpy(),
                logprob_raw=unused,
                confidence=unused,
                steps_per_block=[],
                weight_versions=[],
                block_size=block_size,
                sampling=SamplingParams(temperature, top_p, int(top_k), min_p),
                edits=[tuple(edit) for edit in edits[1:].view(int(edits[0]), 5).tolist()],
                selection=SelectionRule(threshold, int(tokens)) if threshold > 0 else None,
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


def step_ids(trace: RolloutTrace, device: torch.device | str) -> torch.Tensor:
    """A number for each (block, step) in which a token was drawn: int64 [R]; tokens never drawn share one of theirs."""
    steps = trace.reveal_step.astype(np.int64) + 1
    block = (trace.prompt_len + np.arange(len(steps))) // trace.block_size - trace.first_block
    return torch.from_numpy(block * (int(steps.max(initial=0)) + 1) + steps).to(device)


def subsampled(
    states: Sequence[States], likelihood: Exact, rows: list[RolloutTrace | None], micro_batch: Any
) -> tuple[list[States], list[torch.Tensor]]:
    """Kept states of every replayed row and float32 [R] per row: the weight of each token in the loss.

    A rank that has nothing but padding keeps its dummy states.
    """
    traces = [row for row in rows if row is not None]
    old = [v for v, row in zip(micro_batch["old_log_probs"].unbind(), rows, strict=True) if row is not None]
    made, weights = [], []
    for state, trace, logprob in zip(states, traces, old, strict=False):
        signal = slice_signals(state, logprob.float().cpu().numpy())
        probability = inclusion_probabilities(signal, likelihood.keep, likelihood.keep_floor)
        kept, weight = subsample(state, probability, len(trace.replay_ids), content_generator(trace, "keep"))
        made.append(kept)
        weights.append(torch.from_numpy(weight))
    return made or list(states), weights


def reweighted(
    log_probs: torch.Tensor, kept: list[torch.Tensor], rows: list[RolloutTrace | None], micro_batch: Any
) -> torch.Tensor:
    """Put the loss weights of sub-sampled states where verl's losses look for weights.

    Returns:
        ``log_probs`` with the old log-prob at tokens that were left out, so that their ratio is 1 in the metrics.
    """
    old = micro_batch["old_log_probs"]
    weights = iter(kept)
    given = micro_batch["rollout_is_weights"].unbind() if "rollout_is_weights" in micro_batch else None
    factors, pieces = [], []
    columns = zip(rows, old.unbind(), log_probs.unbind(), strict=True)
    for index, (row, before, now) in enumerate(columns):
        weight = next(weights).to(before) if row is not None else torch.ones_like(before)
        factors.append(weight if given is None else weight * given[index])
        start = len(now) - len(before) - 1
        left_out = torch.nn.functional.pad(torch.where(weight > 0, 0.0, before), (start, 1))
        pieces.append(now + left_out)
    # Not from offsets: verl pads this one, and torch then pads to the length of all rows together.
    micro_batch["rollout_is_weights"] = torch.nested.as_nested_tensor(factors, layout=torch.jagged)
    return torch.nested.nested_tensor_from_jagged(torch.cat(pieces), log_probs.offsets())


def to_jagged(parts: Sequence[torch.Tensor], rows: list[RolloutTrace | None], micro_batch: Any) -> torch.Tensor:
    """Values per replay token in verl's layout: jagged over prompt + response, response token j at index P + j - 1.

    Args:
        parts: one [R] tensor per replayed row, or those of the dummy trace if there is none.

    Returns:
        Rows that were not replayed are 0.
    """
    prompts = micro_batch["prompts"].offsets().diff().tolist()
    responses = micro_batch["responses"].offsets().diff().tolist()
    like, remaining = parts[0], iter(parts)
    pieces = []
    for prompt, response, row in zip(prompts, responses, rows, strict=True):
        drawn = next(remaining) if row is not None else like.new_zeros(response)
        pieces += [like.new_zeros(prompt - 1), drawn, like.new_zeros(1)]
    # A rank with nothing but padding takes part in the backward pass all the same.
    joined = torch.cat(pieces) + 0 * like.sum()
    return torch.nested.nested_tensor_from_jagged(joined, micro_batch["input_ids"].offsets())
