"""The actor engine on hand-made batches: verl's FSDP2 engine with every likelihood, in one process without Ray.

Needs verl, but no rollout engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dllm.attention import attention_for
from dllm.config import ConfigError
from dllm.decoding import SamplingParams, make_decoder
from dllm.likelihood import Elbo, Likelihood, OneStep, make_likelihood
from dllm.likelihood.exact import pack_traces, replay_logprobs, target_head
from dllm.likelihood.states import pack_states, token_sums
from dllm.models.checkpoint import load_model
from dllm.reference import decode
from dllm.trace import RolloutTrace
from tests.support import sampling_batch, threads, verl_on_cpu, write_tiny_model
from trainers.flips import MEASURE, NO_FLIPS, recorded_routing

BLOCK = 8


@pytest.fixture(scope="module")
def verl(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """verl's pieces and a process group of one rank."""
    with verl_on_cpu(), threads(1):
        from tensordict import TensorDict
        from verl.trainer.config import CheckpointConfig
        from verl.utils import tensordict_utils
        from verl.workers import config
        from verl.workers.engine import EngineRegistry
        from verl.workers.utils.losses import ppo_loss
        from verl.workers.utils.padding import response_from_nested

        import trainers.engine
        from rollout.verl import agent_loop
        from trainers import losses

        store = tmp_path_factory.mktemp("group") / "store"
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        yield SimpleNamespace(
            TensorDict=TensorDict,
            CheckpointConfig=CheckpointConfig,
            config=config,
            engines=EngineRegistry,
            losses=losses,
            ppo_loss=ppo_loss,
            response_from_nested=response_from_nested,
            tu=tensordict_utils,
            ours=trainers.engine,
            agent_loop=agent_loop,
        )
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("actor")
    write_tiny_model(path, seed=3, head_std=0.3, layers=2, hidden=32, head_dim=16, block_size=BLOCK)
    return path


@pytest.fixture(scope="module")
def model(model_dir):
    return load_model(model_dir, torch.float32).eval()


@pytest.fixture(scope="module")
def mask_id(model_dir) -> int:
    from dllm.config import resolve

    return resolve(model_dir).mask_id


@pytest.fixture(scope="module")
def traces(model, mask_id) -> list[RolloutTrace]:
    """Responses to prompts that end within a block and at its end."""
    decoder = make_decoder("SelectThenSample", mask_id, {"threshold": 0.3})
    prompts = [np.random.default_rng(n).integers(6, 60, n).tolist() for n in (11, 11, 16, 5)]
    with torch.no_grad():
        made = [
            decode(model, prompt, decoder, block_size=BLOCK, max_new_tokens=12, seed=i)
            for i, prompt in enumerate(prompts)
        ]
    assert any(max(t.steps_per_block) > 2 for t in made)
    return made


def make_engine(verl, model_dir, likelihood: dict[str, Any] | None, dtype: str = "fp32", recompute: bool = False):
    override = {"attn_implementation": "sdpa", "model_config": {}}
    if likelihood is not None:
        override["dllm"] = likelihood
    precision = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = verl.engines.new(
        model_type="block_diffusion_lm",
        backend="fsdp2",
        model_config=verl.config.HFModelConfig(
            path=str(model_dir),
            external_lib="trainers.engine",
            use_remove_padding=False,
            enable_gradient_checkpointing=recompute,
            override_config=override,
        ),
        engine_config=verl.config.FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision=precision,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            infer_micro_batch_size_per_gpu=2,
            use_torch_compile=False,
        ),
        optimizer_config=verl.config.FSDPOptimizerConfig(lr=1e-2, weight_decay=0.0, total_training_steps=10),
        checkpoint_config=verl.CheckpointConfig(),
    )
    engine.initialize()
    return engine


@pytest.fixture
def engine(verl, model_dir):
    return partial(make_engine, verl, model_dir)


def nested(rows, dtype=torch.int64):
    return torch.nested.nested_tensor([torch.as_tensor(np.asarray(r), dtype=dtype) for r in rows], layout=torch.jagged)


def replay_fields(verl, traces):
    """What the agent loop adds to a batch."""
    rows = [verl.agent_loop.replay_columns(t.to_line()) for t in traces]
    return {name: nested([row[name] for row in rows], rows[0][name].dtype) for name in rows[0]}


def make_batch(verl, traces, old=None, advantages=(1.0, -1.0, 0.5, -0.5), **more):
    """What verl's trainer hands to a worker, for two micro-batches of two samples."""
    fields = {
        "prompts": nested([t.prompt_ids for t in traces]),
        "responses": nested([t.replay_ids for t in traces]),
        "input_ids": nested([[*t.prompt_ids, *t.replay_ids] for t in traces]),
        "response_mask": nested([[1] * len(t.replay_ids) for t in traces]),
        "loss_mask": nested([[1] * len(t.replay_ids) for t in traces]),
    } | replay_fields(verl, traces)
    if old is not None:
        fields["old_log_probs"] = nested(old, torch.float32)
        fields["advantages"] = nested(
            [[a] * len(t.replay_ids) for a, t in zip(advantages, traces, strict=True)], torch.float32
        )
    fields |= more
    data = verl.TensorDict(fields, batch_size=len(traces))
    verl.tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        global_batch_size=len(traces),
        calculate_entropy=old is None,
    )
    return data


def log_probs(verl, engine, traces):
    """Old log-probs as the trainer stores them, and the other outputs, one list per sample."""
    data = make_batch(verl, traces)
    with engine.eval_mode(disable_auto_offload=True):
        output = engine.infer_batch(data)["model_output"]
    mask = nested([[1] * len(t.replay_ids) for t in traces])
    return {name: list(verl.response_from_nested(value, mask).unbind()) for name, value in output.items()}


def actor(verl, loss_mode):
    return verl.config.FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_mini_batch_size=2,
        ppo_micro_batch_size_per_gpu=2,
        loss_scale_factor=16,
        policy_loss=verl.config.PolicyLossConfig(loss_mode=loss_mode),
        optim=verl.config.FSDPOptimizerConfig(lr=1e-2),
    )


def gradients(engine):
    return {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters() if p.grad is not None}


def backward(verl, engine, data, loss_mode):
    """Loss over both micro-batches, metrics and gradients of an update, without the optimizer's step."""
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        loss = partial(verl.ppo_loss, config=actor(verl, loss_mode))
        output = engine.forward_backward_batch(data, loss, forward_only=False)
        grads = gradients(engine)
        engine.optimizer_zero_grad()
    return sum(output["loss"]), output["metrics"], grads


def library_values(model, likelihood: Likelihood, trace, mask_id):
    """The same numbers without verl."""
    batch, weights = pack_states([likelihood.states(trace, mask_id)], BLOCK, "cpu")
    head = target_head(batch, sampling_batch(SamplingParams()), mask_id)
    values = model(batch.input_ids, batch.position, attention_for(batch), head)
    return token_sums(batch, weights * values.logprob, [len(trace.replay_ids)])[0]


LIKELIHOODS = {
    "exact": {"likelihood": "exact"},
    "elbo": {"likelihood": "elbo", "likelihood_options": {"samples": 3}},
    "elbo-coupled": {"likelihood": "elbo", "likelihood_options": {"samples": 1, "noise": "coupled"}},
    "one_step": {"likelihood": "one_step", "likelihood_options": {"prompt_mask": 0.15}},
    "coupled": {"likelihood": "coupled"},
}


@pytest.mark.parametrize("given", LIKELIHOODS.values(), ids=LIKELIHOODS)
def test_log_probs_are_those_of_the_likelihood(verl, engine, model, mask_id, traces, given):
    made = log_probs(verl, engine(given), traces)
    likelihood = make_likelihood(given["likelihood"], given.get("likelihood_options"))
    for trace, got in zip(traces, made["log_probs"], strict=True):
        with torch.no_grad():
            expected = library_values(model, likelihood, trace, mask_id)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    assert made.keys() == {"log_probs", "entropy", "router_tie"}
    for entropy in made["entropy"]:
        assert (entropy >= 0).all() and (entropy > 0).any()


def test_without_a_choice_it_is_the_exact_replay(verl, engine, model, mask_id, traces):
    made = log_probs(verl, engine(None), traces)
    for trace, got in zip(traces, made["log_probs"], strict=True):
        np.testing.assert_allclose(got.numpy(), trace.logprob, atol=2e-5)
        with torch.no_grad():
            (replayed,) = replay_logprobs(model, [trace], mask_id)
        torch.testing.assert_close(got, replayed, atol=1e-5, rtol=0)


def test_bf16_rounds_and_recomputing_changes_nothing(verl, engine, traces):
    """Mixed precision and checkpointed layers, as on a GPU: what is recomputed is what was computed."""
    exact = {"likelihood": "exact"}
    old = [v.numpy() for v in log_probs(verl, engine(exact), traces)["log_probs"]]
    rounded = log_probs(verl, engine(exact, dtype="bf16"), traces)["log_probs"]
    gap = np.concatenate([np.abs(v.numpy() - o) for v, o in zip(rounded, old, strict=True)])
    assert 1e-5 < gap.mean() < 0.05
    batch = make_batch(verl, traces, old)
    kept, again = (
        backward(verl, engine(exact, dtype="bf16", recompute=recompute), batch, "dapo_constant")[2]
        for recompute in (False, True)
    )
    assert kept.keys() == again.keys()
    for name, grad in kept.items():
        torch.testing.assert_close(again[name], grad, atol=1e-6, rtol=1e-3)


def test_an_unknown_likelihood_is_refused(verl, engine, traces):
    with pytest.raises(ConfigError, match="dllm.likelihood='guess' does not exist; use one of"):
        log_probs(verl, engine({"likelihood": "guess"}), traces)


def test_the_choice_stays_out_of_the_models_config(verl, engine):
    config = engine(LIKELIHOODS["elbo"]).module.config
    assert not hasattr(config, "dllm") and not hasattr(config, "model_config")


PAIRS = [
    ("exact", "dapo_constant"),
    ("exact", "step_ratio"),
    ("exact", "gspo"),
    ("exact", "cispo"),
    ("elbo", "dapo_constant"),
    ("elbo", "ebpo"),
    ("elbo", "espo"),
    ("elbo", "spg"),
    ("one_step", "dapo_constant"),
    ("coupled", "dapo_constant"),
]


@pytest.mark.parametrize(("name", "loss_mode"), PAIRS)
def test_an_update_lifts_what_was_good(verl, engine, traces, name, loss_mode):
    """Masks are shared between old and new: at the first update every ratio is 1, and a step raises the values of
    good responses relative to bad ones."""
    actor_engine = engine(LIKELIHOODS[name])
    old = [v.numpy() for v in log_probs(verl, actor_engine, traces)["log_probs"]]
    _, metrics, grads = backward(verl, actor_engine, make_batch(verl, traces, old), loss_mode)
    assert metrics["actor/ppo_kl"].aggregate() == pytest.approx(0, abs=1e-5)
    assert grads and all(g.isfinite().all() for g in grads.values())
    with actor_engine.train_mode(disable_auto_offload=True):
        loss = partial(verl.ppo_loss, config=actor(verl, loss_mode))
        for _ in range(2):
            actor_engine.train_batch(make_batch(verl, traces, old), loss_function=loss)
    new = [v.numpy() for v in log_probs(verl, actor_engine, traces)["log_probs"]]
    gains = [float((after - before).sum()) for before, after in zip(old, new, strict=True)]
    assert gains[0] + 0.5 * gains[2] > gains[1] + 0.5 * gains[3]


@pytest.mark.parametrize("name", ["elbo", "one_step"])
def test_the_gradient_on_policy_is_that_of_the_value(verl, engine, model, mask_id, traces, name):
    """sum of A * value / (samples * loss_scale_factor), differentiated without verl."""
    actor_engine = engine(LIKELIHOODS[name])
    old = [v.numpy() for v in log_probs(verl, actor_engine, traces)["log_probs"]]
    _, _, grads = backward(verl, actor_engine, make_batch(verl, traces, old), "dapo_constant")
    given = LIKELIHOODS[name]
    likelihood = make_likelihood(given["likelihood"], given.get("likelihood_options"))
    assert isinstance(likelihood, (Elbo, OneStep))
    model.zero_grad()
    for advantage, trace in zip((1.0, -1.0, 0.5, -0.5), traces, strict=True):
        (-advantage * library_values(model, likelihood, trace, mask_id).sum() / (4 * 16)).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert grads.keys() == expected.keys()
    for name_, grad in expected.items():
        torch.testing.assert_close(grads[name_], grad, atol=1e-5, rtol=1e-3)


def test_spg_pushes_the_upper_bound_down(verl, engine, traces):
    """With a negative advantage alone, SPG's loss is not the one of the lower bound."""
    actor_engine = engine(LIKELIHOODS["elbo"])
    old = [v.numpy() for v in log_probs(verl, actor_engine, traces)["log_probs"]]
    losses = {}
    for sign in (1.0, -1.0):
        data = make_batch(verl, traces, old, advantages=(sign,) * 4)
        losses[sign] = backward(verl, actor_engine, data, "spg")[0]
    lower = sum(float(v.sum()) for v in old) / (4 * 16)
    assert losses[1.0] == pytest.approx(-lower, rel=1e-4)
    assert losses[-1.0] > lower + 1e-3


KEEP = {"likelihood": "exact", "likelihood_options": {"keep": 0.5, "keep_floor": 0.2}}


class TestSubSampledStates:
    def old(self, verl, engine, traces):
        return [v.numpy() for v in log_probs(verl, engine, traces)["log_probs"]]

    def test_old_log_probs_are_complete(self, verl, engine, traces):
        complete, sampled = (self.old(verl, engine(given), traces) for given in (None, KEEP))
        for left, right in zip(complete, sampled, strict=True):
            np.testing.assert_array_equal(left, right)

    def test_an_update_is_weighted(self, verl, engine, traces, monkeypatch):
        """The gradient is the full one with every token of a kept state weighted by 1 / pi."""
        sampled, full = engine(KEEP), engine(None)
        old = self.old(verl, full, traces)
        weights = []
        original = verl.ours.subsample

        def recorded(*arguments):
            states, weight = original(*arguments)
            weights.append(weight)
            return states, weight

        monkeypatch.setattr(verl.ours, "subsample", recorded)
        _, metrics, got = backward(verl, sampled, make_batch(verl, traces, old), "dapo_constant")
        assert metrics["actor/ppo_kl"].aggregate() == pytest.approx(0, abs=1e-5)
        assert any((w == 0).any() for w in weights) and any((w > 1).any() for w in weights)
        given = {"rollout_is_weights": nested(weights, torch.float32)}
        _, _, expected = backward(verl, full, make_batch(verl, traces, old, **given), "dapo_constant")
        for name, grad in expected.items():
            torch.testing.assert_close(got[name], grad, atol=1e-5, rtol=1e-3)

    def test_weights_of_the_rollout_correction_are_kept(self, verl, engine, traces):
        sampled = engine(KEEP)
        old = self.old(verl, sampled, traces)
        plain = backward(verl, sampled, make_batch(verl, traces, old), "dapo_constant")[2]
        doubled = nested([[2.0] * len(o) for o in old], torch.float32)
        twice = backward(verl, sampled, make_batch(verl, traces, old, rollout_is_weights=doubled), "dapo_constant")[2]
        for name, grad in plain.items():
            torch.testing.assert_close(twice[name], 2 * grad, atol=1e-6, rtol=1e-4)

    def test_sequence_ratios_are_refused(self, verl, engine, traces):
        sampled = engine(KEEP)
        old = self.old(verl, sampled, traces)
        with pytest.raises(ConfigError, match="keep=0.5 sub-samples states, which biases loss_mode=gspo"):
            backward(verl, sampled, make_batch(verl, traces, old), "gspo")


@pytest.mark.parametrize("name", ["exact", "elbo"])
def test_a_padding_row_changes_nothing(verl, engine, traces, name):
    """verl pads with one-token responses that carry the log of a real sample."""
    actor_engine = engine(LIKELIHOODS[name])
    old = [v.numpy() for v in log_probs(verl, actor_engine, traces)["log_probs"]]
    short = [*traces[:3], traces[0]]
    padded = make_batch(verl, short, [*old[:3], old[0]], advantages=(1.0, -1.0, 0.5, 0.0))
    for key in ("prompts", "responses", "input_ids", "response_mask", "loss_mask", "old_log_probs", "advantages"):
        values = list(padded[key].unbind())
        one = {"prompts": [7, 8], "responses": [9], "input_ids": [7, 8, 9], "response_mask": [0], "loss_mask": [0]}
        values[3] = torch.tensor(one.get(key, [0.0]), dtype=values[0].dtype)
        padded[key] = torch.nested.nested_tensor(values, layout=torch.jagged)
    expected = make_batch(verl, [*traces[:3], traces[3]], old, advantages=(1.0, -1.0, 0.5, 0.0))
    _, _, got = backward(verl, actor_engine, padded, "dapo_constant")
    _, _, wanted = backward(verl, actor_engine, expected, "dapo_constant")
    for key, grad in wanted.items():
        torch.testing.assert_close(got[key], grad, atol=1e-5, rtol=1e-3)


DECODERS = {
    "SampleThenSelect": {"threshold": 0.1},
    "SampleThenSelect, several": {"threshold": 0.1, "tokens_per_step": 3},
    "JointThreshold": {"threshold": 0.3, "edit_threshold": 0.15, "max_post_edit_steps": 3},
}


@pytest.mark.parametrize("name", DECODERS)
class TestOtherDecoders:
    """A random choice of positions and edits: the log of the rollout travels with the batch, and token sums are the
    log-probs of trajectories."""

    @pytest.fixture
    def rollouts(self, model, mask_id, name) -> list[RolloutTrace]:
        decoder = make_decoder(name.split(",")[0], mask_id, DECODERS[name])
        prompts = [np.random.default_rng(n).integers(6, 60, n).tolist() for n in (11, 11, 16, 5)]
        made = [decode(model, p, decoder, block_size=BLOCK, max_new_tokens=12, seed=i) for i, p in enumerate(prompts)]
        if name == "JointThreshold":
            assert sum(len(t.edits) for t in made) > 3
        else:
            assert min(float(t.select_logprob.min()) for t in made) < -1
        return made

    def test_log_probs_are_the_engines(self, verl, engine, rollouts):
        made = log_probs(verl, engine(None), rollouts)
        for trace, got in zip(rollouts, made["log_probs"], strict=True):
            np.testing.assert_allclose(got.numpy(), trace.action_logprob, atol=3e-5)
        assert made.keys() == {"log_probs", "entropy", "router_tie"}

    def test_the_gradient_is_that_of_the_trajectory_log_prob(self, verl, engine, model, mask_id, rollouts):
        actor_engine = engine(None)
        old = [t.action_logprob for t in rollouts]
        _, metrics, grads = backward(verl, actor_engine, make_batch(verl, rollouts, old), "dapo_constant")
        assert metrics["actor/ppo_kl"].aggregate() == pytest.approx(0, abs=1e-4)
        model.zero_grad()
        for advantage, values in zip((1.0, -1.0, 0.5, -0.5), replay_logprobs(model, rollouts, mask_id), strict=True):
            (-advantage * values.sum() / (4 * 16)).backward(retain_graph=True)
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        assert grads.keys() == expected.keys()
        for key, grad in expected.items():
            torch.testing.assert_close(grads[key], grad, atol=1e-5, rtol=2e-3)

    def test_step_ratios_and_sub_sampled_states(self, verl, engine, rollouts):
        """The ratio of a step is that of its whole action; a kept state keeps its choice of positions."""
        old = [t.action_logprob for t in rollouts]
        for given, loss_mode in ((None, "step_ratio"), (KEEP, "dapo_constant")):
            actor_engine = engine(given)
            _, metrics, grads = backward(verl, actor_engine, make_batch(verl, rollouts, old), loss_mode)
            assert metrics["actor/ppo_kl"].aggregate() == pytest.approx(0, abs=1e-4)
            assert grads and all(g.isfinite().all() for g in grads.values())


TOLD = {"likelihood": "exact", "algorithm": "SelectThenSample", "options": {"threshold": 0.3}}


class TestMeasuredFlips:
    """Asked for it, the pass for old log-probs says where the trainer would have decided otherwise: 0 where nothing
    was measured, else 1 + flip."""

    def measured(self, verl, engine, traces, states=1000, **more):
        data = make_batch(verl, traces, **more)
        verl.tu.assign_non_tensor(data, **{MEASURE: states})
        with engine.eval_mode(disable_auto_offload=True):
            output = engine.infer_batch(data)["model_output"]
        mask = nested([[1] * len(t.replay_ids) for t in traces])
        return {name: list(verl.response_from_nested(value, mask).unbind()) for name, value in output.items()}

    @pytest.fixture(scope="class")
    def experts(self, model, mask_id, traces) -> list[np.ndarray]:
        """What an engine with the same weights records: int64 [R, routers] of every response."""
        recorded = []
        for trace in traces:
            batch = pack_traces([trace], mask_id, "cpu")
            head = target_head(batch, sampling_batch(SamplingParams()), mask_id)
            with torch.no_grad(), recorded_routing(model, batch) as hashes:
                model(batch.input_ids, batch.position, attention_for(batch), head)
            table = np.zeros((len(trace.replay_ids), len(hashes)), np.int64)
            table[batch.target_index.numpy()] = torch.stack(hashes, 1).numpy()
            recorded.append(table)
        return recorded

    @staticmethod
    def column(verl, traces, tables):
        """The column of the agent loop; None is a response whose experts were not asked for."""
        lines = [
            t.to_line() | ({} if table is None else {"routing": table.tolist()})
            for t, table in zip(traces, tables, strict=True)
        ]
        return nested([verl.agent_loop.replay_columns(line)["dllm_routing"] for line in lines])

    def test_the_same_model_flips_nowhere(self, verl, engine, traces, experts):
        column = self.column(verl, traces, [experts[0], None, experts[2], None])
        made = self.measured(verl, engine(TOLD), traces, dllm_routing=column)
        assert made.keys() == {"log_probs", "entropy", "router_tie", "schedule_flip", "router_flip"}
        for index, (schedule, router) in enumerate(zip(made["schedule_flip"], made["router_flip"], strict=True)):
            assert (schedule == 1).all()
            assert (router == (0 if index % 2 else 1)).all()
        for trace, got in zip(traces, made["log_probs"], strict=True):
            np.testing.assert_allclose(got.numpy(), trace.logprob, atol=2e-5)

    def test_what_differs_is_seen_where_it_differs(self, verl, engine, traces, experts):
        """Another threshold reveals other positions; another expert in one router is a share of one token."""
        changed = [table.copy() for table in experts]
        changed[2][4, 0] += 1
        told = TOLD | {"options": {"threshold": 0.05}}
        made = self.measured(verl, engine(told), traces, dllm_routing=self.column(verl, traces, changed))
        flipped = torch.cat(made["schedule_flip"])
        assert set(flipped.tolist()) == {1.0, 2.0}
        routers = changed[2].shape[1]
        for index, router in enumerate(made["router_flip"]):
            expected = torch.ones_like(router)
            if index == 2:
                expected[4] += 1 / routers
            torch.testing.assert_close(router, expected)

    def test_a_sample_of_the_states(self, verl, engine, traces):
        made = self.measured(verl, engine(TOLD), traces, states=2)
        values = torch.cat(made["schedule_flip"])
        assert 0 < int((values > 0).sum()) < len(values) and not (values > 1).any()
        assert not torch.cat(made["router_flip"]).any(), "no experts were recorded"

    def test_no_states_leaves_the_routers(self, verl, engine, traces, experts):
        made = self.measured(verl, engine(TOLD), traces, states=0, dllm_routing=self.column(verl, traces, experts))
        assert not torch.cat(made["schedule_flip"]).any() and (torch.cat(made["router_flip"]) == 1).all()
        assert "router_flip" not in self.measured(verl, engine(TOLD), traces, states=NO_FLIPS)

    def test_without_a_decoder_or_a_replay_no_schedule_is_measured(self, verl, engine, traces):
        made = self.measured(verl, engine({"likelihood": "exact"}), traces)
        assert not torch.cat(made["schedule_flip"]).any()
        assert "schedule_flip" not in self.measured(verl, engine(LIKELIHOODS["one_step"]), traces)
