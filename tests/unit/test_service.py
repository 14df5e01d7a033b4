"""The service over an engine that is a Python loop: seeds, order, aborts, deadlines, resumed samples."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from dllm.config import BlockDiffusionConfig
from dllm.decoding import DECODERS, SamplingParams
from dllm.noise import sample_seed
from dllm.trace import PER_TOKEN, TraceError
from rollout import wire
from rollout.client import Client
from rollout.engine import Engine
from rollout.params import GenerateParams, content_seed
from rollout.protocol import RequestError, RolloutRequest, parse
from rollout.records import RolloutError, join_samples
from rollout.requests import Answer, Model, jobs_of
from rollout.routes import rollout_routes
from rollout.service import Block, DuplicateRequest, Finished, Job, Service

SIZE, MASK, VOCAB = 4, 9, 10
MODEL = Model(MASK, VOCAB, SIZE, 192, lambda text: [len(text) % 9], lambda messages: [1, 2])


class Loop:
    """Decodes a block per tick: the token at position p is (seed + p) mod 9; answers are cumulative, as SGLang's."""

    def __init__(self, tick: float = 0.0, refuse: str | None = None, fail: int | None = None) -> None:
        self.tick, self.refuse, self.fail = tick, refuse, fail
        self.stopping: set[str] = set()
        self.running = 0

    async def generate(
        self, rid: str, input_ids: list[int], params: dict[str, Any], routing: bool
    ) -> AsyncIterator[Mapping[str, Any]]:
        if self.refuse is not None:
            raise ValueError(self.refuse)
        self.running += 1
        try:
            seed, limit, ids, log = params["sampling_seed"], params["max_new_tokens"], [], []
            start = len(input_ids)
            meta: dict[str, Any] = {f"dllm_{name}": [] for name in PER_TOKEN}
            while True:
                await asyncio.sleep(self.tick)
                room = SIZE - (start + len(ids)) % SIZE
                fresh = [(seed + start + len(ids) + k) % 9 for k in range(room)]
                shown = min(room, limit - len(ids))
                log.append({"steps": 1, "weight_version": "v"})
                values = {"reveal_step": 0, "logprob": -0.5, "logprob_raw": -0.5, "confidence": 0.5}
                for name in PER_TOKEN:
                    meta[f"dllm_{name}"] += [values[name]] * shown
                ids = ids + fresh[:shown]
                reason: dict[str, Any] | None = {"type": "length"} if len(ids) >= limit else None
                if reason and room > shown:
                    rest = room - shown
                    log[-1]["tail"] = {"ids": fresh[shown:], **{name: [values[name]] * rest for name in PER_TOKEN}}
                if reason is None and rid in self.stopping:
                    reason = {"type": "abort"}
                if self.fail == seed:
                    reason = {"type": "abort", "err_type": "nan_logits", "message": "nan_logits: look at the weights"}
                yield {
                    "output_ids": ids,
                    "text": "".join(map(str, ids)),
                    "meta_info": {**meta, "dllm_block": list(log), "finish_reason": reason},
                }
                if reason:
                    return
        finally:
            self.running -= 1

    def abort(self, rid: str) -> None:
        self.stopping.add(rid)

    def version(self) -> str:
        return "v"

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(str, ids))


def service(**options: Any) -> tuple[Service, Loop]:
    config = BlockDiffusionConfig(SIZE, MASK, (), "test")
    loop = Loop(**options)
    return Service(loop, config, None), loop


def jobs(count: int, prompt: Sequence[int] = (1, 2, 3)) -> list[Job]:
    return [Job(0, j, list(prompt), j) for j in range(count)]


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_samples_come_back_in_their_places():
    made = run(service()[0].collect(jobs(5), GenerateParams(max_new_tokens=6)))
    for j, event in enumerate(made):
        assert event.sample == j
        assert event.result.trace.replay_ids.tolist() == [(j + p) % 9 for p in range(3, 12)], "prompt of 3, grid of 4"
        assert event.result.trace.visible == 6 and event.result.finish_reason == "length"
        assert event.result.version_at_admission == event.result.version_at_completion == "v"


def test_blocks_add_up():
    async def go() -> None:
        ids: list[int] = []
        async for event in service()[0].events(jobs(1), GenerateParams(max_new_tokens=10), blocks=True):
            if isinstance(event, Block):
                assert {len(event.fields[name]) for name in PER_TOKEN} == {len(event.fields["output_ids"])}
                ids += event.fields["output_ids"]
            else:
                assert ids == event.result.trace.replay_ids[:10].tolist()

    run(go())


class TestAborts:
    def test_at_a_block_boundary_and_on_again(self):
        async def go() -> None:
            made, loop = service(tick=0.01)
            params = GenerateParams(max_new_tokens=40)
            whole = await made.collect(jobs(3), params)
            task = asyncio.ensure_future(made.collect(jobs(3), params, rid="x"))
            await asyncio.sleep(0.05)
            with pytest.raises(DuplicateRequest):
                await made.collect(jobs(1), params, rid="x")
            assert await made.abort("x")
            assert not await made.abort("x"), "nothing is left of it"
            parts = [event.result for event in await task]
            for part in parts:
                assert part.finish_reason == "abort" and 0 < len(part.trace.replay_ids) < 40
                assert (3 + len(part.trace.replay_ids)) % SIZE == 0
            again = [Job(0, j, [1, 2, 3], j, part) for j, part in enumerate(parts)]
            for one, other in zip(await made.collect(again, params), whole, strict=True):
                assert one.result.to_line() == other.result.to_line()
            assert loop.running == 0

        run(go())

    def test_a_deadline(self):
        async def go() -> None:
            made, _ = service(tick=0.02)
            (event,) = await made.collect(jobs(1), GenerateParams(max_new_tokens=1000), deadline=0.1)
            assert event.result.finish_reason == "abort" and 0 < event.result.trace.visible < 200

        run(go())

    def test_closing_ends_what_is_left(self):
        async def go() -> None:
            made, loop = service(tick=0.01)
            events = made.events(jobs(4), GenerateParams(max_new_tokens=1000), blocks=True)
            async with aclosing(events):
                await anext(events)
            assert loop.running == 0 and len(loop.stopping) == 4 and not made.runs

        run(go())


def test_one_failed_sample_leaves_the_others():
    made = run(service(fail=1)[0].collect(jobs(3), GenerateParams(max_new_tokens=6)))
    assert isinstance(made[1].result, RolloutError) and "nan_logits" in str(made[1].result)
    assert made[0].result.finish_reason == made[2].result.finish_reason == "length"
    answer = Answer("r", 1, 3)
    for event in made:
        answer.add(event)
    samples = answer.body()["groups"][0]["samples"]
    assert samples[1]["error"]["message"].startswith("nan_logits") and "output_ids" in samples[2]


def test_a_refused_request_ends_the_group():
    made, loop = service(refuse="too long")
    with pytest.raises(ValueError, match="too long"):
        run(made.collect(jobs(3), GenerateParams()))
    assert loop.running == 0 and not made.runs


def test_parts_that_do_not_meet_are_refused():
    made = run(service()[0].collect(jobs(2), GenerateParams(max_new_tokens=5)))
    with pytest.raises(TraceError, match="does not begin where the first one ends"):
        join_samples(made[0].result, made[1].result)


class TestRequests:
    def jobs(self, **body: Any) -> list[Job]:
        return jobs_of(parse(RolloutRequest, {"prompts": [{"input_ids": [1, 2]}, {"text": "abc"}]} | body), MODEL)[0]

    def test_seeds(self):
        by_step = self.jobs(n=2, seed=5, step=3)
        assert [(j.prompt, j.sample) for j in by_step] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [j.seed for j in by_step] == [sample_seed(5, 3, i, k) for i in range(2) for k in range(2)]
        by_content = self.jobs(n=2, seed=5, step=None)
        assert by_content[1].seed == content_seed(5, [1, 2], 1)
        assert len({j.seed for j in self.jobs(n=8)}) == 16, "drawn by the service"

    def test_an_index_moves_with_its_prompt(self):
        prompts = [{"input_ids": [1], "index": 7}, {"input_ids": [2], "index": 3}]
        assert [j.seed for j in self.jobs(prompts=prompts, seed=1)] == [
            sample_seed(1, 0, 7, 0),
            sample_seed(1, 0, 3, 0),
        ]

    @pytest.mark.parametrize(
        ("body", "field", "message"),
        [
            ({"prompts": [{"input_ids": [MASK]}]}, "prompts.0.input_ids", "mask token 9"),
            ({"prompts": [{"text": "a"}, {"input_ids": [VOCAB]}]}, "prompts.1.input_ids", "outside the vocabulary"),
            ({"sampling_params": {"max_new_tokens": 191}}, "sampling_params.max_new_tokens", "context length 192"),
            ({"sampling_params": {"stop_token_ids": [1, VOCAB]}}, "sampling_params.stop_token_ids.1", "vocabulary"),
            ({"sampling_params": {"json_schema": "{}"}}, "sampling_params", "json_schema is not supported"),
            ({"sampling_params": {"temperature": float("nan")}}, "sampling_params.temperature", "finite"),
            ({"sampling_params": {"top_k": 0}}, "sampling_params.top_k", "use -1"),
            ({"sampling_params": {"frequency_penalty": 1.0}}, "sampling_params.frequency_penalty", "not permitted"),
            ({"prompts": [{"text": "a", "index": 1}, {"text": "b"}]}, "prompts.index", "same index"),
            ({"prompts": [{"text": "a"}] * 2, "n": 1 << 14}, "n", "more than 16384"),
            ({"prompts": [{"resume": [{}]}], "n": 2}, "prompts.0.resume", "1 samples; n is 2"),
            ({"n": 1 << 20}, "n", "less than"),
            ({"prompts": [{"input_ids": [True]}]}, "prompts.0.input_ids.0", "integer"),
            ({"seed": "1"}, "seed", "integer"),
        ],
    )
    def test_errors_name_the_field(self, body, field, message):
        with pytest.raises(RequestError, match=message) as caught:
            self.jobs(**body)
        assert (caught.value.field, caught.value.status) == (field, 400)
        assert caught.value.body()["error"]["field"] == field


@pytest.mark.parametrize("rid", ["plain-1", "\u65e5\u672c", "a\r\nX-Other: b"])
def test_any_name_of_a_stream_comes_back_in_its_header(rid):
    """And is free again afterwards."""
    app = FastAPI()
    app.include_router(rollout_routes(lambda: (service()[0], MODEL)))
    http = TestClient(app)
    body = {"prompts": [{"input_ids": [1, 2, 3]}], "stream": True, "rid": rid}
    for _ in range(2):
        answer = http.post("/rollout/generate", json=body)
        assert answer.status_code == 200 and unquote(answer.headers["X-Rollout-Id"]) == rid
        assert "X-Other" not in answer.headers
    assert http.get("/rollout/info").json()["running"] == 0


class TestResumed:
    """An aborted sample goes on by the rules that it was begun with; a difference is refused by name."""

    BEGUN = GenerateParams(SamplingParams(0.5, 0.9), 40, ignore_eos=True, stop=["xyz"], stop_token_ids=[7])

    @pytest.fixture(scope="class")
    def line(self) -> dict[str, Any]:
        async def go() -> dict[str, Any]:
            made, _ = service(tick=0.01)
            (event,) = await made.collect(jobs(1), self.BEGUN, deadline=0.05)
            return event.result.to_line()

        return run(go())

    def jobs_of(self, line: dict[str, Any], decoder: type | None = None, **changes: Any) -> list[Job]:
        asked = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 40, "ignore_eos": True, "stop": ["xyz"]}
        body = {"prompts": [{"resume": [line]}], "sampling_params": asked | {"stop_token_ids": [7]} | changes}
        return jobs_of(parse(RolloutRequest, body), replace(MODEL, decoder=decoder))[0]

    def test_the_same_rules(self, line):
        assert line["finish_reason"] == "abort" and line["sampling_params"]["stop"] == ["xyz"]
        (job,) = self.jobs_of(line, max_new_tokens=60)
        assert job.resume.stop_rules == self.BEGUN.stop_rules and job.seed == 0

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"temperature": 1}, r"temperature: is 0.5, the request's is 1.0; a response keeps what it began with"),
            ({"top_p": 1}, "top_p: is 0.9"),
            ({"top_k": 4}, "top_k: is -1"),
            ({"min_p": 0.5}, "min_p: is 0.0"),
            ({"ignore_eos": False}, "ignore_eos: is True, the request's is False"),
            ({"stop": []}, r"stop: is \['xyz'\], the request's is \[\]"),
            ({"stop_token_ids": [7, 8]}, r"stop_token_ids: is \[7\], the request's is \[7, 8\]"),
        ],
    )
    def test_a_difference_is_named(self, line, changes, message):
        with pytest.raises(RequestError, match=message) as caught:
            self.jobs_of(line, **changes)
        assert caught.value.field == f"prompts.0.resume.0.sampling_params.{next(iter(changes))}"

    def test_a_line_that_does_not_say(self, line):
        told = {name: value for name, value in line["sampling_params"].items() if name != "ignore_eos"}
        with pytest.raises(RequestError, match="sampling_params: has no ignore_eos, stop and stop_token_ids; send the"):
            self.jobs_of(line | {"sampling_params": told})

    def test_a_greedy_decoder_ignores_the_temperature(self, line):
        """Its samples say 0, whatever the request asks for."""
        cold = line | {"sampling_params": line["sampling_params"] | {"temperature": 0.0}}
        assert len(self.jobs_of(cold, DECODERS["LowConfidence"])) == 1
        with pytest.raises(RequestError, match="temperature: is 0.0, the request's is 0.5"):
            self.jobs_of(cold)

    def test_the_whole_text_ends_at_the_stop(self):
        made, _ = service()
        assert made._text([1, 2, 3, 4], {"type": "stop", "matched": "23"}) == "1"
        assert made._text([1, 2, 3], {"type": "stop", "matched": 3}) == "12"
        assert made._text([1, 2, 3], {"type": "length"}) == "123"


class TestWire:
    def test_both_encodings_return_the_sample(self):
        (event,) = run(service()[0].collect(jobs(1), GenerateParams(max_new_tokens=30)))
        line = event.result.to_line()
        for kind in (wire.JSON, wire.MSGPACK):
            assert wire.decode(wire.encode({"a": [line]}, kind), kind) == {"a": [line]}

    def test_messages_behind_each_other(self):
        stream = wire.msgpack_stream()
        data = wire.encode_msgpack({"logprob": [-0.5]}) + wire.encode_msgpack({"ids": []})
        stream.feed(data[:7])
        stream.feed(data[7:])
        assert list(stream) == [{"logprob": [-0.5]}, {"ids": []}]

    @pytest.mark.parametrize("data", [b"\xc1", b"\xc7\x01\x07\x00", b"\xc7\x01\x01\x09"])
    def test_garbage_is_a_value_error(self, data):
        with pytest.raises(ValueError):
            wire.decode_msgpack(data)

    def test_json_has_no_nan(self):
        with pytest.raises(ValueError):
            wire.encode_json({"x": float("nan")})


def test_finished_is_the_last_event_of_a_sample():
    async def go() -> list[Any]:
        return [e async for e in service()[0].events(jobs(2), GenerateParams(max_new_tokens=9), blocks=True)]

    events = run(go())
    for sample in (0, 1):
        mine = [e for e in events if e.sample == sample]
        assert isinstance(mine[-1], Finished) and all(isinstance(e, Block) for e in mine[:-1])


@pytest.mark.parametrize("name", ["generate", "stream"])
def test_engine_and_client_take_the_same(name):
    assert inspect.signature(getattr(Engine, name)) == inspect.signature(getattr(Client, name))
