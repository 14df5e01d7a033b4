"""Blocks as coloured text: masks, the tokens of this step, and tokens by confidence."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from rich.style import Style
from rich.text import Text

from rollout.chat.blocks import Block
from rollout.viewer.tokens import TokenTexts

MASK = "░░"
FRESH = Style(color="black", bgcolor="bright_yellow")
BEHIND_STOP = Style(dim=True, strike=True)


@lru_cache(maxsize=128)
def shade(percent: int) -> Style:
    """Colour of a token by its confidence in per cent: red below a half, yellow, green near 1."""
    share = max(0.0, min(1.0, (percent - 30) / 70))
    red, green = (255, int(510 * share)) if share < 0.5 else (int(510 * (1 - share)), 255)
    return Style(color=f"#{red:02x}{min(255, green):02x}60")


class BlockView:
    """Draws blocks with the texts of a tokenizer."""

    def __init__(self, texts: TokenTexts) -> None:
        self.tokens = texts
        self.known: dict[int, str] = {}

    def text_of(self, token: int) -> str:
        """What a token shows: its text, or nothing for a control token."""
        if token not in self.known:
            control = bool(self.tokens.special([token]))
            self.known[token] = "" if control else self.tokens.texts([token])[token]
        return self.known[token]

    def frames(self, block: Block) -> Iterator[Text]:
        """The block before its first step and after each."""
        previous: list[int | None] | None = None
        for state in block.states():
            frame = Text()
            for index, token in enumerate(state):
                if token is None:
                    frame.append(MASK, Style(dim=True))
                elif previous is not None and previous[index] != token:
                    frame.append(self.text_of(token) or "·", FRESH)
                else:
                    frame.append(*self._settled(block, index, token))
            yield frame
            previous = state

    def finished(self, block: Block) -> Text:
        """The block as it stays on the screen: its visible part."""
        text = Text()
        for index in range(block.visible):
            text.append(*self._settled(block, index, block.ids[index]))
        return text

    def _settled(self, block: Block, index: int, token: int) -> tuple[str, Style]:
        if index >= block.visible:
            return self.text_of(token) or "·", BEHIND_STOP
        return self.text_of(token), shade(round(100 * block.confidence[index]))
