"""Log-probs of targets: gradients, chunks, entropy, and which targets depend on a router tie."""

from __future__ import annotations

import pytest
import torch

from dllm.attention import dense_attention
from dllm.decoding import SamplingParams, make_decoder
from dllm.likelihood import exact
from dllm.likelihood.exact import pack_traces, router_tie_targets, target_head
from dllm.reference import decode
from dllm.replay import CLEAN
from tests.support import SMALL_MASK, hand_made_trace, random_prompt, sampling_batch, small_model


@pytest.fixture(scope="module")
def model():
    return small_model(seed=4)


@pytest.fixture(scope="module")
def traces(model):
    decoder = make_decoder("SelectThenSample", SMALL_MASK, {"threshold": 0.1})
    return [decode(model, random_prompt(n, n), decoder, block_size=4, max_new_tokens=10, seed=n) for n in (3, 4, 6)]


def values_of(model, traces, entropy=False):
    batch = pack_traces(traces, SMALL_MASK, "cpu")
    sampling = sampling_batch([t.sampling for t in traces])
    head = target_head(batch, sampling, SMALL_MASK, entropy)
    return model(batch.input_ids, batch.position, dense_attention(batch), head)


def gradients(model, traces, loss):
    model.zero_grad()
    loss(values_of(model, traces, entropy=True)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_chunks_change_neither_values_nor_gradients(model, traces, monkeypatch):
    loss = lambda v: v.logprob.sum() + 0.3 * v.entropy.sum()
    whole, grads = values_of(model, traces, True), gradients(model, traces, loss)
    monkeypatch.setattr(exact, "CHUNK_BYTES", 4 * 40 * 7)
    chunked, chunked_grads = values_of(model, traces, True), gradients(model, traces, loss)
    torch.testing.assert_close(chunked.logprob, whole.logprob)
    torch.testing.assert_close(chunked.entropy, whole.entropy)
    assert grads.keys() == chunked_grads.keys() and len(grads) == len(list(model.parameters()))
    for name in grads:
        torch.testing.assert_close(chunked_grads[name], grads[name], atol=1e-4, rtol=1e-4)


def test_checkpointed_layers_give_the_same_gradients(model, traces):
    loss = lambda v: v.logprob.sum()
    plain = gradients(model, traces, loss)
    model.checkpoint_layers = True
    try:
        recomputed = gradients(model, traces, loss)
    finally:
        model.checkpoint_layers = False
    for name in plain:
        torch.testing.assert_close(recomputed[name], plain[name], atol=1e-5, rtol=1e-4)


def test_gradient_is_that_of_finite_differences(traces):
    """Along a random direction of two matrices; all experts are chosen, because a router's choice has jumps."""
    model = small_model(seed=4, num_experts_per_tok=8, topk_group=4)
    names = ("lm_head.weight", "model.layers.0.attention.query_key_value.weight", "model.layers.1.mlp.gate.weight")
    chosen = {name: dict(model.named_parameters())[name] for name in names}
    grads = gradients(model, traces, lambda v: v.logprob.sum())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in chosen.items():
        direction, step, sums = torch.randn(parameter.shape, generator=generator), 1e-3, []
        with torch.no_grad():
            for sign in (1, -2, 1):
                parameter += sign * step * direction
                sums.append(float(values_of(model, traces).logprob.double().sum()))
        assert (sums[0] - sums[1]) / (2 * step) == pytest.approx(float((grads[name] * direction).sum()), rel=1e-2), name


def test_entropy_is_that_of_the_sampling_distribution(model, traces):
    decoded = values_of(model, traces, entropy=True)
    assert decoded.entropy.shape == decoded.logprob.shape
    batch = pack_traces(traces, SMALL_MASK, "cpu")
    with torch.no_grad():
        logits = model(
            batch.input_ids,
            batch.position,
            dense_attention(batch),
            lambda hidden, head: head(hidden[batch.target_row, batch.target_column]),
        )
    logits[:, SMALL_MASK] = -torch.inf
    torch.testing.assert_close(
        decoded.entropy.detach(), torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5, rtol=1e-4
    )


def test_greedy_targets_have_log_prob_zero_and_no_gradient(model, traces):
    greedy = [hand_made_trace(t.prompt_ids, t.replay_ids, t.reveal_step, 4, sampling=SamplingParams(0)) for t in traces]
    values = values_of(model, greedy)
    assert not values.logprob.any()
    model.zero_grad()
    values.logprob.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_log_probs_do_not_depend_on_the_rest_of_the_batch(model, traces):
    together = exact.replay_logprobs(model, traces, SMALL_MASK)
    for trace, expected in zip(traces, together, strict=True):
        (alone,) = exact.replay_logprobs(model, [trace], SMALL_MASK)
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)


def test_the_mask_token_is_outside_of_the_support(model, traces):
    """Making the mask token likely everywhere changes no log-prob."""
    before = values_of(model, traces).logprob.detach()
    changed = small_model(seed=4)
    with torch.no_grad():
        changed.lm_head.weight[SMALL_MASK] = 3.0
    torch.testing.assert_close(values_of(changed, traces).logprob.detach(), before)


class TestRouterTies:
    """Two samples of block size 4; every token of the packed batch has a gap."""

    @pytest.fixture
    def batch(self):
        first = hand_made_trace(random_prompt(4), random_prompt(8, 1), [0, 1, 0, 1, 0, 0, 0, 0], 4)
        second = hand_made_trace(random_prompt(6, 2), random_prompt(2, 3), [0, 1], 4)
        return pack_traces([first, second], SMALL_MASK, "cpu")

    def tied(self, batch, row, column):
        gap = torch.ones(batch.doc.shape)
        gap[row, column] = 1e-7
        mask = router_tie_targets(batch, gap.reshape(-1))
        return {(int(s), int(i)) for s, i in zip(batch.target_sample[mask], batch.target_index[mask], strict=True)}

    def test_no_tie(self, batch):
        assert not router_tie_targets(batch, torch.ones(batch.doc.numel())).any()

    def test_a_tie_in_the_prompt_reaches_every_later_block(self, batch):
        assert batch.slice_id[0, 0] == CLEAN
        assert self.tied(batch, 0, 0) == {(0, i) for i in range(8)}

    def test_a_tie_in_a_clean_block_reaches_later_blocks_only(self, batch):
        assert (int(batch.block[0, 5]), int(batch.slice_id[0, 5])) == (1, CLEAN)
        assert self.tied(batch, 0, 5) == {(0, i) for i in range(4, 8)}

    def test_a_tie_in_a_slice_reaches_its_own_targets_only(self, batch):
        """Columns 8 to 11 are step 0 of block 1, which draws tokens 0 and 2."""
        assert self.tied(batch, 0, 9) == {(0, 0), (0, 2)}

    def test_samples_are_independent(self, batch):
        assert self.tied(batch, 1, 0) == {(1, 0), (1, 1)}

    def test_padding_does_not_count(self, batch):
        padding = (batch.doc[1] < 0).nonzero()[0, 0]
        assert self.tied(batch, 1, padding) == set()

    def test_gaps_of_a_forward_pass(self, model, traces):
        """Two equal router rows tie wherever their expert is the last one chosen or the first one left out."""
        batch = pack_traces(traces, SMALL_MASK, "cpu")
        tied = small_model(seed=4)
        gate = tied.model.layers[1].mlp.gate
        with torch.no_grad():
            gate.weight[1], gate.expert_bias[1] = gate.weight[0], gate.expert_bias[0]
        counts = []
        for network in (small_model(seed=4), tied):
            network.record_router_gaps(True)
            with torch.no_grad():
                network(batch.input_ids, batch.position, dense_attention(batch), lambda hidden, head: None)
            counts.append(int((network.router_gap() < 1e-6).sum()))
        assert counts[0] == 0 and counts[1] > 0
