"""What is refused before a process starts, and which settings are filled in."""

from __future__ import annotations

import json

import pytest

from dllm.config import ConfigError
from dllm.decoding import DECODERS
from rollout import preflight, versions
from rollout.preflight import check_server, choose_max_running_requests, cpu_kv_tokens, read_algorithm_config
from tests.support import DATA, write_json

GRAPHS_OFF = {"decode": {"backend": "disabled"}}
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
            ({"vocab_size": "many"}, r"^vocab_size of config.json is 'many', not a positive integer; restore the file"),
            ({"num_hidden_layers": None}, r"^num_hidden_layers of config.json is missing; restore the file"),
            ({"num_attention_heads": 0}, r"^num_attention_heads of config.json is 0, not a positive integer; restore"),
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
            ("block_size: big\n", r"SelectThenSample option block_size='big' has the wrong type; expected int"),
            ("threshold: 1.5\n", r"threshold=1.5 is not in \(0, 1\]; LLaDA2 uses 0.95"),
        ],
    )
    def test_algorithm_file(self, model, tmp_path, text, message):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        refused(message, **flags(model(), dllm_algorithm_config=str(path)))

    def test_files_that_are_something_else(self, model, tmp_path):
        binary = tmp_path / "a.yaml"
        binary.write_bytes(b"\xff\xfe")
        refused(r"'.*a.yaml' is not valid YAML: .*; write", **flags(model(), dllm_algorithm_config=str(binary)))
        refused(r"' is a directory; pass a YAML file", **flags(model(), dllm_algorithm_config=str(tmp_path)))
        write_json(tmp_path / "model" / "config.json", [1])
        refused(r"config.json is not a JSON object; restore the file", **flags(str(tmp_path / "model")))

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
            ({"tp_size": 3}, r"tp_size=3 does not divide the 16 attention heads; use one that does"),
            ({"context_length": -5}, r"context_length=-5 is not positive; leave it unset"),
            ({"enable_lora": True}, r"enable_lora=True is not supported .*; merge the adapter"),
            ({"lora_paths": ["a"]}, r"lora_paths=\['a'\] is not supported .*; merge the adapter"),
            ({"speculative_algorithm": "EAGLE"}, r"speculative_algorithm='EAGLE' drafts token by token, .*; leave it"),
            ({"enable_mixed_chunk": True}, r"enable_mixed_chunk=True is switched off by SGLang .*; leave it out"),
            ({"enable_hierarchical_cache": True}, r"enable_hierarchical_cache=True is switched off .*; leave it out"),
            (
                {"enable_deterministic_inference": True},
                r"enable_deterministic_inference=True has GPU kernels only; leave",
            ),
            (
                {"decode_attention_backend": "triton"},
                r"decode_attention_backend='triton' splits .*; set attention_back",
            ),
            ({"disaggregation_mode": "prefill"}, r"disaggregation_mode='prefill' is not supported .*; leave it unset"),
            ({"max_total_tokens": 32}, r"max_total_tokens=32 has no room for a prompt and a response, 32 tokens"),
            ({"mem_fraction_static": 7.0}, r"mem_fraction_static=7.0 is no share of a GPU.s memory; use 0 to 1"),
            ({"mem_fraction_static": float("nan")}, r"mem_fraction_static=nan is no share"),
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

    def test_everything_is_refused_at_once(self, model, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_text("treshold: 0.9\n")
        given = flags(model(), dllm_algorithm_config=str(path), pp_size=2, attention_backend="flashinfer")
        with pytest.raises(ConfigError) as caught:
            check_server(given)
        assert [line.split("=")[0].split(" ")[0] for line in str(caught.value).splitlines()] == [
            "'treshold'",
            "pp_size",
            "attention_backend",
        ]

    def test_several_of_one_kind_too(self, model):
        given = flags(model(), pp_size=2, enable_lora=True, disaggregation_mode="prefill", page_size=48, tp_size=3)
        with pytest.raises(ConfigError) as caught:
            check_server(given | {"chunked_prefill_size": 100, "mem_fraction_static": 7.0})
        assert [line.split("=")[0] for line in str(caught.value).splitlines()] == [
            "pp_size",
            "enable_lora",
            "disaggregation_mode",
            "mem_fraction_static",
            "tp_size",
            "page_size",
            "chunked_prefill_size",
        ]

    @pytest.mark.parametrize("off", [{"disable_decode_cuda_graph": True}, {"cuda_graph_config": GRAPHS_OFF}])
    def test_graphs_switched_off_in_other_words(self, model, off):
        check_server(flags(model(), device="cuda", attention_backend="triton", **off), gpu_bytes=80 << 30)

    @pytest.mark.parametrize(
        ("change", "config", "message"),
        [
            (
                {"torchao_config": "int8wo"},
                {},
                r"torchao_config='int8wo' cannot be combined with weight refresh: .*; leave",
            ),
            (
                {},
                {"quantization_config": {"quant_method": "fp8"}},
                r"config.json quantization_config='fp8' cannot be .*",
            ),
        ],
    )
    def test_other_ways_to_quantise(self, model, change, config, message):
        given = flags(model(**config)) | change
        refused(message, training=True, **given)
        check_server(given)

    def test_versions_that_do_not_fit(self, model, monkeypatch):
        monkeypatch.setitem(versions.REQUIRED, "sglang", "0.5.99")
        refused(r"versions that do not fit: sglang 0.5.17 \(needs 0.5.99\); install the pinned ones", **flags(model()))


class TestGpu:
    """Settings for a GPU, planned on any machine."""

    def report(self, path, gigabytes=80, training=False, **changes):
        return check_server(flags(path, device="cuda") | changes, training=training, gpu_bytes=int(gigabytes * 1e9))

    def refused(self, message, path, **changes):
        with pytest.raises(ConfigError, match=message):
            self.report(path, **changes)

    def test_flashinfer_with_graphs(self, model):
        report = self.report(model())
        assert report.effective["attention_backend"] == "flashinfer" and not report.effective.get("disable_cuda_graph")
        assert report.effective["max_running_requests"] == 128 and report.effective["page_size"] == 32
        assert "GPU memory 80.0 GB: weights 32.5, CUDA graphs 4.5, logits of 128 blocks 7.7" in report.describe()

    def test_odd_heads_take_triton_without_graphs(self, model):
        report = self.report(model(head_dim=96))
        assert (report.effective["attention_backend"], report.effective["disable_cuda_graph"]) == ("triton", True)
        message = r"attention_backend='flashinfer' has no kernels for heads of 96 .*; use 'triton' with --disable-cuda"
        self.refused(message, model(head_dim=96), attention_backend="flashinfer")

    def test_deterministic_mode(self, model):
        report = self.report(model(), enable_deterministic_inference=True)
        assert (report.effective["attention_backend"], report.effective["disable_cuda_graph"]) == ("triton", True)
        assert "graphs of blocks split keys by the batch" in report.reasons["disable_cuda_graph"]

    @pytest.mark.parametrize("off", [{"disable_cuda_graph": True}, {"cuda_graph_backend_decode": "disabled"}])
    def test_other_backends_without_graphs(self, model, off):
        for name in ("triton", "fa3", "torch_native"):
            report = self.report(model(), attention_backend=name, **off)
            assert report.effective["attention_backend"] == name and report.memory.graphs == 0
        self.refused(
            r"attention_backend='trtllm_mha' does not run block", model(), attention_backend="trtllm_mha", **off
        )

    def test_no_room(self, model):
        self.refused(
            r"not enough GPU memory: .* GPU memory 40.0 GB: weights 32.5, .*; use more GPUs \(tp_size\), fewer running "
            r"requests \(max_running_requests=128, 69 MB each\), or a larger card",
            model(),
            gigabytes=40,
            max_running_requests=128,
        )
        self.report(model(), gigabytes=40, max_running_requests=16)

    def test_share_too_small_for_the_weights(self, model):
        self.refused(
            r"mem_fraction_static=0.3 leaves no room for a KV cache of 8192 .*; raise it to at least 0.42 or",
            model(),
            mem_fraction_static=0.3,
        )
        assert self.report(model(), mem_fraction_static=0.42).memory.kv_tokens >= 8192

    def test_report_for_machines(self, model):
        made = json.loads(json.dumps(self.report(model()).as_dict()))
        assert made["ok"] and made["effective"]["max_running_requests"] == 128
        assert made["block_diffusion"]["mask_id"] == 156895
        assert made["memory"]["total"] == 80e9 and made["memory"]["kv_tokens"] > 8192
        assert {v["name"] for v in made["versions"]} == set(versions.REQUIRED)


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
        assert "dllm_algorithm: SelectThenSample (as asked)" in text
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

    def test_block_size_of_the_algorithm_file(self, model, tmp_path):
        """It says again what the checkpoint says, or what the checkpoint does not say; anything else is refused."""
        path = tmp_path / "a.yaml"
        path.write_text("block_size: 16\n")
        given = {"dllm_algorithm_config": str(path)}
        assert check_server(flags(model(block_size=16), **given)).block_diffusion.block_size == 16
        unnamed = model(architectures=["SDARForCausalLM"])
        assert check_server(flags(unnamed, **given)).block_diffusion.block_size == 16
        refused(
            r"block_size=16 of the algorithm's options is not the 8 that .* \(config.json block_size\); leave it out",
            **flags(model(block_size=8), **given),
        )
        refused(
            r"is not the 32 that .* \(known architecture LLaDA2MoeModelLM\); leave it out", **flags(model(), **given)
        )

    def test_options_of_sglangs_own_algorithms(self, model, tmp_path):
        path = tmp_path / "a.yaml"
        for text, message in (
            ("treshold: 0.9\n", r"'treshold' is not an option of sglang\..*; valid keys are \['edit_threshold', "),
            ("threshold: high\n", r"threshold='high' has the wrong type"),
            ("max_post_edit_steps: true\n", r"max_post_edit_steps=True has the wrong type"),
        ):
            path.write_text(text)
            refused(message, **flags(model(), dllm_algorithm=STOCK_JOINT, dllm_algorithm_config=str(path)))
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
