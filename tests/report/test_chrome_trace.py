"""`trace.json`: Chrome trace format, round trip, resumes, errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from flowrl.checkpoints.run_folder import write_json
from flowrl.data.events import MAX_COUNTS, CallEvent, Counted
from flowrl.report.chrome_trace import Resume, Trace, TraceError, chrome_trace, read_trace
from tests.report.call_events import STEP, any_events, call, timed

EVENTS = [
    call("actor", 10_000, 60_000),
    call("critic", 20_000, 80_000, device="cpu:1", pool="second"),
    call("actor", 70_000, 90_000),
    call("reward", 30_000, 40_000, rank=1, device="cpu:1", pool="second"),
]


def test_a_trace_has_a_process_per_device_and_a_thread_per_role_and_rank() -> None:
    labels = [event for event in chrome_trace(EVENTS)["traceEvents"] if event["name"].endswith("_name")]
    names = [(label["name"], label["args"]["name"], label["pid"]) for label in labels]
    assert names == [
        ("process_name", "main node0/cpu:0", 1),
        ("process_name", "second node0/cpu:1", 2),
        ("thread_name", "actor 0", 1),
        ("thread_name", "critic 0", 2),
        ("thread_name", "reward 1", 2),
    ]


def test_a_trace_counts_microseconds_from_the_first_submission() -> None:
    calls = [event for event in chrome_trace(EVENTS)["traceEvents"] if event["ph"] == "X"]
    assert [(event["cat"], event["ts"], event["dur"]) for event in calls] == [
        ("actor", 1.0, 50.0),
        ("critic", 11.0, 60.0),
        ("reward", 21.0, 10.0),
        ("actor", 61.0, 20.0),
    ]


def test_a_call_has_its_wait_queue_and_transfer_times() -> None:
    (values,) = (event for event in chrome_trace(STEP)["traceEvents"] if event["name"] == "values")
    waited = {name: values["args"][name] for name in ("wait_ms", "queue_ms", "transfer_ms")}
    assert waited == {"wait_ms": 49e-6, "queue_ms": 17e-6, "transfer_ms": 4e-6}


def test_an_arrow_leads_from_the_last_input_to_the_call() -> None:
    trace = chrome_trace(STEP)["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    arrows = [event for event in trace if event["ph"] in ("s", "f") and event["id"] == 4]
    assert [(arrow["ph"], threads[arrow["tid"]], arrow["ts"]) for arrow in arrows] == [
        ("s", "critic 0", 0.094),
        ("f", "actor 0", 0.104),
    ]


def test_a_trace_is_json_and_one_without_calls_is_empty() -> None:
    assert json.loads(json.dumps(chrome_trace(EVENTS))) == chrome_trace(EVENTS)
    assert chrome_trace([])["traceEvents"] == []


def test_thread_numbers_are_unique_over_all_processes() -> None:
    threads = [event["tid"] for event in chrome_trace(EVENTS)["traceEvents"] if event["name"] == "thread_name"]
    assert len(set(threads)) == len(threads)


@given(any_events(one_clock=False))
def test_events_survive_a_round_trip(tmp_path_factory: pytest.TempPathFactory, events: list[CallEvent]) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.json"
    write_json(path, chrome_trace(events), indent=None)
    assert read_trace(path).events == sorted(events, key=lambda event: event.number)


def test_nanoseconds_and_node_names_survive_a_round_trip(tmp_path: Path) -> None:
    now_ns = 1_795_000_000_123_456_789
    event = CallEvent(7, (1, 2), "actor", 3, "host-a", "cuda:1", "main", "update", *range(now_ns, now_ns + 5))
    write_json(tmp_path / "trace.json", chrome_trace([event, replace(event, number=8, node=1)]), indent=None)
    assert read_trace(tmp_path).events == [event, replace(event, number=8, node=1)]


def test_the_time_until_which_calls_are_missing_survives_a_round_trip(tmp_path: Path) -> None:
    write_json(tmp_path / "trace.json", chrome_trace(EVENTS, dropped_until_ns=7), indent=None)
    assert read_trace(tmp_path).dropped_until_ns == 7
    of_an_earlier_version = {name: value for name, value in chrome_trace(EVENTS).items() if name != "otherData"}
    write_json(tmp_path / "trace.json", of_an_earlier_version, indent=None)
    assert read_trace(tmp_path).dropped_until_ns == 0


def saved(number: int, at_s: float) -> CallEvent:
    """Returns a `save_checkpoint` call that was submitted at a time."""
    at_ns = int(at_s * 1e9)
    return timed(number, "actor.save_checkpoint", "cpu:0", (at_ns, at_ns, at_ns, at_ns, at_ns))


def test_a_resumed_run_keeps_the_trace_up_to_its_checkpoint(tmp_path: Path) -> None:
    first = Trace([*STEP, saved(6, 2), replace(STEP[0], number=7), saved(8, 5), replace(STEP[0], number=9)])
    write_json(tmp_path / "trace.json", chrome_trace(first.events), indent=None)
    previous = read_trace(tmp_path).up_to_save(saved_at_s=4.5)
    assert [event.number for event in previous.events] == [1, 2, 3, 4, 5, 6]
    second = previous.followed_by([*STEP, saved(6, 9)], step=1)
    write_json(tmp_path / "trace.json", chrome_trace(second.events, second.resumes), indent=None)
    again = read_trace(tmp_path)
    assert [event.number for event in again.events] == list(range(1, 13)) and again.resumes == [Resume(7, 1)]
    assert [event.inputs for event in again.last_process()] == [(), (7,), (7,), (8, 9), (), ()]
    third = again.up_to_save(saved_at_s=10).followed_by(STEP, step=2)
    assert third.resumes == [Resume(7, 1), Resume(13, 2)] and len(third.last_process()) == len(STEP)
    assert again.up_to_save(saved_at_s=4.5).resumes == []


def test_a_resume_is_an_instant_event() -> None:
    trace = Trace(STEP).followed_by([replace(event, submitted_ns=1_000) for event in STEP], step=3)
    (mark,) = (entry for entry in chrome_trace(trace.events, trace.resumes)["traceEvents"] if entry["ph"] == "i")
    assert (mark["name"], mark["s"], mark["ts"]) == ("resumed from step 3", "g", 1.0)


def test_a_process_without_calls_has_no_resume_event() -> None:
    assert Trace(STEP).followed_by([], step=3).resumes == []


def without(name: str) -> str:
    """Returns a trace file whose calls lack an argument."""
    return json.dumps(chrome_trace(STEP)).replace(f'"{name}"', '"other"')


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("not json", ""),
        ("[1, 2]", ""),
        ("{}", "traceEvents"),
        (without("submitted_ns"), "submitted_ns"),
        (json.dumps(chrome_trace(STEP)).replace('"rank": 0', '"rank": "0"'), ""),
    ],
)
def test_other_files_are_rejected(tmp_path: Path, text: str, missing: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path)
    assert f"{tmp_path}/trace.json" in str(caught.value) and missing in str(caught.value)


def test_a_folder_without_a_trace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.json"):
        read_trace(tmp_path)


def test_samples_of_group_counts_are_bounded_over_resumes() -> None:
    trace = Trace(EVENTS)
    for start in (0, 1, 2):
        trace = trace.counted(Counted(start * MAX_COUNTS + i, {"waiting": 1}) for i in range(MAX_COUNTS))
    assert [trace.counts[0].at_ns, trace.counts[-1].at_ns] == [2 * MAX_COUNTS, 3 * MAX_COUNTS - 1]
