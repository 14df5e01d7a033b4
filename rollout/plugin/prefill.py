"""Prompts in large chunks: stock SGLang prefills block diffusion one block per request and forward pass.

A block sees itself and everything before it, never what comes after it. So the blocks of a prompt can run in one pass
if each is a row of its own whose keys end with that block: every layer writes the keys and values of all rows before
any row reads them. The rows share the request's slot, so no kernel and no mask changes; logits, which nobody reads,
are left out. A pass has at most as many rows as the engine has running requests, and at most
``chunked_prefill_size`` tokens of one request; ``--chunked-prefill-size`` = block size is stock's behaviour.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from rollout.plugin import metrics


@dataclasses.dataclass(frozen=True)
class Row:
    """One block in a forward pass.

    Attributes:
        request: index of its request in the batch.
        token: index of its first token in the batch.
        start: position of its first token in the sequence.
    """

    request: int
    token: int
    start: int


def clean_tokens(ids: Sequence[int], prefix: int, block_size: int, mask_id: int) -> int:
    """Tokens behind ``prefix`` that lie in whole blocks without a mask.

    Args:
        ids: the sequence with a block of masks at its end, as SGLang's scheduler fills it (``array('q')``).
    """
    end = (len(ids) - block_size) // block_size * block_size
    known = ids[prefix:end]
    try:
        return known.index(mask_id) // block_size * block_size
    except ValueError:
        return max(0, end - prefix)


def chunk_tokens(clean: int, block_size: int, *limits: float | None) -> int:
    """Tokens of the next chunk: as many of ``clean`` as all ``limits`` allow in whole blocks, at least one block.

    Args:
        limits: tokens; None is no limit.
    """
    allowed = min([clean, *(int(limit) for limit in limits if limit is not None)])
    return max(block_size, allowed // block_size * block_size)


def block_rows(prefixes: Sequence[int], lengths: Sequence[int], block_size: int) -> list[Row]:
    """The blocks of a batch in the order of its tokens; ``lengths`` are whole blocks."""
    rows, token = [], 0
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        for offset in range(0, length, block_size):
            rows.append(Row(request, token + offset, prefix + offset))
        token += length
    return rows


def batch_of_rows(forward_batch: Any, rows: Sequence[Row], block_size: int) -> Any:
    """A ``ForwardBatch`` of these rows instead of the requests they are from."""
    device, n = forward_batch.input_ids.device, len(rows)
    tensor = lambda values, dtype, where=device: torch.tensor(values, dtype=dtype, device=where)
    column = torch.arange(block_size, device=device)
    token = (tensor([r.token for r in rows], torch.int64)[:, None] + column).flatten()
    start = tensor([r.start for r in rows], torch.int64)
    request = tensor([r.request for r in rows], torch.int64)
    ends = [r.start + block_size for r in rows]
    return dataclasses.replace(
        forward_batch,
        batch_size=n,
        input_ids=forward_batch.input_ids[token],
        out_cache_loc=forward_batch.out_cache_loc[token],
        positions=(start[:, None] + column).flatten().to(forward_batch.positions.dtype),
        req_pool_indices=forward_batch.req_pool_indices[request],
        orig_seq_lens=None if forward_batch.orig_seq_lens is None else forward_batch.orig_seq_lens[request],
        seq_lens=tensor(ends, forward_batch.seq_lens.dtype),
        seq_lens_cpu=tensor(ends, torch.int64, "cpu"),
        seq_lens_sum=sum(ends),
        extend_num_tokens=n * block_size,
        num_token_non_padded_cpu=n * block_size,
        num_token_non_padded=None
        if forward_batch.num_token_non_padded is None
        else tensor(n * block_size, forward_batch.num_token_non_padded.dtype),
        extend_seq_lens=tensor([block_size] * n, torch.int32),
        extend_seq_lens_cpu=[block_size] * n,
        extend_prefix_lens=tensor([r.start for r in rows], torch.int32),
        extend_prefix_lens_cpu=[r.start for r in rows],
        extend_start_loc=tensor([i * block_size for i in range(n)], torch.int32),
        extend_logprob_start_lens_cpu=[0] * n,
        rids=[forward_batch.rids[r.request] for r in rows],
        lora_ids=[forward_batch.lora_ids[r.request] for r in rows],
    )


_in_chunk = False


@contextmanager
def _chunk_pass(backend: Any) -> Iterator[None]:
    """Run eagerly, without logits, and let FlashInfer read all keys from the cache (its ragged kernel would take a
    row's own from the pass and write the cache afterwards)."""
    global _in_chunk
    paged = getattr(backend, "use_paged", None)
    _in_chunk = True
    if paged is not None:
        backend.use_paged = True
    try:
        yield
    finally:
        _in_chunk = False
        if paged is not None:
            backend.use_paged = paged


def run(usual: Callable, worker: Any, forward_batch: Any, batch: Any) -> Any:
    """Compute the keys of prompt chunks in one pass; the rest of the batch takes its usual way.

    Args:
        usual: ``usual(worker, forward_batch, batch)`` runs a batch of single blocks.
    """
    size = worker.dllm_algorithm.block_size
    if all(req.extend_range.length <= size for req in batch.reqs):
        return usual(worker, forward_batch, batch)
    from sglang.srt.managers.utils import GenerationBatchResult

    reqs, fdfo = batch.reqs, worker.dllm_algorithm.fdfo
    prompts = {i for i, req in enumerate(reqs) if is_prompt(req, size)}
    rows = block_rows([r.extend_range.start for r in reqs], [r.extend_range.length for r in reqs], size)
    with _chunk_pass(worker.model_runner.attn_backend):
        chunk = batch_of_rows(forward_batch, [row for row in rows if row.request in prompts], size)
        out = worker.model_runner.forward(chunk, pp_proxy_tensors=None)
    if (counters := metrics.current()) is not None:
        counters.prefill(chunk.extend_num_tokens)
    ids: list[Any] = [None] * len(reqs)
    accepted, states = [size] * len(reqs), [None] * len(reqs)
    for i in prompts:
        end = reqs[i].extend_range.end
        # SGLang moves on by one block per round.
        reqs[i].dllm_block_offset = end - size
        last = reqs[i].full_untruncated_fill_ids[end - size : end]
        ids[i] = list(last) if fdfo else torch.empty(0, dtype=torch.int64)
    others = [i for i in range(len(reqs)) if i not in prompts]
    if others:
        # The block behind a cached prompt: already denoising, in the same batch.
        rest = batch_of_rows(forward_batch, [row for row in rows if row.request not in prompts], size)
        result = usual(worker, rest, SimpleNamespace(reqs=[reqs[i] for i in others]))
        for place, i in enumerate(others):
            ids[i] = result.next_token_ids[place]
            if fdfo:
                accepted[i] = result.accept_length_per_req_cpu[place]
                states[i] = result.dllm_algo_state[place]
    return GenerationBatchResult(
        logits_output=out.logits_output,
        next_token_ids=ids if fdfo or others else [],
        accept_length_per_req_cpu=accepted if fdfo else None,
        dllm_algo_state=states if fdfo else None,
        can_run_cuda_graph=False,
    )


def is_prompt(req: Any, block_size: int) -> bool:
    """Whether what the request runs next is prompt alone."""
    start, length = req.extend_range.start, req.extend_range.length
    ids = req.full_untruncated_fill_ids
    return not req.dllm_incomplete_ids and length <= clean_tokens(ids, start, block_size, req.dllm_config.mask_id)


@contextmanager
def _chunk_limit(adder: Any, req: Any, prefix: int) -> Iterator[None]:
    """While open, the adder takes a chunk of the request where it would take a block."""
    size = req.dllm_config.block_size
    clean = (
        0
        if req.dllm_incomplete_ids
        else clean_tokens(req.full_untruncated_fill_ids, prefix, size, req.dllm_config.mask_id)
    )
    adder.dllm_block_size = chunk_tokens(
        clean, size, adder.rem_dllm_tokens, adder.rem_chunk_tokens, adder.rem_input_tokens, adder.rem_total_tokens
    )
    try:
        yield
    finally:
        adder.dllm_block_size = size


def _add_incoming(original: Callable, adder: Any, req: Any, prefix_len: int) -> Any:
    with _chunk_limit(adder, req, prefix_len):
        return original(adder, req, prefix_len)


def _add_staging(original: Callable, adder: Any, req: Any) -> Any:
    with _chunk_limit(adder, req, len(req.prefix_indices)):
        return original(adder, req)


def _can_run_graph(original: Callable, runner: Any, forward_batch: Any) -> bool:
    return not _in_chunk and original(runner, forward_batch)


def _logits(original: Callable, processor: Any, *args: Any, **kwargs: Any) -> Any:
    if not _in_chunk:
        return original(processor, *args, **kwargs)
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    return LogitsProcessorOutput(full_logits=None, next_token_logits=None)


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("managers.schedule_policy.PrefillAdder._add_dllm_req", _add_incoming),
        ("managers.schedule_policy.PrefillAdder.add_dllm_staging_req", _add_staging),
        ("layers.logits_processor.LogitsProcessor._get_dllm_logits", _logits),
    ):
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)
    from rollout.plugin.cpu import cpu_requested

    if not cpu_requested():
        HookRegistry.register(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
            _can_run_graph,
            HookType.AROUND,
        )
