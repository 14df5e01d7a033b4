"""Offline batch generation: prompts in a file, rollouts with their logs out.

python -m rollout.generate --model-path DIR --prompts FILE.jsonl --out FILE.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dllm.config import ConfigError, load_hf_config, positive_int, resolve
from dllm.decoding import SamplingParams
from dllm.trace import TraceError
from rollout.engine import Engine, GenerateParams, check_prompt
from rollout.preflight import read_algorithm_config
from rollout.records import RolloutError, RolloutSample, read_lines, write_line


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m rollout.generate", description=__doc__.splitlines()[0])
    p.add_argument("--model-path", required=True, help="Hugging Face checkpoint directory")
    p.add_argument("--prompts", required=True, help="JSON lines with 'text', 'messages' or 'input_ids'")
    p.add_argument("--out", required=True, help="JSON lines to write, in the order of the input")
    p.add_argument("--n", type=int, default=1, help="responses per prompt")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--top-k", type=int, default=-1)
    p.add_argument("--min-p", type=float, default=0.0)
    p.add_argument("--seed", type=int, help="same seed, same rollouts; without one the engine chooses")
    p.add_argument("--ignore-eos", action="store_true")
    p.add_argument("--dllm-algorithm", default="SelectThenSample", help="decoder name or package.module:Class")
    p.add_argument("--dllm-algorithm-config", help="YAML file with the decoder's options")
    p.add_argument("--threshold", type=float, help="the decoder's confidence threshold")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if one is visible")
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    p.add_argument("--trust-remote-code", action="store_true")
    p.add_argument("--max-running-requests", type=int, help="default: chosen from memory")
    p.add_argument("--tp-size", type=int, default=1)
    return p


def load_tokenizer(model_path: str, trust_remote_code: bool) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    from rollout.hf_config import register_configs

    register_configs()
    if not Path(model_path).is_dir():
        raise ConfigError(f"model path {model_path!r} is not a directory; pass a local Hugging Face checkpoint")
    try:
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # a broken file raises whatever its parser does
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model path {model_path!r} has no tokenizer that loads ({reason}); add its files, or give prompts as "
            "'input_ids'"
        ) from error


def load_prompts(path: str, model_path: str, trust_remote_code: bool) -> list[list[int]]:
    """Token ids of every prompt of a file.

    Raises:
        ConfigError: the file is missing or empty, or a line has neither text, messages nor input_ids.
    """
    if not Path(path).is_file():
        raise ConfigError(f"prompts file {path!r} does not exist; pass a file of JSON lines")
    tokenizer: Any = None
    prompts = []
    for number, line in enumerate(read_lines(path), 1):
        if "input_ids" in line:
            ids = line["input_ids"]
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise ConfigError(f"{path} line {number}: input_ids is not a list of integers")
            prompts.append(ids)
            continue
        text = line.get("text")
        if not isinstance(text, str) and (text is not None or not isinstance(line.get("messages"), list)):
            raise ConfigError(f"{path} line {number} has no 'text', 'messages' or 'input_ids'; give one of them")
        if tokenizer is None:
            tokenizer = load_tokenizer(model_path, trust_remote_code)
        if text is None:
            try:
                text = tokenizer.apply_chat_template(line["messages"], tokenize=False, add_generation_prompt=True)
            except Exception as error:  # whatever the checkpoint's template raises
                raise ConfigError(f"{path} line {number}: the chat template refuses the messages: {error}") from error
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)
    if not prompts:
        raise ConfigError(f"prompts file {path!r} has no lines; write one JSON object per line")
    return prompts


def checked_prompts(args: argparse.Namespace) -> list[list[int]]:
    """The prompts of a run, each of which the model can take.

    Raises:
        ConfigError: the model or the file is missing, or a prompt cannot be taken; the message has its number.
    """
    options = read_algorithm_config(args.dllm_algorithm, args.dllm_algorithm_config)
    mask_id = resolve(args.model_path, block_size=options.get("block_size")).mask_id
    vocab_size = positive_int(load_hf_config(args.model_path), "vocab_size")
    prompts = load_prompts(args.prompts, args.model_path, args.trust_remote_code)
    for number, prompt in enumerate(prompts, 1):
        try:
            check_prompt(prompt, mask_id, vocab_size)
        except ConfigError as error:
            raise ConfigError(f"{args.prompts} line {number}: {error}") from error
    return prompts


class OrderedWriter:
    """Writes samples in the order of their prompts, each as soon as all before it are there."""

    def __init__(self, path: str, prompts: int, n: int) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (closed by close())
        self.n, self.next = n, 0
        self.waiting: dict[int, RolloutSample] = {}
        self.total = prompts * n

    def add(self, prompt: int, sample: int, made: RolloutSample) -> None:
        self.waiting[prompt * self.n + sample] = made
        while self.next in self.waiting:
            write_line(self.file, self.waiting.pop(self.next).to_line())
            self.next += 1

    def close(self) -> None:
        self.file.close()


def run(args: argparse.Namespace) -> None:
    """Generate; see ``parser`` for the arguments."""
    if args.n < 1 or args.max_new_tokens < 1:
        raise ConfigError(f"n={args.n} and max_new_tokens={args.max_new_tokens} must be at least 1")
    try:
        sampling = SamplingParams(args.temperature, args.top_p, args.top_k, args.min_p)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if Path(args.out).is_dir():
        raise ConfigError(f"out={args.out!r} is a directory; give the path of a file")
    prompts = checked_prompts(args)
    options = {} if args.threshold is None else {"threshold": args.threshold}
    params = GenerateParams(sampling, args.max_new_tokens, args.ignore_eos)
    with Engine(
        args.model_path,
        dllm_algorithm=args.dllm_algorithm,
        dllm_algorithm_config=args.dllm_algorithm_config,
        options=options,
        device=args.device,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        max_running_requests=args.max_running_requests,
        tp_size=args.tp_size,
    ) as engine:
        print(engine.report.describe(), file=sys.stderr)
        writer = OrderedWriter(args.out, len(prompts), args.n)
        tokens = 0
        with tqdm(total=writer.total, desc="rollouts", unit="sample") as bar:

            def on_sample(prompt: int, sample: int, made: RolloutSample) -> None:
                nonlocal tokens
                tokens += len(made.trace.replay_ids)
                writer.add(prompt, sample, made)
                bar.update()
                bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s")

            try:
                engine.generate(prompts, params, n=args.n, seed=args.seed, on_sample=on_sample)
            finally:
                writer.close()
    print(f"{writer.next} rollouts, {tokens} tokens -> {args.out}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(parser().parse_args(argv))
    except (ConfigError, TraceError, RolloutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
