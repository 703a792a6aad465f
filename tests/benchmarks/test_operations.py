"""The operations of a micro-batch: the host waits for none of them, and sends the micro-batch in one copy."""

from collections.abc import Mapping

import pytest

from tests.benchmarks.operations import CASES, LOGPROBS, count_logprobs, count_update


@pytest.mark.parametrize("case", [*CASES, LOGPROBS])
def test_a_micro_batch_is_one_copy_and_makes_the_host_wait_for_nothing(case: str) -> None:
    settings: Mapping[str, object] = CASES.get(case, {"compute_dtype": "bfloat16"})
    counts = (count_logprobs if case == LOGPROBS else count_update)(1, settings)
    assert counts["aten calls"] > 100
    assert counts["copies to the device"] == 1
    assert counts["synchronizations"] == 0
