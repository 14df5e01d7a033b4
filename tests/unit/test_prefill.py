"""Chunks of a prompt as rows of one forward pass: which tokens, which rows, what every row sees."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
import torch

from rollout.plugin.prefill import Row, batch_of_rows, block_rows, chunk_tokens, clean_tokens

MASK, SIZE = 99, 4


def filled(length: int, *masks: int) -> array:
    """A sequence of ``length`` tokens as the scheduler fills it: a block of masks behind it; ``masks`` inside it."""
    return array("q", [MASK if i in masks else i for i in range(length)] + [MASK] * SIZE)


class TestCleanTokens:
    @pytest.mark.parametrize(
        ("length", "prefix", "expected"), [(3, 0, 0), (4, 0, 4), (7, 0, 4), (16, 0, 16), (17, 8, 8), (17, 16, 0)]
    )
    def test_whole_blocks_behind_the_prefix(self, length, prefix, expected):
        assert clean_tokens(filled(length), prefix, SIZE, MASK) == expected

    def test_a_block_with_a_mask_ends_it(self):
        assert clean_tokens(filled(16, 10), 0, SIZE, MASK) == 8
        assert clean_tokens(filled(16, 1), 0, SIZE, MASK) == 0
        assert clean_tokens(filled(16, 1), 4, SIZE, MASK) == 12


@pytest.mark.parametrize(
    ("clean", "limits", "expected"),
    [
        (100, (), 100),
        (100, (50, None), 48),
        (100, (50.7, 31), 28),
        (0, (50,), SIZE),
        (100, (0,), SIZE),
        (100, (-12.5,), SIZE),
    ],
)
def test_chunk_tokens(clean, limits, expected):
    """Whole blocks within every limit, and a block where nothing fits: SGLang then decides as it would have."""
    assert chunk_tokens(clean, SIZE, *limits) == expected


def test_block_rows():
    rows = block_rows([8, 0, 4], [8, 4, 4], SIZE)
    assert rows == [Row(0, 0, 8), Row(0, 4, 12), Row(1, 8, 0), Row(2, 12, 4)]


@dataclass
class Batch:
    """The fields of SGLang's ``ForwardBatch`` that describe requests and tokens."""

    input_ids: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    rids: list[str]
    lora_ids: list[None]
    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    batch_size: int = 3
    orig_seq_lens: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    seq_lens_sum: int = 0
    extend_num_tokens: int = 0
    num_token_non_padded_cpu: int = 0
    num_token_non_padded: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens: torch.Tensor | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    extend_start_loc: torch.Tensor | None = None
    extend_logprob_start_lens_cpu: list[int] | None = None


@pytest.fixture
def batch() -> Batch:
    return Batch(
        input_ids=torch.arange(16) + 1000,
        out_cache_loc=torch.arange(16) + 50,
        req_pool_indices=torch.tensor([7, 3, 5]),
        seq_lens=torch.tensor([16, 4, 8]),
        rids=["a", "b", "c"],
        lora_ids=[None] * 3,
    )


def test_every_block_is_a_row_whose_keys_end_with_it(batch):
    made = batch_of_rows(batch, block_rows([8, 0, 4], [8, 4, 4], SIZE), SIZE)
    assert made.batch_size == 4 and made.req_pool_indices.tolist() == [7, 7, 3, 5]
    assert made.seq_lens.tolist() == made.seq_lens_cpu.tolist() == [12, 16, 4, 8] and made.seq_lens_sum == 40
    assert made.extend_prefix_lens.tolist() == made.extend_prefix_lens_cpu == [8, 12, 0, 4]
    assert made.extend_seq_lens.tolist() == made.extend_seq_lens_cpu == [SIZE] * 4
    assert made.extend_start_loc.tolist() == [0, 4, 8, 12]
    assert made.positions.tolist() == [*range(8, 16), *range(4), *range(4, 8)]
    assert made.input_ids.tolist() == batch.input_ids.tolist() and made.extend_num_tokens == 16
    assert made.rids == ["a", "a", "b", "c"]


def test_a_part_of_the_rows(batch):
    rows = [row for row in block_rows([8, 0, 4], [8, 4, 4], SIZE) if row.request != 0]
    made = batch_of_rows(batch, rows, SIZE)
    assert made.input_ids.tolist() == list(range(1008, 1016)) and made.out_cache_loc.tolist() == list(range(58, 66))
    assert made.req_pool_indices.tolist() == [3, 5] and made.rids == ["b", "c"]
    assert made.positions.tolist() == list(range(8)) and made.extend_num_tokens == 8
