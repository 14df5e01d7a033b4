"""What passes between verl and this package: rows of a micro-batch, log-probs in verl's layout, request parameters.

Needs verl, but no engine and no Ray.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dllm.config import ConfigError
from dllm.decoding import SamplingParams, SelectionRule
from dllm.likelihood.exact import pack_traces, scatter_targets
from dllm.trace import PER_TOKEN, RolloutTrace
from tests.support import SMALL_MASK, hand_made_trace, random_prompt, verl_on_cpu


@pytest.fixture(scope="module")
def plugin() -> Iterator[SimpleNamespace]:
    """Modules of the plugin, imported the way verl's workers do on a CPU host."""
    with verl_on_cpu():
        import trainers.engine
        from rollout.verl import agent_loop, checkpoint_engine, client, replica, server

        yield SimpleNamespace(
            engine=trainers.engine,
            agent_loop=agent_loop,
            checkpoint_engine=checkpoint_engine,
            client=client,
            replica=replica,
            server=server,
        )


def nested(rows: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.as_tensor(np.asarray(r), dtype=dtype) for r in rows], layout=torch.jagged)


@pytest.fixture
def batch(plugin) -> tuple[dict[str, torch.Tensor], list]:
    """Two samples of block size 4, and between them a padding row with one response token beside a copied log."""
    traces = [
        hand_made_trace(
            random_prompt(6), random_prompt(6, 1), [1, 0, 0, 2, 1, 0], 4, sampling=SamplingParams(0.5, 0.9)
        ),
        hand_made_trace(random_prompt(3, 2), random_prompt(5, 3), [0, 0, 0, 1, 1], 4),
    ]
    first, second = traces
    first.selection = SelectionRule(0.75, 2)
    second.edits = [(0, 1, 3, 30, int(second.replay_ids[0])), (1, 1, 5, 31, int(second.replay_ids[2]))]
    prompts = [first.prompt_ids, [7, 8], second.prompt_ids]
    responses = [first.replay_ids, [9], second.replay_ids]
    columns = [plugin.agent_loop.replay_columns(trace.to_line()) for trace in (first, first, second)]
    rows = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested([[*p, *r] for p, r in zip(prompts, responses, strict=True)]),
    } | {name: nested([row[name] for row in columns], columns[0][name].dtype) for name in columns[0]}
    return rows, traces


def test_rows_become_traces_and_padding_none(plugin, batch):
    rows, traces = batch
    made = plugin.engine.replay_rows(rows, 4)
    assert made[1] is None
    for got, expected in zip((made[0], made[2]), traces, strict=True):
        assert np.array_equal(got.prompt_ids, expected.prompt_ids)
        assert np.array_equal(got.replay_ids, expected.replay_ids)
        assert np.array_equal(got.reveal_step, expected.reveal_step)
        assert (got.sampling.temperature, got.sampling.top_k) == (
            expected.sampling.temperature,
            expected.sampling.top_k,
        )
        assert got.sampling.top_p == pytest.approx(expected.sampling.top_p)
        assert np.array_equal(got.logprob, expected.logprob)
        assert got.selection == expected.selection and got.edits == expected.edits


def test_log_probs_are_shifted_left_by_one(plugin, batch):
    """Response token j of a row with prompt length P lies at index P + j - 1; padding rows are 0."""
    rows, traces = batch
    made = plugin.engine.replay_rows(rows, 4)
    packed = pack_traces([r for r in made if r is not None], SMALL_MASK, "cpu")
    values = -1.0 - torch.arange(len(packed.target_token)).float()
    out = plugin.engine.to_jagged(scatter_targets(packed, values, [6, 5]), made, rows).unbind()
    assert [len(row) for row in out] == [12, 3, 8]
    assert not out[1].any()
    position = {
        (int(s), int(i)): float(v) for s, i, v in zip(packed.target_sample, packed.target_index, values, strict=True)
    }
    for sample, (row, trace) in enumerate(zip((out[0], out[2]), traces, strict=True)):
        start = len(trace.prompt_ids) - 1
        assert not row[:start].any() and row[-1] == 0
        expected = [position[sample, j] for j in range(len(trace.replay_ids))]
        assert row[start : start + len(expected)].tolist() == expected


def test_gradients_pass_through_the_layout(plugin, batch):
    rows, _ = batch
    made = plugin.engine.replay_rows(rows, 4)
    packed = pack_traces([r for r in made if r is not None], SMALL_MASK, "cpu")
    values = torch.randn(len(packed.target_token), requires_grad=True)
    plugin.engine.to_jagged(scatter_targets(packed, values, [6, 5]), made, rows).values().sum().backward()
    assert values.grad.tolist() == [1.0] * len(values)


def test_a_batch_of_padding_keeps_in_step(plugin, batch):
    """Nothing to replay: a dummy forward, and zeros that still depend on it."""
    rows, _ = batch
    only = {name: nested([tensor.unbind()[1]], tensor.dtype) for name, tensor in rows.items()}
    made = plugin.engine.replay_rows(only, 4)
    assert made == [None]
    packed = pack_traces([plugin.engine.dummy_trace(4)], SMALL_MASK, "cpu")
    assert packed.tokens > 0
    values = torch.zeros(len(packed.target_token), requires_grad=True)
    out = plugin.engine.to_jagged(scatter_targets(packed, values, [4]), made, only)
    assert out.unbind()[0].tolist() == [0.0, 0.0, 0.0] and out.requires_grad


@pytest.mark.parametrize(
    ("prompt", "length", "limit"), [(64, 64, 64), (33, 64, 63), (63, 64, 33), (1, 40, 31), (31, 1, 1), (32, 95, 64)]
)
def test_limits_end_on_the_grid(plugin, prompt, length, limit):
    got = plugin.agent_loop.aligned_limit(prompt, length, 32)
    assert got == limit and (prompt + got) % 32 == 0 and got <= length


def test_a_limit_without_room_for_a_block_is_refused(plugin):
    with pytest.raises(
        ValueError, match="data.max_response_length=10 is too small for a prompt of 33 tokens: .* needs 31"
    ):
        plugin.agent_loop.aligned_limit(33, 10, 32)


def test_a_resumed_response_is_one_trajectory(plugin):
    """Parts that end on a block: their edits and choices of positions are those of the whole."""
    from verl.workers.rollout.replica import TokenOutput

    prompt = random_prompt(6)
    whole = hand_made_trace(
        prompt,
        random_prompt(10, 1),
        [1, 0, 0, 2, 1, 0, 1, 0, 1, 0],
        4,
        select_logprobs=[[-1.0, -2.0], [-3.0, -4.0, 0.0], [-5.0, 0.0, 0.0]],
        selection=SelectionRule(0.75, 1),
        steps_per_block=[2, 3, 3],
    )
    whole.edits = [(2, 1, 8, 30, int(whole.replay_ids[2])), (3, 2, 13, 31, int(whole.replay_ids[7]))]
    whole.validate()
    cut = 6

    def part(start: int, end: int, blocks: slice) -> TokenOutput:
        columns = {name: getattr(whole, name)[start:end] for name in ("replay_ids", *PER_TOKEN)}
        inside = range(6 + start, 6 + end)
        trace = replace(
            whole,
            prompt_ids=np.asarray([*prompt, *whole.replay_ids[:start]], np.int32),
            **columns,
            visible=end - start,
            steps_per_block=whole.steps_per_block[blocks],
            weight_versions=whole.weight_versions[blocks],
            select_logprobs=whole.select_logprobs[blocks],
            edits=[edit for edit in whole.edits if edit[2] in inside],
        )
        trace.validate()
        extra = {
            "dllm": trace.to_line() | {"text": ""},
            "global_steps": 0,
            "min_global_steps": 0,
            "max_global_steps": 0,
        }
        return TokenOutput(
            token_ids=trace.replay_ids.tolist(), log_probs=trace.action_logprob.tolist(), extra_fields=extra
        )

    parts = [part(0, cut, slice(0, 2)), part(cut, 10, slice(2, 3))]
    joined = plugin.client.join_parts(parts, prompt, "length")
    trace = RolloutTrace.from_line(joined.extra_fields["dllm"])
    assert trace.edits == whole.edits and trace.selection == whole.selection
    assert trace.select_logprobs == whole.select_logprobs
    np.testing.assert_allclose(joined.log_probs, whole.action_logprob)
    assert "mixed" not in joined.extra_fields["dllm"]


def test_a_response_of_two_versions_is_marked_and_not_trained_on(plugin):
    """A refresh between its parts: each of them is of one policy, the whole is of none."""
    from verl.workers.rollout.replica import TokenOutput

    def part(prompt, tokens, version) -> TokenOutput:
        trace = hand_made_trace(prompt, tokens, [0] * len(tokens), 4, weight_versions=[version])
        line = trace.to_line() | {"text": "", "weight_version_at_admission": version}
        assert "mixed" not in line
        steps = {name: int(version) for name in ("global_steps", "min_global_steps", "max_global_steps")}
        return TokenOutput(token_ids=tokens, log_probs=[-1.0] * len(tokens), extra_fields={"dllm": line, **steps})

    prompt, first, then = [5, 6], [7, 8], [9, 10, 11, 12]
    joined = plugin.client.join_parts([part(prompt, first, "3"), part([*prompt, *first], then, "4")], prompt, "length")
    line = joined.extra_fields["dllm"]
    assert line["mixed"] is True and line["weight_versions"] == ["3", "4"]
    assert (line["weight_version_at_admission"], joined.extra_fields["min_global_steps"]) == ("3", 3)
    mask = plugin.agent_loop.response_mask
    assert mask(line, 6, False) == [0] * 6 and mask(line, 6, True) == [1] * 6
    assert mask({**line, "mixed": False}, 6, False) == [1] * 6


class TestRequests:
    def test_split(self, plugin):
        given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 30, "seed": 7, "logprobs": True}
        sampling, limit, request = plugin.server.split_sampling_params(given | {"repetition_penalty": 1.0})
        assert sampling == SamplingParams(0.5, 0.9, 5) and limit == 30
        assert request == {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.0,
            "max_new_tokens": 30,
            "sampling_seed": 7,
        }

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({}, "sampling parameters lack max_tokens"),
            ({"max_tokens": 5, "repetition_penalty": 1.1}, "repetition_penalty=1.1 is not supported .*; use 1.0"),
            ({"max_tokens": 5, "n": 2}, "sampling parameter 'n' is not supported for block diffusion; remove it"),
        ],
    )
    def test_refusals(self, plugin, given, message):
        with pytest.raises(ConfigError, match=message):
            plugin.server.split_sampling_params(given)


class TestSettings:
    def test_decoder_settings(self, plugin):
        settings = plugin.server.decoder_settings
        assert settings({}) == {
            "algorithm": "SelectThenSample",
            "options": {},
            "routing_every": 0,
            "load_debug_rollouts": None,
            "train_mixed": False,
        }
        with pytest.raises(ConfigError, match="train_mixed='no' is no truth value; use true or false"):
            settings({"sglang_dllm": {"train_mixed": "no"}})
        given = {"sglang_dllm": {"options": {"threshold": 0.5}}}
        assert settings(given) == settings({}) | {"options": {"threshold": 0.5}}
        joint = {"algorithm": "JointThreshold", "options": {"threshold": 0.6}}
        assert settings({"sglang_dllm": joint})["options"] == {"threshold": 0.6, "edit_threshold": 0.9}
        joint["options"]["edit_threshold"] = 0.95
        assert settings({"sglang_dllm": joint})["options"]["edit_threshold"] == 0.95
        with pytest.raises(ConfigError, match=r"has no key 'treshold'; valid keys are \['algorithm', 'load_debug_roll"):
            settings({"sglang_dllm": {"treshold": 0.5}})

    def test_a_rollout_config_that_would_lose_the_log_is_refused(self, plugin):
        manager = "rollout.verl.agent_loop.BlockDiffusionAgentLoopManager"

        class Config(dict):
            calculate_log_probs = True

        good = Config(agent={"agent_loop_manager_class": manager})
        plugin.replica.check_rollout_config(good)
        with pytest.raises(ConfigError, match=f"agent_loop_manager_class=None drops the reveal log .*'{manager}'"):
            plugin.replica.check_rollout_config(Config())
        good.calculate_log_probs = False
        with pytest.raises(ConfigError, match="rollout.calculate_log_probs=False hides .*; set it to True"):
            plugin.replica.check_rollout_config(good)

    def test_it_is_registered_with_verl(self, plugin):
        from verl.workers.engine import EngineRegistry
        from verl.workers.rollout.base import get_rollout_class

        assert get_rollout_class("sglang_dllm", "async").__name__ == "BlockDiffusionAdapter"
        found = EngineRegistry.get_engine_cls("block_diffusion_lm", "fsdp2")
        assert found is plugin.engine.BlockDiffusionFSDPEngine


class TestCheckpointEngine:
    def test_the_first_rank_of_every_replica_receives(self, plugin):
        """Two trainer ranks, two replicas of two ranks each: one sender, receivers 1 and 2."""
        from verl.checkpoint_engine import CheckpointEngineRegistry

        found = CheckpointEngineRegistry.get("weight_sync")
        assert found is plugin.checkpoint_engine.ReceivedWeights
        meet = ("10.0.0.1", 29600)
        senders = [{"meet": meet, "first": True}, {"meet": None, "first": False}]
        replica = [{"meet": None, "first": True}, {"meet": None, "first": False}]
        actor, rollout = found.build_topology(2, 4, [*senders, *replica, *replica])
        assert actor == {"rank": [0, None], "size": [3, 3], "meet": [meet, meet]}
        assert rollout == {"rank": [1, None, 2, None], "size": [3] * 4, "meet": [meet] * 4}

    def test_the_sender_listens_before_it_says_where(self, plugin, monkeypatch):
        """A port that was probed and left again may be somebody else's by then."""
        monkeypatch.setenv("RANK", "0")
        end = plugin.checkpoint_engine.ReceivedWeights(1 << 20, "nowhere", is_master=True, timeout=5)
        meet = end.prepare()["meet"]
        socket.create_connection(meet, 5).close()
        end.init_process_group(0, 2, meet)
        assert end.prepare()["meet"] == meet == (meet[0], end.channel.port)
        assert plugin.checkpoint_engine.ReceivedWeights(1 << 20, "nowhere").prepare() == {"meet": None, "first": True}

    def test_ranks_without_a_channel_take_part_in_gathering_only(self, plugin):
        import asyncio

        end = plugin.checkpoint_engine.ReceivedWeights(1 << 20, "nowhere")
        end.init_process_group(None, 3, ("10.0.0.1", 29600))
        weights = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
        assert asyncio.run(end.send_weights(weights, 1)) == {} and next(weights, None) is None
        assert end.receive_weights(1) is None
