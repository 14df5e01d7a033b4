"""Policy losses: each against a case worked out by hand and against finite differences, through verl's own caller."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from dllm.config import ConfigError
from dllm.likelihood import Elbo, Exact, OneStep
from tests.support import verl_on_cpu
from trainers.objective import LOSSES, OWN_LOSSES, check_objective

with verl_on_cpu():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from trainers import losses

LOW, HIGH, LONGEST, SAMPLES = 0.2, 0.28, 10, 4
"""Clip range, ``loss_scale_factor`` and samples of the whole update; a micro-batch holds two of them."""


def actor(loss_mode: str, **changes) -> FSDPActorConfig:
    settings = dict(
        strategy="fsdp2",
        rollout_n=2,
        ppo_mini_batch_size=2,
        ppo_micro_batch_size_per_gpu=2,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        loss_scale_factor=LONGEST,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.1),
        optim=FSDPOptimizerConfig(lr=1e-3),
    )
    return FSDPActorConfig(**(settings | changes))


def jagged(rows, dtype=torch.float64):
    return torch.nested.nested_tensor([torch.as_tensor(r, dtype=dtype) for r in rows], layout=torch.jagged)


class Case:
    """Two responses of 3 and 2 tokens behind prompts of 2 and 1; the second response was worse than the first."""

    prompts, lengths = (2, 1), (3, 2)
    advantage = (1.5, -0.5)
    steps = ((0, 1, 0), (0, 0))

    def __init__(self, new, old=((-1.0, -2.0, -0.5), (-1.0, -3.0)), mask=((1, 1, 1), (1, 1)), weights=None):
        self.new = [torch.tensor(r, dtype=torch.float64, requires_grad=True) for r in new]
        self.old, self.mask, self.weights = old, mask, weights
        self.negative = None

    def layout(self, rows):
        """Per-token rows in verl's layout for log-probs: token j of a response at P + j - 1."""
        rows = [torch.as_tensor(r) for r in rows]
        parts = [
            torch.cat([row.new_zeros(p - 1), row, row.new_zeros(1)]) for p, row in zip(self.prompts, rows, strict=True)
        ]
        offsets = torch.tensor([0, *(p + n for p, n in zip(self.prompts, self.lengths, strict=True))]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)

    def loss(self, loss_mode, **changes):
        """The loss of the micro-batch as a worker computes it, and its metrics."""
        fields = {
            "prompts": jagged([[1] * n for n in self.prompts], torch.int64),
            "responses": jagged([[1] * n for n in self.lengths], torch.int64),
            "response_mask": jagged(self.mask, torch.int64),
            "old_log_probs": jagged(self.old),
            "advantages": jagged([[a] * n for a, n in zip(self.advantage, self.lengths, strict=True)]),
        }
        if self.weights is not None:
            fields["rollout_is_weights"] = jagged(self.weights)
        data = TensorDict(fields, batch_size=2)
        sizes = {"dp_size": 1, "batch_num_tokens": 9, "global_batch_size": SAMPLES}
        for key, value in sizes.items():
            data.set_non_tensor(key, value)
        steps = self.layout([torch.tensor(s) for s in self.steps])
        negative = None if self.negative is None else self.layout(self.negative)
        with losses.loss_inputs(steps, negative, data):
            return ppo_loss(actor(loss_mode, **changes), {"log_probs": self.layout(self.new)}, data)

    def gradient(self, loss_mode, **changes):
        loss, _ = self.loss(loss_mode, **changes)
        return [g.tolist() for g in torch.autograd.grad(loss, self.new)]


NEW = ((-0.9, -2.6, -0.5), (-0.9, -3.05))
"""Log-ratios 0.1, -0.6, 0 and 0.1, -0.05: one ratio below the clip range, where it does not bind for A > 0."""


def finite_differences(case, value, step=1e-6):
    """Central differences of ``value(rows)`` at ``case.new``, for every token."""
    rows = [r.detach().clone() for r in case.new]
    result = []
    for i, row in enumerate(rows):
        grads = []
        for j in range(len(row)):
            ends = []
            for sign in (1, -1):
                moved = [r.clone() for r in rows]
                moved[i][j] += sign * step
                ends.append(float(value(moved)))
            grads.append((ends[0] - ends[1]) / (2 * step))
        result.append(grads)
    return result


def approx(rows):
    return [pytest.approx(r, abs=1e-6) for r in rows]


class TestDapoConstant:
    def test_by_hand(self):
        """(1.5 (e^.1 + e^-.6 + 1) - .5 (e^.1 + e^-.05)) / (4 samples * 10 tokens), with the sign of a loss."""
        loss, metrics = Case(NEW).loss("dapo_constant")
        total = 1.5 * (exp(0.1) + exp(-0.6) + 1) - 0.5 * (exp(0.1) + exp(-0.05))
        assert loss.item() == pytest.approx(-total / 40)
        assert metrics["actor/pg_clipfrac"].aggregate() == 0
        assert metrics["actor/ppo_kl"].aggregate() == pytest.approx((-0.1 + 0.6 + 0 - 0.1 + 0.05) / 5)

    @pytest.mark.parametrize(
        ("row", "ratio", "advantage", "expected"),
        [
            (0, 1.27, 1.5, 1.27),
            (0, 1.4, 1.5, 1.28),
            (0, 0.1, 1.5, 0.1),
            (1, 0.7, -0.5, 0.8),
            (1, 1.4, -0.5, 1.4),
            (1, 50.0, -0.5, 50.0),
        ],
        ids=["inside", "high", "never-low", "low", "never-high", "no-dual-clip"],
    )
    def test_clip(self, row, ratio, advantage, expected):
        """One token off, the others at ratio 1."""
        new = [list(r) for r in Case(NEW).old]
        new[row][0] += log(ratio)
        case = Case(new)
        loss, metrics = case.loss("dapo_constant")
        rest = 1.5 * (3 - (row == 0)) - 0.5 * (2 - (row == 1))
        assert loss.item() == pytest.approx(-(rest + advantage * expected) / 40)
        clipped = expected != ratio
        assert metrics["actor/pg_clipfrac"].aggregate() == pytest.approx(clipped / 5)
        gradient = torch.autograd.grad(loss, case.new)[row][0]
        assert float(gradient) == pytest.approx(0.0 if clipped else -advantage * ratio / 40)

    def test_gradient(self):
        case = Case(NEW)
        got = case.gradient("dapo_constant")
        assert got == approx(
            finite_differences(case, lambda rows: Case([r.tolist() for r in rows]).loss("dapo_constant")[0])
        )

    def test_the_denominator_does_not_depend_on_the_micro_batch(self):
        """verl's own constant mode without ``loss_scale_factor`` divides by the longest response at hand."""
        mine = float(Case(NEW).loss("dapo_constant")[0])
        for changes in ({"loss_agg_mode": "token-mean"}, {"loss_agg_mode": "seq-mean-token-mean"}):
            assert float(Case(NEW).loss("dapo_constant", **changes)[0]) == mine
        unset = dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=None)
        assert float(Case(NEW).loss("vanilla", **unset)[0]) == pytest.approx(mine * LONGEST / 3)
        given = dict(loss_agg_mode="seq-mean-token-sum-norm")
        assert float(Case(NEW).loss("vanilla", **given)[0]) == pytest.approx(mine)

    def test_a_denominator_is_required(self):
        with pytest.raises(ConfigError, match="actor.loss_scale_factor=None .*; set it to data.max_response_length"):
            Case(NEW).loss("dapo_constant", loss_scale_factor=None)

    def test_masked_tokens_do_not_count(self):
        case = Case(NEW, mask=((1, 0, 1), (1, 1)))
        loss, _ = case.loss("dapo_constant")
        total = 1.5 * (exp(0.1) + 1) - 0.5 * (exp(0.1) + exp(-0.05))
        assert loss.item() == pytest.approx(-total / 40)
        assert case.gradient("dapo_constant")[0][1] == 0


class TestTruncatedImportanceSampling:
    def test_weights_of_verls_rollout_correction(self):
        """min(2, old / engine) per token, computed by verl, multiplies the loss of its token."""
        old = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -3.0, 0.0]])
        engine = torch.tensor([[-1.0, -2.5, -2.5], [-0.5, -3.0, 0.0]])
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        made, _, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=old,
            rollout_log_prob=engine,
            response_mask=mask,
            rollout_is="token",
            rollout_is_threshold=2.0,
        )
        weights = made.batch["rollout_is_weights"]
        expected = [1.0, exp(0.5), 2.0], [exp(-0.5), 1.0]
        assert weights[0].tolist() == pytest.approx(expected[0])
        assert weights[1, :2].tolist() == pytest.approx(expected[1])
        case = Case(NEW, weights=[weights[0].tolist(), weights[1, :2].tolist()])
        total = 1.5 * (exp(0.1) + exp(0.5) * exp(-0.6) + 2) - 0.5 * (exp(-0.5) * exp(0.1) + exp(-0.05))
        assert float(case.loss("dapo_constant")[0]) == pytest.approx(-total / 40)

    @pytest.mark.parametrize("loss_mode", ["dapo_constant", "step_ratio", "ebpo", "espo", "spg", "gspo", "cispo"])
    def test_a_weight_of_the_response_is_a_factor(self, loss_mode):
        plain, weighted = Case(NEW), Case(NEW, weights=((2.0,) * 3, (2.0,) * 2))
        for case in (plain, weighted):
            case.negative = case.new
        doubled = [[2 * g for g in row] for row in plain.gradient(loss_mode)]
        assert weighted.gradient(loss_mode) == approx(doubled)

    @pytest.mark.parametrize("loss_mode", [name for name, kind in LOSSES.items() if kind.summable])
    def test_a_token_of_weight_zero_has_no_gradient(self, loss_mode):
        """What sub-sampling relies on: verl's weights multiply the loss of these, token by token."""
        new = ((-0.9, -2.2, -0.5), (-0.9, -3.05))
        case = Case(new, weights=((0.0, 4.0, 0.0), (1.0, 1.0)))
        gradient = case.gradient(loss_mode)
        assert gradient[0][0] == gradient[0][2] == 0
        plain = Case(new).gradient(loss_mode)
        assert gradient[0][1] == pytest.approx(4 * plain[0][1]) and plain[0][1] != 0
        assert gradient[1] == approx([plain[1]])[0]


class TestStepRatio:
    def test_by_hand(self):
        """Steps {0, 2} and {1} of the first response, {0, 1} of the second: ratios e^.1, e^-.6, e^.05."""
        loss, _ = Case(NEW).loss("step_ratio")
        total = 1.5 * (exp(0.1) + exp(-0.6)) - 0.5 * exp(0.05)
        assert loss.item() == pytest.approx(-total / 40)

    def test_the_product_is_clipped(self):
        """Two tokens at e^.15, each inside of the range, whose step is outside of it."""
        new = [list(r) for r in Case(NEW).old]
        new[0][0] += 0.15
        new[0][2] += 0.15
        case = Case(new)
        loss, metrics = case.loss("step_ratio")
        assert loss.item() == pytest.approx(-(1.5 * (1.28 + 1) - 0.5) / 40)
        assert metrics["actor/pg_clipfrac"].aggregate() == pytest.approx(2 / 5)
        assert case.gradient("step_ratio")[0] == pytest.approx([0, -1.5 / 40, 0])
        assert Case(new).loss("dapo_constant")[1]["actor/pg_clipfrac"].aggregate() == 0

    def test_gradient(self):
        case = Case(NEW)
        value = lambda rows: Case([r.tolist() for r in rows]).loss("step_ratio")[0]
        assert case.gradient("step_ratio") == approx(finite_differences(case, value))

    def test_on_policy_it_is_the_token_gradient(self):
        case = Case(Case(NEW).old)
        assert case.gradient("step_ratio") == approx(case.gradient("dapo_constant"))

    def test_it_needs_the_steps(self):
        with pytest.raises(RuntimeError, match="runs within trainers.losses.loss_inputs"):
            losses.step_ratio(*(torch.zeros(1, 2),) * 4, config=actor("step_ratio"))


class TestSequenceRatios:
    def test_ebpo_by_hand(self):
        """Differences add up to -0.5 and 0.05; the mean is over the four responses of the update."""
        loss, _ = Case(NEW).loss("ebpo")
        assert loss.item() == pytest.approx(-(1.5 * exp(-0.5) - 0.5 * exp(0.05)) / 4)

    def test_espo_by_hand(self):
        loss, _ = Case(NEW).loss("espo")
        assert loss.item() == pytest.approx(-(1.5 * exp(-0.5 / 3) - 0.5 * exp(0.05 / 2)) / 4)

    @pytest.mark.parametrize("loss_mode", ["ebpo", "espo"])
    def test_gradient(self, loss_mode):
        case = Case(NEW)
        value = lambda rows: Case([r.tolist() for r in rows]).loss(loss_mode)[0]
        assert case.gradient(loss_mode) == approx(finite_differences(case, value))

    @pytest.mark.parametrize(("loss_mode", "tokens"), [("ebpo", 1), ("espo", 3)])
    def test_clip_stops_a_whole_response(self, loss_mode, tokens):
        new = [list(r) for r in Case(NEW).old]
        new[0][1] += tokens * 0.3
        case = Case(new)
        loss, _ = case.loss(loss_mode)
        assert loss.item() == pytest.approx(-(1.5 * 1.28 - 0.5) / 4)
        assert case.gradient(loss_mode)[0] == [0, 0, 0]

    def test_masked_tokens_do_not_count(self):
        loss, _ = Case(NEW, mask=((1, 0, 1), (1, 1))).loss("espo")
        assert loss.item() == pytest.approx(-(1.5 * exp(0.1 / 2) - 0.5 * exp(0.05 / 2)) / 4)

    def test_a_fully_masked_response_counts_for_nothing(self):
        loss, _ = Case(NEW, mask=((1, 1, 1), (0, 0))).loss("ebpo")
        assert loss.item() == pytest.approx(-1.5 * exp(-0.5) / 4)

    def test_verls_gspo_is_espo_on_exact_log_probs(self):
        """Same value, same gradient, as long as the loss is averaged per response."""
        gspo, espo = Case(NEW), Case(NEW)
        mode = {"loss_agg_mode": "seq-mean-token-mean"}
        assert float(gspo.loss("gspo", **mode)[0]) == pytest.approx(float(espo.loss("espo")[0]))
        assert gspo.gradient("gspo", **mode) == approx(espo.gradient("espo"))
        assert gspo.gradient("gspo", loss_agg_mode="token-mean") != approx(espo.gradient("espo"))


class TestCispo:
    def test_clipped_tokens_keep_their_gradient(self):
        """-clip(r) A log p with the ratio as a constant."""
        new = [list(r) for r in Case(NEW).old]
        new[0][0] += log(2.0)
        case = Case(new)
        loss, _ = case.loss("cispo")
        assert loss.item() == pytest.approx(-(1.5 * (1.28 * new[0][0] - 2.0 - 0.5) - 0.5 * (-1.0 - 3.0)) / 9)
        assert case.gradient("cispo")[0] == pytest.approx([-1.5 * 1.28 / 9, -1.5 / 9, -1.5 / 9])

    def test_gradient(self):
        """Finite differences of the loss with its clipped ratios frozen."""
        case = Case(NEW)
        before = [[exp(n - o) for n, o in zip(*pair, strict=True)] for pair in zip(NEW, case.old, strict=True)]
        frozen = [[min(max(r, 1 - LOW), 1 + HIGH) for r in row] for row in before]

        def value(rows):
            terms = [
                -a * (torch.tensor(f, dtype=torch.float64) * r).sum()
                for a, f, r in zip(case.advantage, frozen, rows, strict=True)
            ]
            return sum(terms) / 9

        assert case.gradient("cispo") == approx(finite_differences(case, value))


class TestSpg:
    def case(self, new=NEW, shift=0.25):
        """Bounds that differ by a constant; the second response has a negative advantage."""
        case = Case(new)
        case.negative = [row + shift for row in case.new]
        return case

    def test_by_hand(self):
        loss, _ = self.case().loss("spg")
        assert loss.item() == pytest.approx(-(1.5 * (-0.9 - 2.6 - 0.5) - 0.5 * (-0.9 - 3.05 + 0.5)) / 40)

    def test_gradient(self):
        case = self.case()
        value = lambda rows: self.case([r.tolist() for r in rows]).loss("spg")[0]
        assert case.gradient("spg") == approx(finite_differences(case, value))

    def test_only_negative_advantages_see_the_upper_bound(self):
        case = Case(NEW)
        case.negative = [3 * row for row in case.new]
        assert case.gradient("spg") == approx([[-1.5 / 40] * 3, [3 * 0.5 / 40] * 2])

    def test_it_needs_the_bound(self):
        with pytest.raises(RuntimeError, match="loss_mode=spg needs the upper bound of dllm.likelihood=elbo"):
            Case(NEW).loss("spg")


class TestObjective:
    def test_the_table_is_verls_registry(self):
        assert set(LOSSES) == set(POLICY_LOSS_REGISTRY)
        assert set(OWN_LOSSES) == {
            name for name, fn in POLICY_LOSS_REGISTRY.items() if fn.__module__ == losses.__name__
        }

    def check(self, name="exact", likelihood=None, loss_mode="dapo_constant", correction=None, **actor_settings):
        made = {"exact": Exact(), "elbo": Elbo(), "one_step": OneStep()}[name]
        given = {"policy_loss": {"loss_mode": loss_mode}, "loss_scale_factor": 8, "entropy_coeff": 0.0}
        check_objective(
            name,
            likelihood or made,
            OmegaConf.create(given | actor_settings),
            correction,
            actor_settings.get("own", False),
        )

    @pytest.mark.parametrize("loss_mode", sorted(LOSSES))
    def test_exact_takes_all_losses_but_one(self, loss_mode):
        if loss_mode == "spg":
            with pytest.raises(ConfigError, match="loss_mode=spg needs dllm.likelihood=elbo, not exact: it mixes"):
                self.check(loss_mode=loss_mode)
        else:
            self.check(loss_mode=loss_mode, correction={"rollout_is": "token", "bypass_mode": True})

    @pytest.mark.parametrize("loss_mode", ["dapo_constant", "ebpo", "espo", "spg", "gspo"])
    def test_elbo(self, loss_mode):
        self.check("elbo", loss_mode=loss_mode, correction={"rollout_is": None, "rollout_is_threshold": 2.0})

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (dict(loss_mode="ppo"), r"policy_loss.loss_mode='ppo' does not exist; use one of \['bypass_mode', "),
            (dict(name="elbo", loss_mode="step_ratio"), "step_ratio needs dllm.likelihood=exact, not elbo: its ratios"),
            (dict(name="one_step", loss_mode="spg"), "loss_mode=spg needs dllm.likelihood=elbo, not one_step"),
            (
                dict(loss_scale_factor=None),
                "loss_scale_factor=None leaves loss_mode=dapo_constant without its constant",
            ),
            (dict(name="elbo", correction={"rollout_is": "token"}), "rollout_correction.rollout_is=token compares"),
            (dict(name="elbo", correction={"rollout_rs": "token_k1"}), "rollout_rs=token_k1 .*; set it to null"),
            (dict(name="elbo", correction={"bypass_mode": True}), "bypass_mode=True .*; set it to false"),
            (dict(likelihood=Exact(0.5), loss_mode="gspo"), "keep=0.5 sub-samples states, which biases loss_mode=gspo"),
            (dict(likelihood=Exact(0.5), loss_mode="espo"), r"set keep to 1 or use one of \['cispo', 'dapo_constant'"),
            (dict(likelihood=Exact(0.5), entropy_coeff=0.01), "entropy_coeff=0.01 adds a term .*; set keep to 1 or"),
            (dict(likelihood=Exact(0.5), use_kl_loss=True), "use_kl_loss=True adds a term .* use_kl_loss to false"),
        ],
    )
    def test_refusals(self, given, message):
        with pytest.raises(ConfigError, match=message) as caught:
            self.check(**given)
        assert len(str(caught.value).splitlines()) == 1

    def test_losses_of_a_third_party(self):
        self.check(loss_mode="theirs", own=True)
        with pytest.raises(ConfigError, match="keep=0.5 sub-samples states, which biases loss_mode=theirs"):
            self.check(loss_mode="theirs", own=True, likelihood=Exact(0.5))

    def test_sub_sampling_goes_with_sums(self):
        for loss_mode in ("dapo_constant", "step_ratio", "vanilla", "cispo"):
            self.check(likelihood=Exact(0.5), loss_mode=loss_mode)
