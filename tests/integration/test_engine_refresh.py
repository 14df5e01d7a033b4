"""Weights refreshed in a running engine: verified against the reference decoder on the old and the new weights.

Also what needs other weights than the checkpoint's: a head that makes the mask token likely, and weights with NaN.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import httpx
import numpy as np
import pytest
import torch

from dllm.decoding import SamplingParams
from dllm.decoding.sampling import sampling_logprobs
from dllm.likelihood.exact import pack_traces, replay_logprobs
from dllm.replay import build_slices
from tests.integration.conftest import Request
from tests.integration.oracle import TOLERANCE, TinyModel, assert_same
from tests.integration.refresh import BUCKET, GREEDY, greedy
from tests.support import ROOT, sampling_batch
from weight_sync.control import EngineControl
from weight_sync.layout import CheckpointLayout, LayoutError
from weight_sync.messages import ResendError, Torn, WeightSyncError
from weight_sync.publisher import WeightPublisher


def test_tokens_follow_the_weights(server, tiny, mask_likely, sync):
    prompts = [tiny.case(n, GREEDY, also=[mask_likely]).prompt for n in (5, 33, 64)]
    expected = {m.path: [m.reference(p, sampling=GREEDY) for p in prompts] for m in (tiny, mask_likely)}
    assert all(
        not np.array_equal(old.replay_ids, new.replay_ids)
        for old, new in zip(expected[tiny.path], expected[mask_likely.path], strict=True)
    )
    for model, version in ((mask_likely, "41"), (tiny, "42"), (mask_likely, "43")):
        report = sync.publish(model, version)
        assert report.tensors == len(sync.layout.wire) and report.buckets > 3
        assert report.nbytes >= sync.layout.nbytes
        for trace, reference in zip(greedy(server, prompts), expected[model.path], strict=True):
            assert_same(trace, reference)
            assert trace.weight_versions == [version] * len(trace.steps_per_block)
    answer = server.answers([Request(prompts[0], GREEDY)])[0]
    assert answer["meta_info"]["weight_version"] == "43", "SGLang's own label agrees"


def test_the_kv_cache_of_old_weights_is_dropped(server, tiny, mask_likely, sync):
    """A prompt that sits in the radix cache gives the new model's tokens."""
    case = mask_likely.case(70, GREEDY, also=[tiny])
    server.answers([Request(case.prompt, GREEDY)])
    assert server.answers([Request(case.prompt, GREEDY)])[0]["meta_info"]["cached_tokens"] == 64
    sync.publish(mask_likely, "50")
    answer = server.answers([Request(case.prompt, GREEDY)])[0]
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == case.trace.replay_ids[: case.trace.visible].tolist()


@pytest.mark.parametrize(
    ("version", "name", "change"),
    [("60", "model.layers.1.mlp.gate.expert_bias", 5.0), ("61", "model.layers.2.mlp.experts.down_proj", 0.5)],
)
def test_a_single_changed_tensor_arrives(server, tiny, sync, version, name, change):
    """Buffers travel as well as parameters: each perturbation changes what is decoded, as in the reference."""
    changed = TinyModel(tiny.path, deepcopy(tiny.model), tiny.config)
    changed.model.state_dict()[name][0] += change
    case = changed.case(33, GREEDY)
    assert not np.array_equal(tiny.reference(case.prompt, sampling=GREEDY).replay_ids, case.trace.replay_ids)
    sync.publish(changed, version)
    assert_same(greedy(server, [case.prompt])[0], case.trace)


def test_a_missing_tensor_is_an_error_on_both_sides(server, tiny, mask_likely, sync):
    """The publisher refuses to complete the update; an engine that misses a tensor anyway says so."""
    state = mask_likely.model.state_dict()
    without = [(n, t) for n, t in state.items() if not n.endswith("expert_bias")]
    with pytest.raises(LayoutError, match="expert_bias"):
        sync.publisher.publish(without, "70")
    assert set(greedy(server, [tiny.prompt(5)])[0].weight_versions) == {"default"}, "the engine heard nothing of it"
    with pytest.raises(LayoutError, match="expert_bias"):
        sync.publisher.publish(iter(without), "70")
    assert sync.publisher.status()[server.url].closed

    class Careless(CheckpointLayout):
        def normalise(self, named, **options):
            return ((n, t) for n, t in super().normalise(named, **options) if n != "model.norm.weight")

    layout = Careless(mask_likely.model, torch.float32)
    careless = WeightPublisher(layout, sync.publisher.transport, [sync.control], BUCKET)
    with pytest.raises(
        WeightSyncError, match="refused .*: rank 0: ValueError: 1 tensors never arrived, e.g. 'model.norm.weight'"
    ):
        careless.publish(state.items(), "71")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(greedy, server, [tiny.prompt(5)])
        time.sleep(1)
        assert not waiting.done(), "an engine with a mixture serves nothing"
        # Whoever asks: a trainer that has just begun and knows nothing, or a person.
        with pytest.raises(Torn, match=r"\(409\): .*holds a mixture of two versions of the weights \(torn:\w+->71\)"):
            EngineControl(server.url).resume()
        assert server.client.post("/continue_generation", json={}).status_code == 409 and not waiting.done()
        sync.publish(mask_likely, "72")
        assert set(waiting.result()[0].weight_versions) == {"72"}
    case = mask_likely.case(5, GREEDY)
    assert_same(greedy(server, [case.prompt])[0], case.trace)


def test_a_tensor_of_the_wrong_shape_is_refused_by_the_engine(server, tiny, sync):
    """The scheduler survives, says what was wrong, and takes the next update."""

    class Wrong(CheckpointLayout):
        def normalise(self, named, **options):
            for name, tensor in super().normalise(named, **options):
                yield name, tensor.pieces[0][1][:-1] if name == "lm_head.weight" else tensor

    wrong = WeightPublisher(Wrong(tiny.model, torch.float32), sync.publisher.transport, [sync.control], BUCKET)
    with pytest.raises(WeightSyncError, match="refused /update_weights_from_tensor .*rank 0: "):
        wrong.publish(tiny.model.state_dict().items(), "73")
    sync.publish(tiny, "74")
    case = tiny.case(5, GREEDY)
    assert_same(greedy(server, [case.prompt])[0], case.trace)


def test_a_message_that_is_none_is_refused_by_the_engine(server, tiny, mask_likely, sync):
    """In the middle of an update: the scheduler survives, and the update goes on."""
    bytes_of = lambda value: base64.b64encode(pickle.dumps(value)).decode()
    empty = torch.empty(0, dtype=torch.uint8)
    nonsense = {
        "no pickle": "AAAA",
        "half a pickle": bytes_of([("{}", empty)])[:40],
        "another object": bytes_of(7),
        "nothing": bytes_of([]),
        "no header": bytes_of([(3, empty)]),
        "no JSON": bytes_of([("bucket 3", empty)]),
        "another header": bytes_of([('{"kind": "else"}', empty)]),
        "a header that lacks something": bytes_of([('{"kind": "bucket"}', empty)]),
        "a header with something more": bytes_of([('{"kind": "read", "x": 1}', empty)]),
    }

    class Intruder(EngineControl):
        def send_bucket(self, spec, data=None):
            if spec.index == 2:
                for name, payload in nonsense.items():
                    with pytest.raises(ResendError, match=r"\(400\): resend: rank 0: the message cannot be read: "):
                        pytest.fail(f"{name} was taken: {self.deliver([payload])}")
                with pytest.raises(WeightSyncError, match="refused /update_weights_from_tensor"):
                    self.deliver(["no base64"])
            return super().send_bucket(spec, data)

    control = Intruder(server.url)
    publisher = WeightPublisher(sync.layout, sync.publisher.transport, [control], BUCKET)
    report = publisher.publish(mask_likely.model.state_dict(), "76")
    assert report.resent == 0 and report.checksum == control.checksum()
    case = mask_likely.case(5, GREEDY)
    assert_same(greedy(server, [case.prompt])[0], case.trace)


def test_a_likely_mask_token_is_never_emitted_nor_counted(server, tiny, mask_likely, sync):
    """With the mask token in the distribution, the log-probs would be off by more than 1e-3."""
    sync.publish(mask_likely, "80")
    mask_id = mask_likely.config.mask_id
    cases = [mask_likely.case(n) for n in (1, 17, 33, 50, 65)] + [mask_likely.case(n, GREEDY) for n in (9, 40)]
    traces = [s.trace for s in server.generate([Request.of(case) for case in cases])]
    for trace, case in zip(traces, cases, strict=True):
        assert not (trace.replay_ids == mask_id).any()
        assert_same(trace, case.trace)

    sampled = traces[:-2]
    excluded = replay_logprobs(mask_likely.model, sampled, mask_id)
    wrong = []
    for trace, right in zip(sampled, excluded, strict=True):
        np.testing.assert_allclose(right.detach().numpy(), trace.logprob, atol=TOLERANCE)
        wrong.append(np.abs(with_mask_token(mask_likely, trace) - trace.logprob))
    difference = np.concatenate(wrong)
    assert difference.max() > 1e-2 and np.mean(difference > 1e-3) > 0.5


def with_mask_token(tiny: TinyModel, trace) -> np.ndarray:
    """Log-probs of the same tokens under a distribution that wrongly includes the mask token."""
    from dllm.attention import dense_attention

    batch = pack_traces([trace], tiny.config.mask_id, "cpu")
    assert build_slices(trace, tiny.config.mask_id).packed_length == batch.tokens
    with torch.no_grad():
        logits = tiny.model(
            batch.input_ids,
            batch.position,
            dense_attention(batch),
            lambda hidden, head: head(hidden[batch.target_row, batch.target_column]),
        )
    logp = sampling_logprobs(logits, sampling_batch(SamplingParams(), len(logits)), mask_id=1 << 30)
    values = logp.gather(-1, batch.target_token[:, None])[:, 0]
    out = np.zeros(len(trace.replay_ids))
    out[batch.target_index.numpy()] = values.numpy()
    return out


def test_nan_weights_fail_the_requests_they_touch(server, tiny, sync):
    """NaN in one token's embedding: a request with that token ends as ``nan_logits``, the others are untouched."""
    poison = 200
    broken = TinyModel(tiny.path, deepcopy(tiny.model), tiny.config)
    with torch.no_grad():
        broken.model.model.word_embeddings.weight[poison] = float("nan")
    healthy = [tiny.case(n, GREEDY, max_new_tokens=20) for n in (10, 20)]
    assert not any(poison in (*c.prompt, *c.trace.replay_ids.tolist()) for c in healthy)
    sync.publish(broken, "90")
    prompts = [healthy[0].prompt, [10, 11, poison, 12], healthy[1].prompt]
    requests = [Request(prompt, GREEDY, max_new_tokens=20) for prompt in prompts]

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            bodies = [{"input_ids": list(r.prompt), "sampling_params": r.sglang()} for r in requests]
            return await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))

    first, failed, last = asyncio.run(together())
    assert failed.status_code == 500
    assert failed.json()["message"].startswith(
        "nan_logits: the model produced NaN or infinite logits; check the weights"
    )
    for answer, case in ((first, healthy[0]), (last, healthy[1])):
        assert answer.status_code == 200
        assert answer.json()["output_ids"] == case.trace.replay_ids[: case.trace.visible].tolist()


def test_the_example_of_the_documentation(server, tiny, sync, capsys):
    """docs/weight_sync.md, "From a training loop", as it stands there."""
    page = (ROOT / "docs" / "weight_sync.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    scope = {"MODEL_PATH": str(tiny.path), "ENGINE_URL": server.url}
    exec(compile(code, "docs/weight_sync.md", "exec"), scope)
    scope["publisher"].close()
    assert capsys.readouterr().out.count("checksum") == 2
    assert scope["report"].checksum == sync.control.checksum()
    assert set(greedy(server, [tiny.prompt(5)])[0].weight_versions) == {"2"}
