"""A small tokenizer in LLaDA2's format: its role tokens, its chat template, digits one by one.

Byte-level BPE, so that any text survives a round trip. The published tokenizer has 157 k entries; the embedding
and the head of a tiny model leave room for a few hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dllm.config import ConfigError

ROLE, END_OF_ROLE_NAME, ROLE_END = "<role>", "</role>", "<|role_end|>"
START_OF_TEXT, END_OF_TEXT, MASK = "<|startoftext|>", "<|endoftext|>", "<|mask|>"
SPECIAL_TOKENS = (ROLE, END_OF_ROLE_NAME, ROLE_END, START_OF_TEXT, END_OF_TEXT, MASK)
BYTES = 256
SYSTEM_LINE = "detailed thinking off"

# Same strings as the published template for conversations of system, user and assistant messages without tools
# and without <think> parts (inclusionAI/LLaDA2.0-mini, tokenizer_config.json). A leading system message shares
# the first turn with the thinking switch.
CHAT_TEMPLATE = (
    "{% set names = {'system': 'SYSTEM', 'user': 'HUMAN', 'assistant': 'ASSISTANT'} %}"
    "{% set lead = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}"
    f"{{{{ '{ROLE}SYSTEM{END_OF_ROLE_NAME}' + lead + '{SYSTEM_LINE}{ROLE_END}' }}}}"
    "{% for message in messages %}"
    "{% if message.role not in names %}"
    "{{ raise_exception('role ' + message.role + ' is not one of system, user, assistant') }}"
    "{% elif not (loop.first and message.role == 'system') %}"
    f"{{{{ '{ROLE}' + names[message.role] + '{END_OF_ROLE_NAME}' + message.content + '{ROLE_END}' }}}}"
    "{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ROLE}ASSISTANT{END_OF_ROLE_NAME}' }}}}{{% endif %}}"
)


def _texts(prompts: Iterable[str]) -> Iterator[str]:
    """What the merges are trained on: prompts with the fixed words of the chat format around them."""
    for prompt in prompts:
        yield from ("SYSTEM", SYSTEM_LINE, "HUMAN", prompt, "ASSISTANT")


def build_tokenizer(prompts: Sequence[str], vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Train the merges on ``prompts`` (plain text, without chat format).

    Args:
        vocab_size: entries in total: special tokens, 256 bytes, and merges for the rest. Fewer if the prompts
            do not yield that many merges.

    Raises:
        ConfigError: ``vocab_size`` leaves no room for bytes and special tokens.
    """
    if vocab_size < BYTES + len(SPECIAL_TOKENS):
        raise ConfigError(f"vocab_size={vocab_size} is too small; use at least {BYTES + len(SPECIAL_TOKENS)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(prompts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        additional_special_tokens=[ROLE, END_OF_ROLE_NAME, ROLE_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, model_dir: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into ``model_dir``."""
    tokenizer.save_pretrained(str(model_dir))


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids
