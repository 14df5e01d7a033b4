"""Block-diffusion SFT: geometry of the noise, the loss, batched decoding, and the checkpoint that ships."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from dllm import reference
from dllm.attention import dense_attention
from dllm.config import BlockDiffusionConfig, ConfigError, resolve
from dllm.decoding import SamplingParams, SelectThenSample
from dllm.models.base import init_weights
from dllm.models.checkpoint import load_model
from dllm.models.llada2 import LLaDA2MoeModelLM
from recipes.compose import CHECKPOINT_DIR
from recipes.sft_llada2 import load_settings, main
from tests.support import SMALL_EOS, SMALL_MASK, random_prompt, small_config, small_model
from trainers.generation import generate
from trainers.sft import (
    Example,
    ExpertBalancer,
    NoiseSchedule,
    SFTSettings,
    complete_response,
    learning_rate,
    noisy_sample,
    pack_examples,
    sft_loss,
    train_steps,
)

BLOCK = 8
SHIPPED = CHECKPOINT_DIR / "tiny_llada2"
GEOMETRY = dict(block_size=BLOCK, mask_id=SMALL_MASK, eos_id=SMALL_EOS)
DIFFUSION = BlockDiffusionConfig(BLOCK, SMALL_MASK, (SMALL_EOS,), "LLaDA2MoeModelLM")


def noisy(prompt_len: int, answer_len: int, seed: int = 0, **noise):
    example = Example(random_prompt(prompt_len, seed), random_prompt(answer_len, seed + 1))
    sample, weights = noisy_sample(example, NoiseSchedule(**noise), np.random.default_rng(seed), **GEOMETRY)
    return example, sample, weights


@pytest.mark.parametrize(("prompt_len", "answer_len"), [(3, 2), (8, 7), (8, 8), (7, 1), (13, 20), (16, 1)])
def test_response_ends_with_a_stop_token_on_the_grid(prompt_len, answer_len):
    example = Example([2] * prompt_len, [3] * answer_len)
    response = complete_response(example, BLOCK, SMALL_EOS)
    assert (prompt_len + len(response)) % BLOCK == 0
    assert response[:answer_len] == example.answer
    assert set(response[answer_len:]) == {SMALL_EOS}
    assert 1 <= len(response) - answer_len <= BLOCK


@pytest.mark.parametrize(("prompt_len", "answer_len"), [(3, 2), (8, 8), (13, 20)])
def test_noise_hides_response_positions_only(prompt_len, answer_len):
    example, sample, weights = noisy(prompt_len, answer_len, copies=3)
    ids = np.array(example.prompt + complete_response(example, BLOCK, SMALL_EOS))
    assert len(sample.clean) == len(ids) - BLOCK
    assert len(sample.slices) == 3 * (len(ids) // BLOCK - prompt_len // BLOCK)
    assert len(weights) == sum(len(piece.columns) for piece in sample.slices)
    for piece in sample.slices:
        final = ids[piece.start : piece.start + BLOCK]
        hidden = np.flatnonzero(piece.ids == SMALL_MASK)
        assert len(hidden) and (hidden == piece.columns).all()
        assert (hidden + piece.start >= prompt_len).all()
        assert (np.delete(piece.ids, hidden) == np.delete(final, hidden)).all()
        assert (piece.tokens == final[hidden]).all()


def test_weights_make_the_loss_a_mean_over_response_positions():
    """The expected sum of the weights is 1: a position counts 1 / t with probability t."""
    sums = [sum(noisy(13, 20, seed=s, low=0.3, copies=2)[2]) for s in range(400)]
    assert np.mean(sums) == pytest.approx(1.0, abs=0.03)


def test_noise_level_is_stratified_within_its_range():
    generator = np.random.default_rng(0)
    draws = np.array([NoiseSchedule(low=0.2, high=0.8, copies=3).draw(generator) for _ in range(50)])
    for copy, (low, high) in enumerate([(0.2, 0.4), (0.4, 0.6), (0.6, 0.8)]):
        assert (draws[:, copy] >= low).all() and (draws[:, copy] <= high).all()


def test_sharing_a_prefix_changes_nothing():
    """Loss and gradients of eight examples behind one clean copy equal those with a copy each."""
    prompt = random_prompt(13)
    examples = [Example(prompt[:BLOCK] + random_prompt(5, i), random_prompt(2, i + 50)) for i in range(8)]
    model = small_model()

    def loss_and_gradient(monkey):
        with pytest.MonkeyPatch.context() as patch:
            if monkey:
                patch.setattr("dllm.attention.share_prefixes", list)
            batch, weights = pack_examples(examples, NoiseSchedule(), np.random.default_rng(0), **GEOMETRY)
        model.zero_grad()
        loss = sft_loss(model, batch, weights)
        loss.backward()
        return batch.tokens, loss.item(), model.model.layers[1].attention.dense.weight.grad.clone()

    shared, alone = loss_and_gradient(False), loss_and_gradient(True)
    assert shared[0] < 0.6 * alone[0]
    assert shared[1] == pytest.approx(alone[1], rel=1e-5)
    torch.testing.assert_close(shared[2], alone[2], rtol=1e-4, atol=1e-6)


def test_loss_is_the_weighted_cross_entropy_of_each_state():
    """Against one forward pass per noisy block over the sequence so far."""
    examples = [Example(random_prompt(13, i), random_prompt(9, i + 50)) for i in range(3)]
    model, noise = small_model(), NoiseSchedule(copies=2)
    batch, weights = pack_examples(examples, noise, np.random.default_rng(0), **GEOMETRY)
    generator, expected = np.random.default_rng(0), 0.0
    for example in examples:
        sample, sample_weights = noisy_sample(example, noise, generator, **GEOMETRY)
        remaining = iter(sample_weights)
        ids = np.array(example.prompt + complete_response(example, BLOCK, SMALL_EOS))
        for piece in sample.slices:
            state = torch.from_numpy(np.concatenate([ids[: piece.start], piece.ids]))
            logp = reference.block_logits(model, state, BLOCK).log_softmax(-1)
            for column, token in zip(piece.columns, piece.tokens, strict=True):
                expected -= next(remaining) * float(logp[column, token]) / len(examples)
    assert sft_loss(model, batch, weights).item() == pytest.approx(expected, rel=1e-4)


def test_training_lowers_the_loss_and_teaches_the_answer():
    """A task of a few seconds: repeat the prompt's last token, then stop."""
    examples = [Example([5, 6, 7, token], [token]) for token in range(10, 30)]
    model = LLaDA2MoeModelLM(small_config())
    init_weights(model, 0)
    settings = SFTSettings(batch_size=20, steps=150, learning_rate=3e-3, warmup_steps=10)
    losses = [loss for _, loss in train_steps(model, examples, DIFFUSION, settings, seed=0)]
    assert np.mean(losses[-10:]) < 0.2 * np.mean(losses[:10])
    traces = generate(
        model,
        [example.prompt for example in examples],
        SelectThenSample(SMALL_MASK),
        block_size=BLOCK,
        max_new_tokens=BLOCK,
        eos_ids=(SMALL_EOS,),
        sampling=SamplingParams(temperature=0),
    )
    right = [
        t.replay_ids[: t.visible].tolist() == [e.answer[0], SMALL_EOS] for t, e in zip(traces, examples, strict=True)
    ]
    assert np.mean(right) > 0.8


def test_the_same_seed_trains_the_same_model():
    examples = [Example([5, 6, 7, token], [token]) for token in range(10, 30)]
    settings = SFTSettings(batch_size=6, steps=5, warmup_steps=2)

    def losses(seed):
        return [loss for _, loss in train_steps(small_model(), examples, DIFFUSION, settings, seed)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_learning_rate_rises_and_falls():
    settings = SFTSettings(steps=100, warmup_steps=10, learning_rate=1.0, final_lr_fraction=0.1)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert rates[10] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_expert_biases_move_towards_equal_load():
    model = small_model()
    balancer = ExpertBalancer(model, rate=0.1)
    router = model.model.layers[1].mlp.gate
    before = router.expert_bias.clone()
    loads = {}
    router.register_forward_hook(lambda m, i, out: loads.update(n=torch.bincount(out[0].flatten(), minlength=8)))
    batch, weights = pack_examples(
        [Example(random_prompt(13), random_prompt(9))], NoiseSchedule(), np.random.default_rng(0), **GEOMETRY
    )
    sft_loss(model, batch, weights)
    balancer.step()
    expected = 0.1 * torch.sign(loads["n"].float().mean() - loads["n"])
    torch.testing.assert_close(router.expert_bias - before, expected)
    balancer.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_decoding_equals_the_reference(temperature):
    """Prompts before, on and behind block borders, in one batch, sharing prefixes or not."""
    model = small_model()
    prompts = [random_prompt(n, seed=n) for n in (1, 7, 8, 9, 20)] + [random_prompt(20, seed=20), random_prompt(13, 20)]
    decoder, sampling = SelectThenSample(SMALL_MASK, threshold=0.3), SamplingParams(temperature=temperature)
    common = dict(block_size=BLOCK, max_new_tokens=20, sampling=sampling, eos_ids=(SMALL_EOS,))
    traces = generate(model, prompts, decoder, seeds=list(range(len(prompts))), batch_size=4, **common)
    for seed, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
        expected = reference.decode(model, prompt, decoder, seed=seed, **common)
        trace.validate()
        assert trace.replay_ids.tolist() == expected.replay_ids.tolist()
        assert trace.reveal_step.tolist() == expected.reveal_step.tolist()
        assert (trace.visible, trace.steps_per_block) == (expected.visible, expected.steps_per_block)
        np.testing.assert_allclose(trace.logprob, expected.logprob, atol=1e-4)
        np.testing.assert_allclose(trace.confidence, expected.confidence, atol=1e-4)


def test_shipped_checkpoint_is_small_and_loads():
    size = sum(file.stat().st_size for file in SHIPPED.iterdir())
    assert size <= 4_000_000
    block_diffusion = resolve(SHIPPED)
    assert block_diffusion.block_size == 32
    assert {source.split()[0] for source in block_diffusion.sources.values()} == {"config.json"}
    model = load_model(SHIPPED)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert any(b.abs().max() > 0 for name, b in model.named_buffers() if name.endswith("expert_bias"))
    ids = torch.randint(6, 300, (1, 64), generator=torch.Generator().manual_seed(0))
    batch = reference._clean_batch(ids[0], 32)
    hidden = model(ids, batch.position, dense_attention(batch), lambda hidden, head: head(hidden))
    assert torch.isfinite(hidden).all()


def test_shipped_checkpoint_answers_sums_in_the_right_format():
    """Its failures are wrong numbers, not wrong formats (README.md beside it has the accuracy on all prompts)."""
    from transformers import AutoConfig, AutoTokenizer

    from recipes.tokenizer import prompt_ids
    from trainers.evaluation import evaluate

    config = AutoConfig.from_pretrained(SHIPPED, trust_remote_code=True)
    for key, value in json.loads((SHIPPED / "config.json").read_text()).items():
        if key not in ("architectures", "auto_map", "dtype", "use_cache"):
            assert getattr(config, key) == value, key
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    question = "State the final answer to the following arithmetic problem: {} {} {} ="
    cases = [(a, op, b) for a in range(11, 99, 9) for b in range(13, 99, 17) for op in "+-"]
    rows = [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": question.format(a, op, b)}],
            "reward_model": {"ground_truth": str(a + b if op == "+" else a - b)},
            "extra_info": {},
        }
        for a, op, b in cases
    ]
    result = evaluate(
        load_model(SHIPPED),
        rows,
        [prompt_ids(tokenizer, row["prompt"]) for row in rows],
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        resolve(SHIPPED),
    )
    assert 0.2 < result.accuracy < 0.7
    assert result.malformed < 0.05
    assert result.steps_per_block < 6


def test_config_of_the_recipe_is_typed():
    settings, task, _ = load_settings(["model.shape.layers=2", "sft.noise.copies=3", "task.sft_size=100"])
    assert (settings.model.shape.layers, settings.sft.noise.copies, task.sft_size) == (2, 3, 100)
    for override in ("model.shape.layers=two", "+sft.batchsize=3", "task=nope", "task=countdown"):
        with pytest.raises(ConfigError):
            load_settings([override])


def test_a_short_run_writes_a_checkpoint_that_loads(tmp_path: Path, capsys):
    arguments = [
        "recipe.run=x",
        f"recipe.output_dir={tmp_path}",
        f"recipe.cache_dir={tmp_path}/cache",
        "model.shape.layers=2",
        "model.shape.hidden=32",
        "task.val_size=8",
        "task.sft_size=64",
        "task.train_size=8",
        "sft.steps=4",
        "sft.batch_size=8",
        "evaluation.every=2",
    ]
    assert main(arguments) == 0
    assert "held-out greedy accuracy" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert len(list(islice(load_model(tmp_path / "x" / "model").parameters(), 3))) == 3
    assert main(arguments) == 2
    assert "recipe.run='x' already exists" in capsys.readouterr().err
