"""SGLang's tokenizer manager as the engine of ``rollout.service``; the server and the local engine both have one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from dllm.config import resolve
from dllm.decoding import decoder_class
from rollout.algorithm_config import is_ours, read_algorithm_config
from rollout.service import Service


class ManagerBackend:
    """A running engine by its tokenizer manager."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    async def generate(
        self, rid: str, input_ids: list[int], params: dict[str, Any], routing: bool
    ) -> AsyncIterator[Mapping[str, Any]]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            rid=rid, input_ids=input_ids, sampling_params=params, stream=True, return_routed_experts=routing
        )
        whole: dict[str, Any] | None = None
        async for answer in self.manager.generate_request(request, None):
            if whole is not None and self.manager.incremental_streaming_output:
                keys = {key for part in (whole, answer) for key in part["meta_info"] if key.startswith("dllm_")}
                answer = self.manager._coalesce_streaming_chunks([whole, answer], rid, keys)
            whole = answer
            yield answer

    def abort(self, rid: str) -> None:
        self.manager.abort_request(rid=rid)

    def version(self) -> str:
        return str(self.manager.config_value("weight_version"))

    def decode(self, ids: Sequence[int]) -> str:
        return self.manager.tokenizer.decode(list(ids), skip_special_tokens=True)


def service_of(manager: Any) -> Service:
    """The rollout service of an engine.

    Raises:
        ConfigError: the engine decodes token by token.
    """
    args = manager.server_args
    options = read_algorithm_config(args.dllm_algorithm, args.dllm_algorithm_config)
    config = resolve(args.model_path, block_size=options.get("block_size"))
    decoder = decoder_class(args.dllm_algorithm) if is_ours(args.dllm_algorithm) else None
    return Service(ManagerBackend(manager), config, decoder)
