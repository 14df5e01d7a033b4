"""LLM client of verl's asynchronous modes: a request that was aborted for a weight refresh goes on afterwards.

verl's own client drops per-token extras on resume and forgets where the prompt ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from dllm.trace import PER_TOKEN, is_mixed

LINE = "dllm"
PAUSE = 0.05
"""Seconds between an abort and the next attempt; the engine holds requests back while it is paused."""


class BlockDiffusionClient(LLMServerClient):
    """Resumes aborted responses on the same block grid and joins their logs."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        limit = int(sampling_params["max_tokens"])
        parts: list[TokenOutput] = []
        done: list[int] = []
        while True:
            output = await super().generate(
                request_id,
                prompt_ids=[*prompt_ids, *done],
                sampling_params={**sampling_params, "max_tokens": limit - len(done)},
                **kwargs,
            )
            if output.token_ids or not parts:
                parts.append(output)
                done += output.token_ids
            if output.stop_reason != "abort" or len(done) >= limit:
                return join_parts(parts, prompt_ids, output.stop_reason)
            await asyncio.sleep(PAUSE)


def join_parts(parts: list[TokenOutput], prompt_ids: list[int], stop_reason: str | None) -> TokenOutput:
    """One output from the parts of a response; an aborted part ends on a block boundary and has no tail."""
    parts = [part for part in parts if part.token_ids] or parts[:1]
    lines = [part.extra_fields[LINE] for part in parts]
    joined = dict(lines[-1])
    joined["input_ids"] = list(prompt_ids)
    for name in ("output_ids", *PER_TOKEN, "steps_per_block", "weight_versions"):
        joined[name] = [value for line in lines for value in line[name]]
    joined["text"] = "".join(line["text"] for line in lines)
    if is_mixed(joined["weight_versions"]):
        joined["mixed"] = True
    if (admitted := lines[0].get("weight_version_at_admission")) is not None:
        joined["weight_version_at_admission"] = admitted
    for name in ("edits", "select_logprob"):
        if any(name in line for line in lines):
            joined[name] = [value for line in lines for value in line.get(name, [])]
    if rules := [line["selection"] for line in lines if "selection" in line]:
        joined["selection"] = rules[-1]
    first, last = parts[0].extra_fields, parts[-1].extra_fields
    return TokenOutput(
        token_ids=[token for part in parts for token in part.token_ids],
        log_probs=[value for part in parts for value in part.log_probs or []],
        stop_reason=stop_reason,
        extra_fields={
            LINE: joined,
            "global_steps": last["global_steps"],
            "min_global_steps": first["min_global_steps"],
            "max_global_steps": last["max_global_steps"],
        },
    )
