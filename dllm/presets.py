"""Published models: block size, mask id, and the decoder that their authors recommend. Table: docs/models.md.

Facts to start from and to test against. Nothing is resolved from here: a run takes its numbers from the checkpoint
(``dllm.config``) and its decoder from its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dllm.config import ConfigError


@dataclass(frozen=True)
class Preset:
    """One published model.

    Attributes:
        name: repository on the Hugging Face hub.
        decoder, options: what the authors recommend, as a decoder of ``dllm.decoding`` and its options.
        temperature: what they recommend with it.
        source: where these figures are published.
        fast: options of a faster mode that they also recommend.
        rl_decoder, rl_options: for rollouts: a decoder whose log-prob is the sum over the drawn tokens, with the
            authors' threshold. Ours, not published, except where ``note`` says otherwise.
        note: figures that are not published, or not by the authors.
    """

    name: str
    architecture: str
    block_size: int
    mask_id: int
    decoder: str
    options: Mapping[str, Any]
    temperature: float
    source: str
    rl_decoder: str
    rl_options: Mapping[str, Any]
    fast: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def threshold(self) -> float:
        """Confidence above which a token is revealed."""
        return self.options["threshold"]


def _llada20(name: str, source: str, note: str = "") -> Preset:
    options = {"threshold": 0.95}
    return Preset(
        f"inclusionAI/{name}", "LLaDA2MoeModelLM", 32, 156895, "LowConfidence", options, 0.0, source,
        "SelectThenSample", options, note=note,
    )  # fmt: skip


def _llada21(name: str, source: str, note: str = "") -> Preset:
    quality = {"threshold": 0.7, "edit_threshold": 0.5, "max_post_edit_steps": 16}
    return Preset(
        f"inclusionAI/{name}", "LLaDA2MoeModelLM", 32, 156895, "JointThreshold", quality, 0.0, source, "JointThreshold",
        # Argmax edits at a low threshold undo what sampling explored.
        quality | {"edit_threshold": 0.9}, fast=quality | {"threshold": 0.5, "edit_threshold": 0.0}, note=note,
    )  # fmt: skip


def _sdar(name: str, source: str, moe: bool = False, note: str = "") -> Preset:
    architecture = "SDARMoeForCausalLM" if moe else "SDARForCausalLM"
    options = {"threshold": 0.9, "tokens_per_step": 1}
    return Preset(
        name, architecture, 4, 151669, "SampleThenSelect", options, 1.0, source, "SelectThenSample", {"threshold": 0.9},
        note=note,
    )  # fmt: skip


_LLADA20_CARD = "model card (block 32, 32 steps, temperature 0); LLaDA2.0 report, section 7 (threshold 0.95)"
_LLADA21_CARD = "model card of LLaDA2.1-mini, Best Practices (Quality Mode; Speed Mode as `fast`)"
_SDAR_README = "JetAstra/SDAR README, JetEngine example (dynamic, 4 steps for a block of 4, 0.9)"
_SDAR_NOTE = (
    "the README's benchmarks are greedy with one token a step (StaticSteps); generate.py defaults to 0.85. "
    "-b8 to -b64 of the same model have blocks of 8 to 64; no threshold is published for them."
)
_TRADO_README = "Gen-Verse/dLLM-RL README and configs/trado_eval.yaml (dynamic, 0.9)"

PRESETS: Mapping[str, Preset] = {
    preset.name.partition("/")[2]: preset
    for preset in (
        _llada20("LLaDA2.0-mini", _LLADA20_CARD),
        _llada20("LLaDA2.0-flash", _LLADA20_CARD, "the card was read for mini only"),
        _llada20("LLaDA2.0-mini-CAP", "LLaDA2.0 report, figure 3 (threshold 0.95)", "the figure is for flash-CAP"),
        _llada20("LLaDA2.0-flash-CAP", "LLaDA2.0 report, figure 3 (threshold 0.95)"),
        _llada21("LLaDA2.1-mini", _LLADA21_CARD),
        _llada21("LLaDA2.1-flash", _LLADA21_CARD, "the card was read for mini only"),
        _sdar("JetLM/SDAR-1.7B-Chat", _SDAR_README, note=_SDAR_NOTE),
        _sdar("JetLM/SDAR-4B-Chat", _SDAR_README, note=_SDAR_NOTE),
        _sdar("JetLM/SDAR-8B-Chat", _SDAR_README, note=_SDAR_NOTE),
        _sdar("JetLM/SDAR-30B-A3B-Chat", _SDAR_README, moe=True, note=_SDAR_NOTE),
        _sdar("Gen-Verse/TraDo-4B-Instruct", _TRADO_README),
        _sdar("Gen-Verse/TraDo-8B-Instruct", _TRADO_README),
    )
}
"""By the name of the repository, without its owner."""


def preset(name: str) -> Preset:
    """The preset of a published model, with or without the owner of its repository.

    Raises:
        ConfigError: there is none.
    """
    short = name.rpartition("/")[2]
    if short not in PRESETS:
        raise ConfigError(f"model {name!r} has no preset; the published ones are {sorted(PRESETS)}")
    return PRESETS[short]
