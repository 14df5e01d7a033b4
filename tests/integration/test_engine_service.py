"""``python -m rollout.server``: SGLang's endpoints as they are, the rollout service, and the client."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import openai
import pytest

import rollout
from dllm.noise import sample_seed
from rollout import GenerateParams
from rollout.client import Client
from rollout.generate import load_tokenizer
from rollout.params import content_seed
from rollout.protocol import RequestError
from rollout.records import PER_TOKEN, RolloutSample
from rollout.service import Block, Finished
from tests.integration.oracle import assert_same
from tests.support import child_environment, run_module

LIMIT = 300
LONG = GenerateParams(max_new_tokens=LIMIT, ignore_eos=True)
ROLE = "<role>HUMAN</role>{}<|role_end|><role>ASSISTANT</role>"


@pytest.fixture
def client(server) -> Client:
    return rollout.connect(server.url)


def same(one: RolloutSample, other: RolloutSample) -> None:
    assert_same(one.trace, other.trace)
    assert (one.text, one.finish_reason, one.seed) == (other.text, other.finish_reason, other.seed)


class TestEndpointsOfSGLang:
    def test_two_prompts_streamed_to_curl(self, server):
        body = {
            "text": [ROLE.format("What is 2 + 3?"), ROLE.format("Count to ten.")],
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1024},
        }
        command = ["curl", "-sN", "-X", "POST", f"{server.url}/generate", "-H", "Content-Type: application/json"]
        done = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, timeout=120)
        lines = [line for line in done.stdout.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        last = {}
        for line in lines[:-1]:
            event = json.loads(line.removeprefix("data: "))
            last[event["index"]] = event
        assert sorted(last) == [0, 1]
        for event in last.values():
            assert event["meta_info"]["finish_reason"]["type"] in ("stop", "length")
            assert event["meta_info"]["cached_tokens"] >= 0
            assert len(event["meta_info"]["dllm_logprob"]) == len(event["output_ids"])

    def test_openai_chat_block_by_block(self, server):
        chat = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").chat.completions
        ask: dict = dict(model="tiny", max_tokens=96, temperature=0, extra_body={"ignore_eos": True})
        counts = []
        for question in ("What is 2 + 3?", "Count to ten.", "7 + 8 =", "Say hello.", "A", "Name a colour."):
            ask["messages"] = [{"role": "user", "content": question}]
            whole = chat.create(**ask).choices[0].message.content
            pieces = [c.choices[0].delta.content or "" for c in chat.create(**ask, stream=True) if c.choices]
            assert whole and "".join(pieces) == whole
            counts.append(sum(map(bool, pieces)))
        # A piece per block of 32 tokens; random weights write broken UTF-8, which SGLang holds back until it is whole.
        assert 2 <= max(counts) <= 5

    def test_completions_health_and_metrics(self, server):
        done = server.client.post("/v1/completions", json={"model": "tiny", "prompt": "2 + 3 =", "max_tokens": 8})
        assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] <= 8
        assert server.client.get("/health_generate").status_code == 200
        assert "sglang:" in server.client.get("/metrics").text

    @pytest.mark.parametrize(
        ("path", "body", "field"),
        [
            ("/generate", {"text": "a", "sampling_params": {"json_schema": "{}"}}, "json_schema"),
            ("/generate", {"text": "a", "sampling_params": {"regex": "a+"}}, "regex"),
            ("/generate", {"text": "a", "sampling_params": {"ebnf": "root ::= 'a'"}}, "ebnf"),
            ("/v1/completions", {"model": "m", "prompt": "a", "frequency_penalty": 1.0}, "frequency_penalty"),
            (
                "/v1/chat/completions",
                {
                    "model": "m",
                    "messages": [{"role": "user", "content": "a"}],
                    "response_format": {"type": "json_object"},
                },
                "json_schema",
            ),
            ("/generate", {"text": "a", "stream": True, "sampling_params": {"json_schema": "{}"}}, "json_schema"),
            ("/generate", {"text": "a", "sampling_params": {"sampling_seed": [1]}}, "sampling_seed"),
            ("/generate", {"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
            ("/generate", {"text": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex"),
            ("/generate", {"text": "a", "stream": True, "sampling_params": {"stop_regex": ["a", "("]}}, "stop_regex"),
            ("/v1/completions", {"model": "m", "prompt": "a", "stop_regex": "("}, "stop_regex"),
            ("/generate", {"input_ids": [[8, 9], [8]], "rid": ["a"]}, "field"),
            ("/rollout/generate", {"prompts": [{"text": "a"}], "routing": True}, "--enable-return-routed-experts"),
            ("/generate", {"text": "a", "return_logprob": True}, "return_logprob"),
            ("/generate", {"input_ids": [5, 7], "sampling_params": {}}, "input_ids"),
            ("/rollout/generate", {"prompts": [{"text": "a"}], "sampling_params": {"regex": "a"}}, "regex"),
        ],
    )
    def test_what_blocks_cannot_do_is_refused(self, server, path, body, field):
        if body.get("input_ids") == [5, 7]:
            body = body | {"input_ids": [int(server_mask(server)), 7]}
        answer = server.client.post(path, json=body)
        assert answer.status_code == 400 and field in answer.text


def test_a_pattern_without_end_holds_nobody_up(server):
    """Searching for it takes years; the request ends as refused, and the engine decodes on."""
    params = {"stop_regex": r"(.|.|\s)*Z{3}Q", "max_new_tokens": 64, "ignore_eos": True}
    answer = server.client.post("/generate", json={"input_ids": [8, 9, 10], "sampling_params": params}, timeout=60)
    assert answer.status_code == 400 and "sampling_params.stop_regex: searching the response took longer" in answer.text
    good = {"stop_regex": "[0-9]", "max_new_tokens": 32}
    assert server.client.post("/generate", json={"input_ids": [8, 9], "sampling_params": good}).status_code == 200


def server_mask(server) -> int:
    return server.client.get("/rollout/info").json()["mask_id"]


class TestGroups:
    def test_samples_are_those_of_single_requests(self, server, client, tiny):
        """Seeds by (step, prompt, sample), and the tokens that SGLang's own endpoint gives for them."""
        prompts = [tiny.prompt(9), tiny.prompt(40)]
        groups = client.generate(prompts, GenerateParams(max_new_tokens=40), n=2, seed=11, step=3)
        seeds = set()
        for i, group in enumerate(groups):
            for j, sample in enumerate(group):
                assert sample.seed == sample_seed(11, 3, i, j)
                seeds.add(sample.seed)
                assert_same(sample.trace, server.one(prompts[i], seed=sample.seed, max_new_tokens=40).trace)
                assert sample.version_at_admission == sample.version_at_completion == "default"
                assert set(sample.trace.weight_versions) == {"default"}
        assert len(seeds) == 4

    def test_without_a_step_the_prompt_decides(self, client, tiny):
        prompt = tiny.prompt(9)
        ((one, two),) = client.generate([prompt], GenerateParams(max_new_tokens=20), n=2, seed=4)
        assert (one.seed, two.seed) == (content_seed(4, prompt, 0), content_seed(4, prompt, 1))
        moved = client.generate([tiny.prompt(33), prompt], GenerateParams(max_new_tokens=20), n=2, seed=4)[1]
        same(moved[0], one)
        same(moved[1], two)

    def test_json_and_msgpack_say_the_same(self, server, client, tiny):
        body = {"prompts": [{"input_ids": tiny.prompt(12)}], "seed": 1, "sampling_params": {"max_new_tokens": 40}}
        answer = server.client.post("/rollout/generate", json=body).json()
        assert list(answer["groups"][0]) == ["samples"]
        line = answer["groups"][0]["samples"][0]
        sample = client.generate([tiny.prompt(12)], GenerateParams(max_new_tokens=40), seed=1, step=0)[0][0]
        same(RolloutSample.from_line(line), sample)
        assert set(line) >= {"input_ids", "output_ids", "tail", "text", "finish_reason", "weight_versions", *PER_TOKEN}

    def test_text_and_messages(self, client, tiny):
        text, chat = client.generate(["2 + 3 =", [{"role": "user", "content": "2 + 3 ="}]], GenerateParams(), seed=0)
        assert 0 < text[0].trace.prompt_len < chat[0].trace.prompt_len

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ([], "body"),
            ({}, "prompts"),
            ({"prompts": [{}]}, "prompts.0"),
            ({"prompts": [{"input_ids": []}]}, "prompts.0.input_ids"),
            ({"prompts": [{"input_ids": [10**6]}]}, "prompts.0.input_ids"),
            ({"prompts": [{"input_ids": ["a"]}]}, "prompts.0.input_ids.0"),
            ({"prompts": [{"text": "a", "input_ids": [7]}]}, "prompts.0"),
            ({"prompts": [{"text": "a"}], "n": 0}, "n"),
            ({"prompts": [{"text": "a"}], "temperature": 1}, "temperature"),
            ({"prompts": [{"text": "a"}], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
            (
                {"prompts": [{"text": "a"}], "sampling_params": {"max_new_tokens": 10**6}},
                "sampling_params.max_new_tokens",
            ),
            ({"prompts": [{"text": "a"}], "deadline_s": -1}, "deadline_s"),
            ({"prompts": [{"resume": [{"input_ids": [7]}]}]}, "prompts.0.resume.0"),
        ],
    )
    def test_the_wrong_field_is_named(self, server, body, field):
        answer = server.client.post("/rollout/generate", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["field"] == field

    def test_a_body_that_is_no_json(self, server):
        for content, kind in ((b"{", "application/json"), (b"\xc1", "application/msgpack")):
            answer = server.client.post("/rollout/generate", content=content, headers={"Content-Type": kind})
            assert answer.status_code == 400 and answer.json()["error"]["field"] == "body"


def joined(parts: list[dict], name: str) -> list:
    return list(itertools.chain.from_iterable(part[name] for part in parts))


class TestStreams:
    def test_blocks_add_up_to_the_sample(self, client, tiny):
        """Incremental and aligned: every field has one entry per new token, and the sums are the unstreamed sample."""
        ask = dict(params=LONG, n=2, seed=7)
        whole = client.generate([tiny.prompt(20)], **ask)[0]
        blocks, finished = [[], []], {}
        for event in client.stream([tiny.prompt(20)], **ask):
            if isinstance(event, Finished):
                finished[event.sample] = event.result
            else:
                assert isinstance(event, Block) and event.sample not in finished
                assert {len(event.fields[name]) for name in PER_TOKEN} == {len(event.fields["output_ids"])}
                assert len(event.fields["steps_per_block"]) == len(event.fields["weight_versions"]) >= 1
                blocks[event.sample].append(event.fields)
        for sample, parts in enumerate(blocks):
            same(finished[sample], whole[sample])
            trace = whole[sample].trace
            assert len(parts) > 5
            assert joined(parts, "output_ids") == trace.replay_ids[: trace.visible].tolist()
            assert joined(parts, "steps_per_block") == trace.steps_per_block
            assert "".join(p["text"] for p in parts) == whole[sample].text
            for name in PER_TOKEN:
                logged = getattr(finished[sample].trace, name)[: trace.visible]
                np.testing.assert_allclose(joined(parts, name), logged, rtol=1e-6)

    def test_server_sent_events(self, server, tiny):
        body = {"prompts": [{"input_ids": tiny.prompt(9)}], "seed": 1, "stream": True}
        answer = server.client.post("/rollout/generate", json=body)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert answer.headers["content-type"].startswith("text/event-stream") and lines[-1] == "[DONE]"
        assert "finished" in json.loads(lines[-2])

    def test_a_client_that_hangs_up_leaves_nothing_behind(self, server, client, tiny):
        events = client.stream([tiny.prompt(20)], LONG, n=4, seed=7, rid="left")
        next(events)
        events.close()
        wait(lambda: client._http.get("/rollout/info").json()["running"] == 0)
        wait(lambda: server.client.get("/server_info").json()["internal_states"][0].get("num_running_reqs", 0) == 0)


def wait(check, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "still so after the time allowed"
        time.sleep(0.1)


class TestAborts:
    def test_an_aborted_group_can_be_resumed(self, server, client, tiny):
        """What an abort leaves ends on the grid with its log; resumed, it is the response that was never aborted."""
        prompt = tiny.prompt(21)
        whole = client.generate([prompt], LONG, n=2, seed=9)[0]
        first: list = []
        thread = threading.Thread(
            target=lambda: first.extend(rollout.connect(server.url).generate([prompt], LONG, n=2, seed=9, rid="g"))
        )
        thread.start()
        wait(lambda: client._http.get("/rollout/info").json()["running"] == 1)
        with pytest.raises(RequestError, match="is running") as refused:
            client.generate([prompt], LONG, rid="g")
        assert refused.value.status == 409 and refused.value.field == "rid"
        time.sleep(0.3)
        aborted = client.abort("g")
        thread.join()
        for left, answered, again in zip(aborted[0], first[0], client.abort("g")[0], strict=True):
            assert left.to_line() == answered.to_line() == again.to_line(), "idempotent"
            assert left.finish_reason == "abort"
            count = len(left.trace.replay_ids)
            assert left.trace.visible == count < LIMIT and (count == 0 or (21 + count) % 32 == 0)
            left.trace.validate()
        assert client.abort("never heard of") == []
        client.generate([tiny.prompt(5)], GenerateParams(max_new_tokens=4), rid="g")
        assert client.abort("g") == [], "another request of that name, which is complete"
        for resumed, unbroken in zip(client.resume(aborted, LONG)[0], whole, strict=True):
            same(resumed, unbroken)
            assert resumed.max_new_tokens == LIMIT

    def test_a_stop_string_across_the_seam(self, client, tiny):
        """It begins before the abort and ends behind it; ids and text end as in the response that was never aborted."""
        prompt, decode = tiny.prompt(21), load_tokenizer(str(tiny.path), False).decode
        # Where the seam lies is a matter of time, and not every text there is new: the first response that has one.
        for seed in range(9, 29):
            (part,) = client.generate([prompt], LONG, seed=seed, deadline=0.2)[0]
            (whole,) = client.generate([prompt], LONG, seed=seed)[0]
            seam, ids = part.trace.visible, whole.trace.replay_ids.tolist()
            assert part.finish_reason == "abort" and seam < LIMIT
            texts = (
                text
                for before in range(1, min(12, seam + 1))
                for after in range(1, 12)
                if "\ufffd" not in (text := decode(ids[seam - before : seam + after]))
                and text not in decode(ids[: seam + after - 1])
                and text not in decode(ids[seam:])
            )
            if (stop := next(texts, None)) is not None:
                break
        assert stop is not None
        params = replace(LONG, stop=[stop])
        (unbroken,) = client.generate([prompt], params, seed=seed)[0]
        assert unbroken.finish_reason == "stop" and seam < unbroken.trace.visible < seam + 12
        (resumed,) = client.resume([[replace(part, stop_rules=params.stop_rules)]], params)[0]
        same(resumed, unbroken)
        assert stop not in resumed.text

    def test_a_deadline_ends_at_a_block(self, client, tiny):
        (sample,) = client.generate([tiny.prompt(21)], LONG, seed=9, deadline=0.3)[0]
        assert sample.finish_reason == "abort"
        assert sample.trace.visible == len(sample.trace.replay_ids) < LIMIT

    def test_a_changed_sample_is_no_resume(self, server, client, tiny):
        (sample,) = client.generate([tiny.prompt(21)], LONG, seed=9, deadline=0.3)[0]
        line = sample.to_line()
        asked = {"max_new_tokens": LIMIT, "ignore_eos": True}
        for change in ({"temperature": 0.5}, {"ignore_eos": False}, {"stop": ["a"]}):
            body = {"prompts": [{"resume": [line]}], "sampling_params": asked | change}
            answer = server.client.post("/rollout/generate", json=body)
            field = f"prompts.0.resume.0.sampling_params.{next(iter(change))}"
            assert answer.status_code == 400 and answer.json()["error"]["field"] == field
        bad = {"block_size": 0, "finish_reason": "zzz", "output_ids": [999999, *line["output_ids"][1:]]}
        for name, value in bad.items():
            body = {"prompts": [{"resume": [line | {name: value}]}], "sampling_params": asked, "stream": True}
            answer = server.client.post("/rollout/generate", json=body)
            assert answer.status_code == 400 and answer.json()["error"]["field"] == "prompts.0.resume.0", name
        line["logprob"] = line["logprob"][:-1]
        answer = server.client.post(
            "/rollout/generate", json={"prompts": [{"resume": [line]}], "sampling_params": asked}
        )
        assert answer.status_code == 400 and answer.json()["error"]["field"] == "prompts.0.resume.0"


class TestStart:
    def test_without_a_decoder_it_is_refused(self, tiny):
        """SGLang's own start, with this package installed, runs the same preflight."""
        done = run_module("sglang.launch_server", "--model-path", tiny.path, "--device", "cpu")
        assert done.returncode != 0
        assert "decode it token by token and return newlines; pass --dllm-algorithm" in done.stderr

    def test_an_open_door_is_refused(self, tiny):
        done = run_module(
            "rollout.server", "--model-path", tiny.path, "--dllm-algorithm", "SelectThenSample", "--device", "cpu",
            "--host", "0.0.0.0",
        )  # fmt: skip
        assert done.returncode == 2 and "pass --admin-api-key KEY or --host 127.0.0.1" in done.stderr

    def test_without_its_plugin_it_is_refused(self, tiny):
        """SGLang only logs a plugin that fails: neither server starts, and both say why."""
        script = (
            "import runpy, sys\n"
            "import rollout.plugin.abort as part\n"
            "def broken(): raise ImportError('no such hook')\n"
            "part.install = broken\n"
            "from rollout.server import main\n"
            "print('rollout.server', main(sys.argv[1:]))\n"
            "runpy.run_module('sglang.launch_server', run_name='__main__')\n"
        )
        flags = ["--model-path", str(tiny.path), "--dllm-algorithm", "SelectThenSample", "--device", "cpu"]
        done = subprocess.run(
            [sys.executable, "-c", script, *flags], env=child_environment(), capture_output=True, text=True, timeout=300
        )
        said = "SGLang's plugin dllm_rollout failed to load: ImportError: no such hook"
        assert "rollout.server 2" in done.stdout and f"error: {said}" in done.stderr
        assert done.returncode != 0 and f"ConfigError: {said}" in done.stderr

    def test_nobody_there(self):
        with pytest.raises(ValueError, match="no rollout server answers at http://127.0.0.1:9"):
            rollout.connect("http://127.0.0.1:9")


def test_importing_it_is_light():
    code = "import rollout, sys; assert not {'torch', 'sglang', 'httpx'} & set(sys.modules), sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], env=child_environment(), timeout=60).returncode == 0
