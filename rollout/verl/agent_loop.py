"""From a prompt to a training sample: single-turn loop, output with the reveal log, reward on visible text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from dllm.config import resolve
from dllm.noise import sample_seed
from dllm.trace import RolloutTrace
from rollout.engine import content_seed
from rollout.records import check_trainable
from rollout.saved import SavedRollouts

LINE = "dllm"
"""Key of ``extra_fields`` that holds the rollout line of a sample."""

REWARD_SECONDS = "reward_seconds"
"""Key of ``extra_fields``: from asking for a response's reward to having it."""

AGENT_NAME = "dllm_single_turn"

ERROR_TAG = "dllm_error"
"""Tag of a prompt in the queue that says why one of its rollouts failed."""


class BlockDiffusionOutput(AgentLoopOutput):
    """Output whose ``as_dict`` adds the columns that the actor replays from.

    ``response_ids`` is the whole replay (visible tokens and the rest of the terminal block): its tail was sampled
    too, so it belongs to the trajectory and to the loss.
    """

    def as_dict(self) -> dict[str, Any]:
        out = super().as_dict()
        line = out["extra_fields"][LINE]
        return out | replay_columns(line)


def replay_columns(line: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What the actor replays from, of a rollout line.

    Returns:
        With R replay tokens, ``dllm_reveal_step`` int64 [R]; ``dllm_logprob`` float32 [R], of the tokens alone;
        ``dllm_sampling`` float32 [4], temperature, top_p, top_k and min_p; ``dllm_selection`` float32 [2], threshold
        and count of a random choice of positions, 0 without one; ``dllm_edits`` int64 [1 + 5 * E], how many edits
        and then their five numbers each (never empty: verl's containers have no use for empty rows); ``dllm_routing``
        int64 [1 + R * routers], the number of routers and then the experts of every token, [0] if they were not asked
        for.
    """
    tail, sampling = line["tail"], line["sampling_params"]
    rule, edits = line.get("selection") or {}, line.get("edits") or []
    routing = np.asarray(line.get("routing") or np.zeros((0, 0)), dtype=np.int64)
    joined = {name: list(line[name]) + list(tail[name]) for name in ("reveal_step", "logprob")}
    return {
        "dllm_reveal_step": torch.tensor(joined["reveal_step"], dtype=torch.int64),
        "dllm_logprob": torch.tensor(joined["logprob"], dtype=torch.float32),
        "dllm_sampling": torch.tensor(
            [float(sampling[key]) for key in ("temperature", "top_p", "top_k", "min_p")], dtype=torch.float32
        ),
        "dllm_selection": torch.tensor([float(rule.get(k, 0)) for k in ("threshold", "tokens_per_step")]),
        "dllm_edits": torch.tensor([len(edits), *(number for edit in edits for number in edit)], dtype=torch.int64),
        "dllm_routing": torch.from_numpy(np.concatenate([[routing.shape[1]], routing.ravel()])),
    }


def aligned_limit(prompt_len: int, response_length: int, block_size: int) -> int:
    """Largest number of new tokens that fits into ``response_length`` and ends on the block grid.

    Raises:
        ValueError: not even the block the prompt ends in fits.
    """
    limit = response_length - (prompt_len + response_length) % block_size
    if limit < 1:
        raise ValueError(
            f"data.max_response_length={response_length} is too small for a prompt of {prompt_len} tokens: the block "
            f"it ends in needs {block_size - prompt_len % block_size}; raise it to at least {block_size}"
        )
    return limit


def response_mask(line: Mapping[str, Any], tokens: int, train_mixed: bool) -> list[int]:
    """1 for every token that is trained on: all of a response, or none if its rollout line is ``mixed``."""
    return [int(train_mixed or not line.get("mixed"))] * tokens


def saved_rollouts(rollout_config: Any) -> str | None:
    """``rollout.engine_kwargs.sglang_dllm.load_debug_rollouts``: directory of rollouts to train from without an
    engine."""
    settings = (rollout_config.get("engine_kwargs") or {}).get("sglang_dllm") or {}
    return settings.get("load_debug_rollouts")


def saved_output(line: Mapping[str, Any], step: int) -> TokenOutput:
    """What ``BlockDiffusionServer.generate`` returned for a line of a rollout file."""
    trace = RolloutTrace.from_line(line)
    check_trainable(trace)
    return TokenOutput(
        token_ids=trace.replay_ids.tolist(),
        log_probs=trace.action_logprob.tolist(),
        stop_reason=line["finish_reason"],
        extra_fields={LINE: dict(line), "global_steps": step, "min_global_steps": step, "max_global_steps": step},
    )


@register(AGENT_NAME)
class BlockDiffusionSingleTurn(AgentLoopBase):
    """One prompt, one response, one log.

    A response that weights of several versions have decoded is not trained on (its mask is 0) unless
    ``rollout.engine_kwargs.sglang_dllm.train_mixed`` says so: it is no sample of one policy.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_size = resolve(self.config.actor_rollout_ref.model.path).block_size
        directory = saved_rollouts(self.config.actor_rollout_ref.rollout)
        self.saved = None if directory is None else SavedRollouts(directory)
        settings = (self.config.actor_rollout_ref.rollout.get("engine_kwargs") or {}).get("sglang_dllm") or {}
        self.train_mixed = bool(settings.get("train_mixed"))

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        run_seed = int(self.config.data.get("seed") or 0)
        step_seed = sample_seed(run_seed, int(kwargs.get("global_steps", 0)), 0, 0)
        request = {
            **sampling_params,
            "max_tokens": aligned_limit(len(prompt_ids), self.rollout_config.response_length, self.block_size),
            "seed": content_seed(step_seed, prompt_ids, int(kwargs.get("session_id", 0))),
        }
        metrics: dict[str, Any] = {}
        with simple_timer("generate_sequences", metrics):
            if self.saved is not None:
                step = int(kwargs["global_steps"])
                output = saved_output(self.saved.line(step, prompt_ids, request["seed"]), step)
            else:
                output = await self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=request
                )
        return BlockDiffusionOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=response_mask(output.extra_fields[LINE], len(output.token_ids), self.train_mixed),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=metrics,
            extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
        )


class BlockDiffusionAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker with three changes: our loop is the default, rewards see visible tokens only, and the reason of a
    failure reaches the trainer."""

    async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, *, agent_name: str, **kwargs: Any) -> Any:
        name = AGENT_NAME if agent_name == "single_turn_agent" else agent_name
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, agent_name=name, **kwargs)
        except Exception as error:
            # verl logs it in the worker and goes on with what is left of the group; the trainer reads this tag.
            partition = "val" if trajectory["validate"] else "train"
            tag = {ERROR_TAG: f"{type(error).__name__}: {error}"}
            await tq.async_kv_put(key=kwargs["uid"], partition_id=partition, tag=tag)
            raise

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict) -> None:
        shown = []
        for output in outputs:
            length = len(output.extra_fields[LINE]["output_ids"])
            shown.append(
                output.model_copy(
                    update={
                        "response_ids": output.response_ids[:length],
                        "response_mask": output.response_mask[:length],
                        "extra_fields": {k: v for k, v in output.extra_fields.items() if k != LINE},
                    }
                )
            )
        await super()._compute_score(shown, kwargs)
        outputs[-1].reward_score = shown[-1].reward_score
        outputs[-1].extra_fields[REWARD_SECONDS] = shown[-1].metrics.compute_score
        if "reward_extra_info" in shown[-1].extra_fields:
            outputs[-1].extra_fields["reward_extra_info"] = shown[-1].extra_fields["reward_extra_info"]


class BlockDiffusionAgentLoopManager(AgentLoopManagerTQ):
    """Set as ``rollout.agent.agent_loop_manager_class``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(BlockDiffusionAgentLoopWorker)
