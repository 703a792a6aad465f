"""Identifiers that were renamed to standard terms (docs/glossary.md) do not return."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCANNED = ("flowrl", "recipes", "tests", "docs", "placement", ".ci", "README.md", "pyproject.toml")

REMOVED = """
Attempts Attendants Carried ChoiceConfig FailedCheck FileSum FoundStop Handover Kept Makers OtherChoice Pace Publisher
Pulse RefusedError Residency Revival Revivals Room SharedPart SharesRows StepState Stretches SummedFile Turns Untrained
WholeBatches WholeGradients _Asked _Kept _Lane _LinkedWay _Made _Maker _Order _Places _SharedWay _Summed _Wanted _Way
_actor_beside _agree _answered _answers _ask _ask_driver _attend _attend_on_gpu _become _check_apart _check_beside
_connection_lost _cut_layers _cuts _deliver _end_late _end_with _forget _free_places _give _gives _goes_on _happens
_have_newest _hear _is_held _lacking _leave _leave_early _lends _load_whole _looked_at _lost_as_late _may_take
_not_plain _one_each _park _places _refusal _refuse_again _refuse_cuts _refuse_other_settings _refuse_scaled_logits
_refuse_settings_of_cuts _refuse_without_rows _residency _rooms _rows_taken _saves_nothing _say _settle_one
_settled_text _speak _steers _stretches_of_all_heads _taken _takes _tell _tell_lost _tell_lost_processes _tell_refused
_tell_unreached _told _told_to_driver _unfit _wanted_pools _wanted_roles _way _way_between _where_it_lies _whole_batches
adapter_off any_whole appears_whole at_home beside_driver borrowed_weights brings_back caps_attention catch_up
check_whole chunk_mb cut_layers cuts_model deliver drop_whole_weights end_with_leader end_with_run ends_with
for_cut_models goes_on goes_to_all hand_over in_turns input_sums is_cut is_there is_too_slow is_whole join_link
keep_rows kept_rows lanes_of leaves_devices leaves_for leaves_when_idle lenders lends_copies lends_weights_to lives_in
lives_with loss_options make_room makers_of max_row_tokens max_rows minibatch_rows next_number num_lanes open_link
or_broken others_beside own_targets packs_rows pass_on product_by_parts publish recognize redundancy refuse_changed_base
refuse_changed_inputs refuse_if_held refuse_if_taken refuse_lower_weights refuse_running refuse_wrong relocate
rows_per_step settle settle_batch settle_states shaping_columns shares_model standing start_again step_state steps_asked
sums_of_rest take_back take_whole takes_one_by_one tell_ended uncut_layers untrained_state unwritable waited_for_weights
went_well whole_rows whole_tensor whole_weights why_padded write_json_summed write_summed yields_device
""".split()  # noqa: SIM905 (a literal would have one line per name)
"""Names of classes, functions and settings. Removed names that are also common words (Draws, Examples, Streaming,
Version, keep, project) are not listed."""

EXCEPTIONS = {
    f"flowrl/config/error_messages.py:{name}": "the table that maps removed settings to new ones"
    for name in (
        "chunk_mb",
        "loss_options",
        "max_row_tokens",
        "max_rows",
        "minibatch_rows",
        "redundancy",
        "rows_per_step",
    )
}
"""path:name -> reason."""

_REMOVED_NAME = re.compile(rf"\b({'|'.join(REMOVED)})\b")


def text_files(path: Path) -> list[Path]:
    """Returns a file, or all source and documentation files of a folder, except this one."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [
        file
        for file in files
        if file.is_file()
        and file != Path(__file__)
        and (file.suffix in (".py", ".md", ".yaml", ".sh", ".toml") or file.parent.name == ".ci")
    ]


@pytest.mark.parametrize("scanned", SCANNED)
def test_removed_names_are_not_used(scanned: str) -> None:
    files = text_files(ROOT / scanned)
    assert files, f"{scanned} has no files"
    uses = {
        f"{file.relative_to(ROOT).as_posix()}:{name}"
        for file in files
        for name in _REMOVED_NAME.findall(file.read_text())
    }
    assert sorted(uses - EXCEPTIONS.keys()) == []
