"""What is refused before a process starts, and which settings are filled in."""

from __future__ import annotations

import json

import pytest

from dllm.config import ConfigError
from dllm.decoding import DECODERS
from rollout import preflight
from rollout.preflight import check_server, choose_max_running_requests, cpu_kv_tokens, read_algorithm_config
from tests.support import DATA, write_json

STOCK_JOINT = "sglang.srt.dllm.algorithm.joint_threshold:JointThreshold"
PUBLISHED = json.loads((DATA / "llada2_mini_config.json").read_text())


@pytest.fixture
def model(tmp_path):
    """Directory of a checkpoint as far as a preflight looks: config.json of LLaDA2.0-mini."""

    def make(**changes):
        write_json(tmp_path / "model" / "config.json", PUBLISHED | changes)
        return str(tmp_path / "model")

    return make


def flags(path, **changes):
    return {"model_path": path, "dllm_algorithm": "SelectThenSample", "device": "cpu"} | changes


def refused(message, *, training=False, **given):
    with pytest.raises(ConfigError, match=message):
        check_server(given, training=training)


class TestRefusals:
    def test_missing_model_directory(self, tmp_path):
        refused(
            r"model path '.*/nowhere' is not a directory; pass a local Hugging Face checkpoint",
            **flags(str(tmp_path / "nowhere")),
        )

    def test_llada2_without_an_algorithm(self, model):
        refused(
            r"dllm_algorithm is not set for LLaDA2MoeModelLM: .* pass --dllm-algorithm \(one of \['EntropyBound', ",
            model_path=model(),
        )

    def test_unknown_architecture(self, model):
        refused(
            r"block_size of architecture 'NewModel' is not named by .*; add 'block_size' to config.json",
            **flags(model(architectures=["NewModel"])),
        )

    def test_architecture_that_cannot_be_trained(self, model):
        path = model(architectures=["NewModel"], block_size=4, mask_token_id=5, eos_token_id=6)
        refused(
            r"architecture 'NewModel' of .* cannot be trained; use one of \['LLaDA2MoeModelLM', 'SDARForCausalLM', ",
            training=True,
            **flags(path),
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"vocab_size": 100}, r"mask_id of architecture .* is not named by .*; add 'mask_token_id' to config.json"),
            ({"mask_token_id": 200000}, r"mask_id=200000 .* outside the vocabulary of 157184; add the right"),
            ({"block_size": -4}, r"block_size=-4 \(from config.json block_size\) is not a positive integer; use"),
        ],
    )
    def test_block_size_or_mask_id_that_cannot_be_resolved(self, model, changes, message):
        refused(message, **flags(model(**changes)))

    def test_unknown_algorithm(self, model):
        refused(
            r"dllm algorithm 'SelectThenSampl' does not exist; use one of .* or 'package.module:Class'",
            **flags(model(), dllm_algorithm="SelectThenSampl"),
        )

    def test_algorithm_without_a_log_cannot_train(self, model):
        refused(
            rf"dllm_algorithm='{STOCK_JOINT}' logs no log-probs to train on; use one of .* or a decoder of your own",
            training=True,
            **flags(model(), dllm_algorithm=STOCK_JOINT),
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"dllm_algorithm_config '.*a.yaml' is empty or not a mapping; write 'key: value' lines .* or leave"),
            ("# threshold: 0.9\n", r"is empty or not a mapping"),
            ("- 0.9\n", r"is empty or not a mapping"),
            ("threshold: [", r"dllm_algorithm_config '.*a.yaml' is not valid YAML"),
            ("treshold: 0.9\n", r"'treshold' is not an option of SelectThenSample; valid keys are \['threshold'\]"),
            ("threshold: high\n", r"SelectThenSample option threshold='high' has the wrong type; expected float"),
            ("threshold: 1.5\n", r"threshold=1.5 is not in \(0, 1\]; LLaDA2 uses 0.95"),
        ],
    )
    def test_algorithm_file(self, model, tmp_path, text, message):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        refused(message, **flags(model(), dllm_algorithm_config=str(path)))

    def test_missing_algorithm_file(self, model):
        refused(
            r"dllm_algorithm_config 'no.yaml' does not exist; pass a YAML file or leave it out",
            **flags(model(), dllm_algorithm_config="no.yaml"),
        )

    @pytest.mark.parametrize("training", [False, True])
    def test_one_request_at_a_time(self, model, training):
        given = flags(model(), max_running_requests=1)
        if training:
            refused(
                r"max_running_requests=1 decodes .* one response at a time; set it to at least 2 or leave it unset",
                training=True,
                **given,
            )
        else:
            assert check_server(given).effective["max_running_requests"] == 1

    @pytest.mark.parametrize("value", [0, -3])
    def test_batch_limit_that_is_not_positive(self, model, value):
        refused(
            rf"max_running_requests={value} is not positive; leave it unset",
            **flags(model(), max_running_requests=value),
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"pp_size": 2}, r"pp_size=2 is not supported for block diffusion; use tp_size"),
            ({"enable_lora": True}, r"enable_lora=True is not supported .*; merge the adapter"),
            ({"disaggregation_mode": "prefill"}, r"disaggregation_mode='prefill' is not supported .*; leave it unset"),
            ({"page_size": 48}, r"page_size=48 is not a multiple of the block size 32; use one, or leave it unset"),
            ({"chunked_prefill_size": 100}, r"chunked_prefill_size=100 is not a multiple of the block size 32"),
            (
                {"attention_backend": "flashinfer"},
                r"attention_backend='flashinfer' does not run .* on a CPU; use 'torch_",
            ),
        ],
    )
    def test_settings_that_break_block_diffusion(self, model, change, message):
        refused(message, **flags(model(), **change))

    def test_attention_without_cuda_graphs_on_a_gpu(self, model):
        given = flags(model(), device="cuda", attention_backend="triton", max_running_requests=8)
        refused(r"attention_backend='triton' cannot capture CUDA graphs .*; use 'flashinfer' or add --disable", **given)
        check_server(given | {"disable_cuda_graph": True})

    def test_quantised_weights_cannot_be_refreshed(self, model):
        given = flags(model(), quantization="fp8")
        refused(
            r"quantization='fp8' cannot be combined with weight refresh: .*; leave it unset", training=True, **given
        )
        check_server(given)


class TestEffectiveSettings:
    def test_an_autoregressive_model_is_left_alone(self, model):
        given = {"model_path": model(architectures=["Qwen3ForCausalLM"])}
        report = check_server(given)
        assert report.effective == given and report.block_diffusion is None

    def test_cpu(self, model):
        report = check_server(flags(model()))
        effective = report.effective
        assert effective["attention_backend"] == "torch_native"
        assert effective["disable_cuda_graph"] and effective["sleep_on_idle"]
        assert effective["dtype"] == "bfloat16"
        assert 2 <= effective["max_running_requests"] <= preflight.CPU_MAX_RUNNING
        assert 4096 <= effective["max_total_tokens"] <= preflight.CPU_MAX_TOTAL_TOKENS
        assert report.requested == flags(model())
        text = report.describe()
        for name in report.reasons:
            assert f"{name}: None -> {effective[name]} (" in text
        assert "mask_id=156895 (known architecture LLaDA2MoeModelLM)" in text

    @pytest.mark.parametrize(
        ("config", "dtype", "expected"),
        [
            ({"dtype": "float32"}, "auto", "float32"),
            ({"dtype": None, "torch_dtype": "torch.float32"}, None, "float32"),
            ({"dtype": None}, "auto", "bfloat16"),
            ({"dtype": "float32"}, "bfloat16", "bfloat16"),
        ],
    )
    def test_dtype_is_the_checkpoints_own(self, model, config, dtype, expected):
        assert check_server(flags(model(**config), dtype=dtype)).effective["dtype"] == expected

    def test_a_gpu_runs_fp32_checkpoints_in_bf16(self, model):
        """SGLang's CUDA norm kernels dispatch bf16 and fp16 only and end the scheduler at the first fp32 request."""
        given = flags(model(dtype="float32"), device="cuda", max_running_requests=8)
        report = check_server(given | {"dtype": "auto"})
        assert report.effective["dtype"] == "bfloat16" and "float32" in report.reasons["dtype"]
        refused(r"dtype='float32' does not run on a GPU: .*; use one", **given, dtype="float32")

    def test_explicit_settings_are_kept(self, model):
        given = flags(model(), max_running_requests=7, max_total_tokens=8192, dtype="float32", disable_cuda_graph=True)
        report = check_server(given)
        assert {name: report.effective[name] for name in given} == given

    def test_checking_twice_changes_nothing(self, model):
        once = check_server(flags(model())).effective
        again = check_server(once)
        assert again.effective == once and not again.reasons

    @pytest.mark.parametrize(
        ("vocab", "block", "gigabytes", "limit", "expected"),
        [(157184, 32, 141, 256, 128), (157184, 32, 4, 256, 4), (320, 32, 24, 64, 64), (157184, 32, 0.1, 64, 2)],
    )
    def test_batch_limit_from_memory(self, vocab, block, gigabytes, limit, expected):
        """Logits of all running blocks, three copies in fp32, stay below a tenth of the memory."""
        chosen = choose_max_running_requests(vocab, block, int(gigabytes * 1e9), limit)
        assert chosen == expected
        assert chosen == 2 or chosen * vocab * block * 4 * 3 <= gigabytes * 1e9 / 10

    def test_kv_cache_of_the_cpu(self, monkeypatch):
        """LLaDA2.0-mini has 40 KiB of keys and values per token: 20 layers, 4 heads of 128, 2 bytes."""
        monkeypatch.setattr(preflight, "device_memory_bytes", lambda device: 24 << 30)
        assert preflight.kv_bytes_per_token(PUBLISHED) == 40 << 10
        assert cpu_kv_tokens(PUBLISHED) == 28672
        assert cpu_kv_tokens(PUBLISHED) * (40 << 10) <= (24 << 30) // 20

    def test_algorithm_options(self, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_text("threshold: 0.7\nblock_size: 16\n")
        assert read_algorithm_config("SelectThenSample", path) == {"threshold": 0.7, "block_size": 16}
        assert read_algorithm_config("SelectThenSample", None) == {"threshold": 0.95}

    def test_block_size_of_the_algorithm_file_wins(self, model, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_text("block_size: 16\n")
        report = check_server(flags(model(block_size=8), dllm_algorithm_config=str(path)))
        assert report.block_diffusion.block_size == 16

    def test_options_of_sglangs_own_algorithms_are_not_ours_to_check(self, model, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_text("penalty_lambda: 0.5\n")
        assert read_algorithm_config(STOCK_JOINT, path) == {"penalty_lambda": 0.5}
        check_server(flags(model(), dllm_algorithm=STOCK_JOINT, dllm_algorithm_config=str(path)))
        refused(
            "'penalty_lambda' is not an option of JointThreshold; valid keys are .*'edit_threshold', 'max_post_edit",
            **flags(model(), dllm_algorithm="JointThreshold", dllm_algorithm_config=str(path)),
        )

    @pytest.mark.parametrize("name", sorted(DECODERS))
    def test_every_decoder_starts_and_trains_without_a_file(self, model, name):
        for training in (False, True):
            if training and name == "LowConfidence":
                refused(
                    "'LowConfidence' draws nothing: .* use SelectThenSample",
                    training=True,
                    **flags(model(), dllm_algorithm=name),
                )
                continue
            report = check_server(flags(model(), dllm_algorithm=name), training=training)
            assert report.effective["dllm_algorithm"] == name
