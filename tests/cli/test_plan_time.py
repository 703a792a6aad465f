"""`flowrl plan --time` prints times that follow from FLOPs, bytes and rates, or a one-line error with exit code 2."""

import re
from pathlib import Path

import pytest

from flowrl.cli import main
from tests.errors import missing_facts

ROOT = Path(__file__).parents[2]
ARITHMETIC = str(ROOT / "recipes/grpo/arithmetic.yaml")
GRPO = str(ROOT / "recipes/grpo/qwen1.5b.yaml")
REFERENCE = ("actor.kl_loss_coef=0.001", "placement.roles.reference=main")
ONE_UPDATE = ("batch_size=512", "minibatch_size=512", "algorithm.correction=null")
FAST = ("actor.engine.gradient_checkpointing=false", "actor.engine.max_tokens_per_microbatch=8192")


def test_the_printed_times_are_those_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen2.5-1.5B on an H100: 512 rows of 200 + 1,024 tokens, one update, and a reference."""
    arguments = ["--devices", "1", "--gpu", "h100", "--time", "--prompt-tokens", "200"]
    assert main(["plan", GRPO, *arguments, *REFERENCE, *ONE_UPDATE, *FAST]) == 0
    output = capsys.readouterr().out
    *_, shown = output.partition("estimated time of a step")
    cells = [re.split(r" {2,}", line) for line in shown.splitlines()]
    seconds = {row[0]: float(row[-2]) for row in cells if len(row) >= 4 and row[-2][0].isdigit()}

    layers = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)
    head, pair, rows = 1536 * 151936, 28 * 4 * 12 * 128, 512
    tokens, pairs = rows * 1224, rows * 1224 * 1225 // 2
    forward = 2 * layers * tokens + 2 * head * rows * 1024 + pair * pairs
    peak, memory = 989e12, 0.65 * 3.35e12
    weights = 2 * 1_543_714_304
    prefills = rows // 4 * (2 * layers * 200 + 2 * head + pair * 200 * 201 // 2) / (0.5 * peak)
    products = 1024 * rows * 2 * (layers + head) / (0.5 * peak)
    assert products > 1024 * weights / memory  # so decode steps do not wait for the weights
    cache = rows * (1024 * 200 + 1024 * 1025 // 2) * 28 * 2 * 256 * 2 / memory
    update = (3 * forward + 2 * head * rows * 1024) / (0.4 * peak) + 28 * 1_543_714_304 / memory
    expected = {
        "generation": prefills + products + cache + 1024 * 0.002,
        "switch": 2 * weights / (0.8 * 64e9),
        "log-probabilities of reference": forward / (0.4 * peak),
        "update of actor": update,
        "weight sync": weights / (0.17 * 3.35e12 / 4),
    }
    assert seconds == {name: round(value, 1) for name, value in (expected | {"step": sum(expected.values())}).items()}
    assert f"{rows * 1024 / sum(expected.values()):,.0f} response tokens/s" in shown
    assert "not measured" in shown and "1,024 response tokens" in shown and "all of 80.0" in output


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ((GRPO, "--devices", "1", "--time"), ("--time", "--gpu", "h100", "h200", "a100")),
        ((ARITHMETIC, "--time"), ("--time", "CPUs", "--gpu", "--devices")),
        ((ARITHMETIC, "--gpu", "h100"), ("--gpu", "h100", "placement.device", "cuda")),
        ((str(ROOT / "placement/split.yaml"), "--time"), (str(ROOT / "placement/split.yaml"), "--time")),
        ((GRPO, "--devices", "1", "--response-tokens", "5"), ("--response-tokens", "--time")),
        (
            (GRPO, "--devices", "1", "--gpu", "h100", "--time", "--response-tokens", "1025"),
            ("--response-tokens", "1025", "rollout.max_response_tokens", "1024"),
        ),
        ((GRPO, "--devices", "1", "--gpu", "h100", "placement.memory_gb=20"), ("20.0", "GB")),
    ],
    ids=["unknown GPU", "CPUs", "GPU and CPUs", "placement", "length without time", "long", "memory"],
)
def test_an_invalid_request_is_one_sentence(
    arguments: tuple[str, ...], facts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not missing_facts(captured.err, *facts)


@pytest.mark.parametrize("option", [("--gpu", "b200"), ("--prompt-tokens", "0")])
def test_an_invalid_option_ends_with_code_two(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", GRPO, "--time", *option])
    assert caught.value.code == 2 and not missing_facts(capsys.readouterr().err, *option)


def test_the_gpu_gives_the_memory_and_the_number_of_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, memory, num_seqs in (("h200", "141.0", "1,024*"), ("a100", "80.0", "256*")):
        assert main(["plan", GRPO, "--devices", "1", "--gpu", gpu]) == 0
        output = capsys.readouterr().out
        assert f"all of {memory}" in output and num_seqs in output and "estimated time" not in output
