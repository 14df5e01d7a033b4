"""Our decoders behind SGLang's ``DllmAlgorithm``: same loops, per-request sampling, and a log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from dllm.config import ConfigError
from dllm.decoding import BlockBatch, SamplingBatch, SamplingParams, decoder_class, make_decoder
from dllm.noise import sample_seed
from rollout.plugin import prefill, routing, version
from rollout.plugin.blocklog import BlockLog, BlockRecord
from rollout.plugin.routing import RoutingLog

logger = logging.getLogger(__name__)


@dataclass
class BlockState:
    """What the scheduler carries for an unfinished block between rounds."""

    steps: int = 0
    record: BlockRecord | None = None
    select_logprob: list[float] = field(default_factory=list)
    edits: list[tuple[int, int, int, int]] = field(default_factory=list)


def request_sampling(req: Any) -> SamplingParams:
    """Sampling parameters of a request.

    SGLang rewrites temperature 0 as temperature 1 with top_k 1 before a decoder sees it; ``SamplingParams``
    treats both as greedy.
    """
    p = req.sampling_params
    unlimited = p.top_k is None or p.top_k >= 1 << 30
    return SamplingParams(float(p.temperature), float(p.top_p), -1 if unlimited else int(p.top_k), float(p.min_p))


class SeedSource:
    """Seeds of requests that bring none: the engine's own seed and a count of such requests."""

    def __init__(self, base: int) -> None:
        self.base, self.count = base, 0

    def seed_of(self, req: Any) -> int:
        """The request's seed; drawn once and kept on the request."""
        if getattr(req, "dllm_seed", None) is None:
            explicit = req.sampling_params.sampling_seed
            if explicit is None:
                high, low = divmod(self.count, 1 << 20)
                explicit, self.count = sample_seed(self.base, 0, high, low), self.count + 1
            req.dllm_seed = int(explicit) & (1 << 63) - 1
        return req.dllm_seed


def make_algorithm_class() -> type:
    """The adapter class; made on demand because its base pulls in SGLang's model runner."""
    from sglang.srt.dllm.algorithm.base import DllmAlgorithm

    class DecoderAlgorithm(DllmAlgorithm):
        """Runs a ``dllm`` decoder inside SGLang's synchronous and FDFO loops."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.decoder = make_decoder(config.algorithm, config.mask_id, config.algorithm_config)
            self.edits = bool(getattr(self.decoder, "edits", False))
            rule = getattr(self.decoder, "selection", None)
            self.selection = None if rule is None else asdict(rule)
            self.seeds = SeedSource(config.random_seed)
            self.log: BlockLog | None = None
            self.routing: RoutingLog | None = None
            self.requests: list[Any] = []
            self.states: list[BlockState] = []
            self._sampling_key: tuple | None = None
            self._sampling: SamplingBatch | None = None

        def max_steps(self, block_size: int) -> int:
            return self.decoder.max_steps(block_size)

        def init_step_state(self, forward_batch: Any) -> list[BlockState]:
            return [BlockState() for _ in range(forward_batch.batch_size)]

        def run(self, model_runner: Any, forward_batch: Any, algo_states: list | None = None) -> Any:
            if self.log is None:
                slots = model_runner.req_to_token_pool.req_to_token.shape[0]
                self.log = BlockLog(slots, self.block_size, forward_batch.input_ids.device)
                capturer = routing.current()
                self.routing = RoutingLog(capturer, slots, self.block_size) if capturer is not None else None
            self.states = []
            return super().run(model_runner, forward_batch, algo_states)

        def sampling(self, device: torch.device) -> SamplingBatch:
            """Parameters of the current requests; rebuilt only when the batch changes."""
            key = (str(device), *(req.rid for req in self.requests))
            if self._sampling is None or key != self._sampling_key:
                params = [request_sampling(req) for req in self.requests]
                seeds = [self.seeds.seed_of(req) for req in self.requests]
                self._sampling_key, self._sampling = key, SamplingBatch.from_params(params, seeds, device)
            return self._sampling

        @torch.inference_mode()
        def step(self, forward_batch: Any, full_logits: torch.Tensor, states: list[BlockState]) -> list[bool]:
            size, log = self.block_size, self.log
            rows = forward_batch.batch_size
            ids = forward_batch.input_ids.view(rows, size)
            slot = forward_batch.req_pool_indices.long()
            self.states = states
            fresh = [i for i, state in enumerate(states) if state.steps == 0]
            if fresh:
                index = torch.tensor(fresh, device=ids.device)
                log.start(slot[index], ids[index] == self.mask_id)
            blocks = BlockBatch(
                ids=ids.long(),
                given=log.given[slot],
                start=forward_batch.positions.view(rows, size)[:, 0].long(),
                step=log.step[slot],
                counter=log.counter[slot],
                sampling=self.sampling(ids.device),
            )
            result = self.decoder.step(blocks, full_logits.view(rows, size, -1))
            log.add(slot, result)
            if self.routing is not None:
                self.routing.add(slot, result.revealed)
            changed = (blocks.ids != result.ids) & (blocks.ids != self.mask_id)
            misused = changed & blocks.given if self.edits else changed
            flags = torch.stack([result.done, result.failed, misused.any(1), changed.any(1)])
            done, nan, unlogged, edited = flags.tolist()
            failed = ["nan_logits" if n else "unlogged_edit" if u else None for n, u in zip(nan, unlogged, strict=True)]
            self._note_details(states, result, done)
            if any(edited):
                self._note_edits(states, blocks.ids, result.ids, changed)
            forward_batch.input_ids.copy_(result.ids.view(-1))
            self._collect(states, slot, done, failed)
            for state in states:
                state.steps += 1
            return [d or f is not None for d, f in zip(done, failed, strict=True)]

        def _note_details(self, states: list[BlockState], result: Any, done: list[bool]) -> None:
            """Log-probs of the choice of positions, of decoders where it is random."""
            if result.select_logprob is not None:
                for state, value, finished in zip(states, result.select_logprob.tolist(), done, strict=True):
                    if not finished:
                        state.select_logprob.append(value)

        def _note_edits(
            self, states: list[BlockState], before: torch.Tensor, after: torch.Tensor, changed: torch.Tensor
        ) -> None:
            columns = torch.cat([changed.nonzero(), before[changed][:, None], after[changed][:, None]], 1)
            for row, column, old, new in columns.tolist():
                states[row].edits.append((states[row].steps, column, old, new))

        def _collect(
            self, states: list[BlockState], slot: torch.Tensor, done: list[bool], failed: list[str | None]
        ) -> None:
            """Attach records to blocks that just finished; prompt blocks are done at once and have none."""
            ready = [
                i for i, state in enumerate(states) if (done[i] or failed[i]) and state.steps and state.record is None
            ]
            broken = [i for i, state in enumerate(states) if failed[i] and not state.steps]
            index = ready + broken
            if not index:
                return
            records = self.log.collect(slot[torch.tensor(index, device=slot.device)], version.current())
            for i, record in zip(index, records, strict=True):
                record.failure, record.selection = failed[i], self.selection
                record.select_logprob, record.edits = states[i].select_logprob, states[i].edits
                states[i].record = record
            if self.routing is not None:
                self._note_routing(states, slot, [i for i in index if self.requests[i].return_routed_experts])

        def _note_routing(self, states: list[BlockState], slot: torch.Tensor, wanted: list[int]) -> None:
            """Experts of the requests that asked for them, beside the other records."""
            if wanted:
                tables = self.routing.collect(slot[torch.tensor(wanted, device=slot.device)])
                for i, table in zip(wanted, tables, strict=True):
                    states[i].record.routing = table

    return DecoderAlgorithm


_algorithm_class: type | None = None


def _get_algorithm(original: Callable, config: Any) -> Any:
    """Build our adapter for our decoders; anything else is SGLang's."""
    global _algorithm_class
    name = config.algorithm
    try:
        cls = decoder_class(name)
    except ConfigError:
        return original(config)
    from sglang.srt.dllm.algorithm.base import DllmAlgorithm

    if issubclass(cls, DllmAlgorithm):
        return cls(config)
    if _algorithm_class is None:
        _algorithm_class = make_algorithm_class()
    return _algorithm_class(config)


def _forward(original: Callable, worker: Any, forward_batch: Any, batch: Any = None) -> Any:
    """One round of the scheduler: prompt chunks, then one block of everything else."""
    if batch is None:
        return original(worker, forward_batch, batch)
    for req in batch.reqs:
        count_cached_tokens(req)
    return prefill.run(partial(_run_blocks, original), worker, forward_batch, batch)


def _run_blocks(original: Callable, worker: Any, forward_batch: Any, batch: Any) -> Any:
    """Show the decoder the requests of the batch, and hand each finished block's record to its request."""
    algorithm = worker.dllm_algorithm
    if not hasattr(algorithm, "requests"):
        return original(worker, forward_batch, batch)
    algorithm.requests = batch.reqs
    result = original(worker, forward_batch, batch)
    for req, state in zip(batch.reqs, algorithm.states, strict=False):
        if state.record is not None:
            req.dllm_record = state.record
    return result


def count_cached_tokens(req: Any) -> None:
    """Set ``cached_tokens`` to the prompt tokens found in the radix cache on admission.

    SGLang adds (prefix - already computed) in every round; a block is computed many times, so its sum goes
    negative.
    """
    if not hasattr(req, "dllm_cached_tokens"):
        req.dllm_cached_tokens = min(len(req.prefix_indices), len(req.origin_input_ids))
    req.cached_tokens = req.cached_tokens_device = req.dllm_cached_tokens


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.dllm.algorithm.get_algorithm", _get_algorithm, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker._forward_batch_generation_dllm", _forward, HookType.AROUND
    )
