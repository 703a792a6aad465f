"""Settings of PTX, the language modeling on text in policy updates."""

import pytest
from pydantic import ValidationError

from flowrl.config import PtxConfig
from tests.errors import missing_facts

TEXT = {"data": "text.jsonl", "batch_size": 4, "max_tokens": 32}


def test_a_sum_takes_any_weight_and_a_mix_at_most_one() -> None:
    assert PtxConfig.model_validate(TEXT | {"coef": 27.8}).form == "add"
    assert PtxConfig.model_validate(TEXT | {"coef": 1.0, "form": "mix"}).coef == 1.0
    with pytest.raises(ValidationError) as failure:
        PtxConfig.model_validate(TEXT | {"coef": 1.5, "form": "mix"})
    assert not missing_facts(str(failure.value), "coef", "1.5", "mix", "add")


@pytest.mark.parametrize("changes", [{"coef": -1.0}, {"coef": 1.0, "batch_size": 0}, {"coef": 1.0, "form": "sum"}, {}])
def test_a_wrong_or_missing_setting_is_rejected(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PtxConfig.model_validate(TEXT | changes)
