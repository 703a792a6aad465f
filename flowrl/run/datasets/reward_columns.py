"""Checks that the rows of a dataset have the columns that the rewards of a run need."""

import logging
from collections.abc import Iterable, Sequence

from flowrl.config import RewardComponent
from flowrl.data.messages import Conversation, DataError
from flowrl.data.prompts import RESERVED_COLUMNS, PromptStream
from flowrl.rewards.reward_function import (
    RewardError,
    load_reward_function,
    optional_parameters,
    required_parameters,
)

_logger = logging.getLogger(__name__)

RESPONSE_COLUMNS = ("prompt", "response", "tagged_response", "conversation", "token_ids", "finish_reason")
"""Columns that flowrl writes and that a reward function can receive."""


def required_columns(component: RewardComponent) -> tuple[str, ...]:
    """Returns the dataset columns that a reward requires. A reward model or judge requires none.

    Raises RewardError if a function requires a column that it cannot receive.
    """
    if component.function is None:
        return ()
    parameters = required_parameters(load_reward_function(component.function))
    own = [name for name in parameters if name not in component.options]
    for name in own:
        if name in RESERVED_COLUMNS and name not in RESPONSE_COLUMNS:
            raise RewardError(
                f"reward function {component.function} requires {name}, which a reward does not receive: use "
                f"{', '.join(RESPONSE_COLUMNS)}, answer, or columns of the dataset"
            )
    return tuple(name for name in own if name not in (*RESERVED_COLUMNS, *RESPONSE_COLUMNS))


def columns_of_all_rows(components: Sequence[RewardComponent]) -> tuple[str, ...]:
    """Returns the dataset columns that every row must have, because a reward without `data_sources` requires them."""
    return tuple(name for part in components if part.data_sources is None for name in required_columns(part))


def check_columns(components: Sequence[RewardComponent], prompts: PromptStream, files: str) -> None:
    """Checks the rows of a dataset, and warns of parameters that never receive a column.

    Raises DataError if no reward applies to the data source of a row, if a row lacks a column of a reward that applies,
    or if a reward has the name of a column or a reserved name.
    """
    for part in components:
        if part.name in RESERVED_COLUMNS and len(components) > 1:
            raise DataError(f"reward.components has the name {part.name}, which flowrl uses: rename the reward")
        if part.name in prompts.columns and len(components) > 1:
            raise DataError(
                f"reward.components has the name {part.name}, which is a column of {files}: rename the reward"
            )
        _warn_of_parameters_without_column(part, prompts, files)
    if any(part.data_sources is not None for part in components):
        needs = {part.name: required_columns(part) for part in components}
        _check_routes(components, needs, prompts.conversations)


def _check_routes(
    components: Sequence[RewardComponent], needs: dict[str, tuple[str, ...]], rows: Iterable[Conversation]
) -> None:
    known = sorted({source for part in components for source in part.data_sources or ()})
    for row in rows:
        source = row.columns.get("data_source")
        applied = [part for part in components if part.applies_to(source)]
        if not applied:
            raise DataError(
                f"{row.location}: data_source is {source!r}, but no reward applies to it: add it to data_sources of a "
                f"reward (they have {', '.join(known)})"
            )
        for part in applied:
            if missing := [name for name in needs[part.name] if row.columns.get(name) is None]:
                raise DataError(
                    f"{row.location}: the row has no {missing[0]}, which reward {part.name} ({part.function}) "
                    f"requires: add the column, or exclude data_source {source!r} from its data_sources"
                )


def _warn_of_parameters_without_column(part: RewardComponent, prompts: PromptStream, files: str) -> None:
    """Logs a warning if no column provides a reward function's parameter with a default, as after a typo.

    Does not warn of keyword-only parameters, which are options, or of parameters of flowrl's own functions.
    """
    if part.function is None or part.function.startswith("flowrl."):
        return
    parameters = optional_parameters(load_reward_function(part.function))
    received = (*RESPONSE_COLUMNS, *prompts.columns)
    if missing := [name for name in parameters if name not in (*received, *part.options)]:
        _logger.warning(
            "reward function %s always receives the default of %s, because no column of %s has this name: rename the "
            "parameter if it should receive one of %s, or set it in options",
            part.function,
            ", ".join(missing),
            files,
            ", ".join(received),
        )
