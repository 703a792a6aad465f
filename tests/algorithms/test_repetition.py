"""The number of repeated n-grams."""

import torch

from flowrl.algorithms.repetition import repeated_ngrams


def test_a_loop_repeats_its_ngrams() -> None:
    # Bigrams of the first row: 12 21 12 21 12, of which three are repeated. The second row repeats none.
    ids = torch.tensor([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]])
    assert repeated_ngrams(ids, torch.ones_like(ids, dtype=torch.bool), size=2) == (3, 10)


def test_only_tokens_of_the_mask_count() -> None:
    ids = torch.tensor([[9, 1, 1, 1, 7, 1, 1]])
    mask = torch.tensor([[False, True, True, True, False, True, True]])
    # Bigrams 11 11 and, after the gap, 11.
    assert repeated_ngrams(ids, mask, size=2) == (2, 3)


def test_rows_are_independent() -> None:
    ids = torch.tensor([[1, 2, 3, 4]] * 3)
    assert repeated_ngrams(ids, torch.ones_like(ids, dtype=torch.bool)) == (0, 3)


def test_short_rows_have_no_ngrams() -> None:
    ids = torch.tensor([[1, 1, 1]])
    assert repeated_ngrams(ids, torch.ones_like(ids, dtype=torch.bool)) == (0, 0)
    assert repeated_ngrams(torch.empty(0, 5, dtype=torch.long), torch.empty(0, 5, dtype=torch.bool)) == (0, 0)


def test_the_hash_agrees_with_a_count_of_tuples() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (20, 60), generator=generator)
    mask = torch.rand(20, 60, generator=generator) < 0.9
    num_all, num_distinct = 0, 0
    for row, own in zip(ids.tolist(), mask.tolist(), strict=True):
        ngrams = [tuple(row[i : i + 4]) for i in range(57) if all(own[i : i + 4])]
        num_all += len(ngrams)
        num_distinct += len(set(ngrams))
    assert repeated_ngrams(ids, mask) == (num_all - num_distinct, num_all)
