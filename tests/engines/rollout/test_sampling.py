import math

import pytest
import torch

from flowrl.devices.device import get_device
from flowrl.engines.rollout.sampling import row_keys, sample_tokens, segment_key, uniforms

LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def draw(logits_1V: torch.Tensor, uniform: float, **settings) -> tuple[int, float]:
    tokens, logprobs = sample_tokens(logits_1V, torch.tensor([uniform], dtype=torch.float64), **settings)
    return int(tokens), float(logprobs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_deterministic_algorithms_of_a_gpu_support_sampling(default_algorithms: None):
    get_device("cuda").make_deterministic()
    tokens, _ = sample_tokens(LOGITS.cuda(), torch.tensor([0.6]).double().cuda(), temperature=1.0, top_k=0, top_p=0.8)
    assert tokens.tolist() == [1]


def many_uniforms(num: int, seed: int = 0) -> torch.Tensor:
    keys = row_keys(seed, torch.arange(num), torch.zeros(num, dtype=torch.int64))
    return uniforms(keys, torch.zeros(num, dtype=torch.int64))


def test_random_numbers_match_known_values():
    keys = row_keys(7, torch.tensor([3]), torch.tensor([1]))
    assert uniforms(keys, torch.tensor([5])).item() == reference_uniform(7, 3, 1, 5)


def reference_uniform(seed: int, prompt_id: int, sample: int, position: int) -> float:
    """Computes the same hash with Python integers."""
    key = mix(mix(mix(seed) ^ prompt_id) ^ sample)
    bits = mix(key + 0x9E3779B97F4A7C15 * position)
    return (bits >> 11) * 2.0**-53


def mix(bits: int) -> int:
    bits = (bits + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def test_random_numbers_are_uniform_over_rows_and_positions():
    keys = row_keys(0, torch.arange(200).repeat_interleave(5), torch.arange(5).repeat(200))
    numbers = uniforms(keys[:, None].expand(-1, 50).reshape(-1), torch.arange(50).repeat(1000))
    assert numbers.min() >= 0 and numbers.max() < 1 and len(numbers.unique()) == 50_000
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.01)
    assert numbers.histc(10, 0, 1).std() / 5000 < 0.03
    by_row = numbers.view(1000, 50)
    assert abs(torch.corrcoef(by_row.T).fill_diagonal_(0)).max() < 0.2


def test_seed_prompt_and_sample_each_change_the_random_number():
    keys = [row_keys(*k) for k in ((0, t(1), t(2)), (1, t(1), t(2)), (0, t(2), t(2)), (0, t(1), t(1)), (0, t(2), t(1)))]
    assert len({int(key) for key in keys}) == 5


def t(number: int) -> torch.Tensor:
    return torch.tensor([number])


def test_only_the_low_64_bits_of_a_seed_are_used():
    assert torch.equal(row_keys(2**64 + 5, t(1), t(1)), row_keys(5, t(1), t(1)))


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.76, 2), (0.88, 3), (1 - 2**-53, 3)])
def test_a_token_is_drawn_by_inverting_the_cumulative_distribution(uniform: float, token: int):
    assert draw(LOGITS, uniform) == (token, pytest.approx(float(LOGITS[0, token])))


def test_temperature_divides_the_logits():
    token, logprob = draw(LOGITS, 0.6, temperature=2.0)
    weights = [math.sqrt(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert (token, logprob) == (1, pytest.approx(math.log(weights[1] / sum(weights))))


def test_temperature_zero_takes_the_most_likely_token_with_the_models_logprob():
    assert draw(LOGITS, 0.99, temperature=0) == (0, pytest.approx(math.log(0.5)))


def test_top_k_renormalizes_the_kept_tokens():
    assert draw(LOGITS, 0.99, top_k=2) == (1, pytest.approx(math.log(1 / 3)))


def test_top_k_keeps_tokens_that_tie_with_the_last():
    assert draw(LOGITS, 0.999, top_k=3) == (3, pytest.approx(math.log(0.125)))


@pytest.mark.parametrize(("top_p", "last"), [(0.4, 0), (0.6, 1), (0.8, 2), (1.0, 3)])
def test_top_p_keeps_the_most_likely_tokens_up_to_that_probability(top_p: float, last: int):
    assert draw(LOGITS, 0.999, top_p=top_p)[0] == last


def test_top_p_applies_after_top_k():
    assert draw(LOGITS, 0.999, top_k=2, top_p=0.6) == (0, pytest.approx(0.0))


def test_a_token_of_probability_zero_is_never_sampled():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert [draw(logits, u)[0] for u in (0.0, 0.5, 1 - 2**-53)] == [1, 3, 3]


def test_frequencies_follow_the_distribution():
    tokens, _ = sample_tokens(LOGITS.expand(40_000, -1), many_uniforms(40_000))
    assert (tokens.bincount() / 40_000).tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.01)


def test_large_vocabularies_are_sampled_in_chunks_with_the_same_result():
    torch.manual_seed(0)
    logits, numbers = torch.randn(70, 100_000), many_uniforms(70)
    tokens, logprobs = sample_tokens(logits, numbers, top_p=0.9)
    alone = [sample_tokens(logits[i : i + 1], numbers[i : i + 1], top_p=0.9) for i in (0, 41, 42, 69)]
    assert [int(a[0]) for a in alone] == tokens[[0, 41, 42, 69]].tolist()
    assert [float(a[1]) for a in alone] == logprobs[[0, 41, 42, 69]].tolist()


def test_half_precision_logits_give_float32_logprobs():
    _, logprobs = sample_tokens(LOGITS.bfloat16(), torch.zeros(1, dtype=torch.float64))
    assert logprobs.dtype == torch.float32


def test_segments_of_one_response_have_different_keys() -> None:
    keys = [segment_key(key, position) for key in (5, 6, -(2**63), 2**63 - 1) for position in range(50)]
    assert len(set(keys)) == len(keys) and keys[::50] == [5, 6, -(2**63), 2**63 - 1]
    assert all(-(2**63) <= key < 2**63 for key in keys)
