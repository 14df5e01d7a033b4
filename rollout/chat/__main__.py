"""A terminal chat that shows every block being unmasked in place.

    python -m rollout.chat --model-path DIR                 an engine of its own
    python -m rollout.chat --url http://127.0.0.1:30000     a running server

A block appears when it is committed and is then replayed step by step from its log: masks, the tokens of the step on
yellow, settled tokens from red (unsure) to green (sure), tokens behind the stop struck out. /clear forgets the
conversation, /exit ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dllm.config import ConfigError, resolve
from dllm.decoding import SamplingParams
from rollout.chat.blocks import NoLog, committed
from rollout.chat.source import Address, Source
from rollout.chat.view import BlockView
from rollout.engine import Engine
from rollout.generate import load_tokenizer
from rollout.params import GenerateParams
from rollout.records import RolloutError, RolloutSample
from rollout.service import Finished
from rollout.viewer.tokens import TokenTexts

FRAMES_PER_SECOND = 20


@dataclass
class Chat:
    """A conversation on a screen.

    Attributes:
        pause: seconds that a denoise step stays on the screen.
    """

    source: Source
    tokenizer: Any
    block_size: int
    params: GenerateParams
    console: Console
    pause: float = 0.05
    seed: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.view = BlockView(TokenTexts(self.tokenizer))

    def ask(self, message: str) -> str:
        """Show the answer to a message being decoded, and return it; a message without an answer is forgotten.

        Raises:
            RolloutError: the engine failed the request.
            ConfigError: the engine cannot take the conversation.
            NoLog: the engine logs no reveal steps.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompt = self.tokenizer(text, add_special_tokens=False).input_ids
        with Live(console=self.console, refresh_per_second=FRAMES_PER_SECOND, transient=False) as live:
            answer = self._show(prompt, live)
        tokens, steps = len(answer.trace.replay_ids), sum(answer.trace.steps_per_block)
        self.console.print(
            f"{tokens} tokens in {steps} steps, {tokens / max(1, steps):.1f} a step ({answer.finish_reason})",
            style="dim",
        )
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer.text

    def _show(self, prompt: list[int], live: Live) -> RolloutSample:
        """Replay every block when it is committed; the whole response."""
        shown, position = Text(), len(prompt)
        for event in self.source.stream([prompt], self.params, seed=self.seed):
            if isinstance(event, Finished):
                if isinstance(event.result, RolloutError):
                    raise event.result
                return event.result
            for block in committed(event.fields, position, self.block_size):
                for frame in self.view.frames(block):
                    live.update(shown + frame, refresh=True)
                    time.sleep(self.pause)
                shown += self.view.finished(block)
                live.update(shown, refresh=True)
            position += len(event.fields["output_ids"])
        raise RolloutError("the engine ended the request without an answer")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m rollout.chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--model-path", help="Hugging Face checkpoint directory; starts an engine")
    where.add_argument("--url", help="address of a running server")
    p.add_argument("--api-key", help="of the server, if it has one")
    p.add_argument("--tokenizer", help="directory of the tokenizer and config.json; default: the model's")
    p.add_argument("--message", action="append", help="say this and end, instead of asking; may be repeated")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--max-new-tokens", type=int, default=512)
    p.add_argument("--steps-per-second", type=float, default=20.0, help="of the replay")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dllm-algorithm", default="SelectThenSample", help="decoder name or package.module:Class")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if one is visible")
    p.add_argument("--trust-remote-code", action="store_true")
    return p


def open_chat(args: argparse.Namespace, console: Console) -> Chat:
    """Start or find the engine.

    Raises:
        ConfigError: the preflight refused, or nothing answers at the address.
    """
    if not args.steps_per_second > 0:
        raise ConfigError(f"steps_per_second={args.steps_per_second} is not positive; use e.g. 20")
    if args.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={args.max_new_tokens} is not positive; use e.g. 512")
    try:
        params = GenerateParams(SamplingParams(args.temperature), args.max_new_tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    source: Source
    if args.url is not None:
        address = Address(args.url, args.api_key)
        path = args.tokenizer or address.tokenizer_path
        if not Path(path).is_dir():
            raise ConfigError(f"the server's model {path!r} is not on this machine; pass --tokenizer DIR")
        tokenizer, diffusion = load_tokenizer(path, args.trust_remote_code), resolve(path)
        source, block_size = address.source(tokenizer, diffusion), diffusion.block_size
    else:
        tokenizer = load_tokenizer(args.tokenizer or args.model_path, args.trust_remote_code)
        with console.status("starting the engine"):
            engine = Engine(
                args.model_path,
                dllm_algorithm=args.dllm_algorithm,
                device=args.device,
                trust_remote_code=args.trust_remote_code,
            )
        source, block_size = engine, engine.block_diffusion.block_size
    return Chat(source, tokenizer, block_size, params, console, 1 / args.steps_per_second, args.seed)


def talk(chat: Chat) -> None:
    """Ask for messages until the user ends."""
    while True:
        try:
            message = chat.console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if message == "/exit":
            return
        if message == "/clear":
            chat.messages.clear()
        elif message:
            try:
                chat.ask(message)
            except (RolloutError, ConfigError) as error:
                chat.console.print(f"error: {error}", style="red", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parser().parse_args(argv), Console(highlight=False)
    try:
        chat = open_chat(args, console)
        try:
            for message in args.message or ():
                console.print(f"[bold]> [/bold]{message}")
                chat.ask(message)
            if not args.message:
                talk(chat)
        finally:
            chat.source.close()
    except (ConfigError, RolloutError, NoLog) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
