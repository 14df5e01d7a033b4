"""Texts of single tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dllm.config import ConfigError


@dataclass(frozen=True)
class TokenTexts:
    """A tokenizer as the viewer needs it: one id, one text."""

    tokenizer: Any

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Text of each id. A token that is part of a character is shown as the tokenizer's own name of it."""
        found = {}
        for token in sorted(set(ids)):
            text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if "\ufffd" in text:
                text = self.tokenizer.convert_ids_to_tokens(token) or text
            found[token] = text
        return found

    def special(self, ids: Iterable[int]) -> list[int]:
        """Those of ``ids`` that are control tokens, not text."""
        return sorted(set(ids) & self._controls())

    def _controls(self) -> set[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return set(self.tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}


def load_texts(model_path: str | None, candidates: Sequence[Path]) -> TokenTexts | None:
    """The tokenizer of ``model_path``, or of the first of ``candidates`` that has one; None if none has.

    Raises:
        ConfigError: ``model_path`` is given and has no tokenizer.
    """
    from rollout.generate import load_tokenizer

    if model_path is not None:
        if not Path(model_path).is_dir():
            raise ConfigError(f"model path {model_path!r} is not a directory; pass a local Hugging Face checkpoint")
        try:
            return TokenTexts(load_tokenizer(model_path, trust_remote_code=False))
        except ConfigError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ConfigError(
                f"model path {model_path!r} has no tokenizer that loads ({reason}); pass the checkpoint the rollouts "
                "were made with"
            ) from error
    for path in candidates:
        try:
            return TokenTexts(load_tokenizer(str(path), trust_remote_code=False))
        except ConfigError:
            continue
    return None
