import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flowrl.rewards import math as math_reward
from flowrl.rewards.math import extract_answer, score

EQUAL = [
    (r"so \boxed{\frac{1}{2}}.", "1/2"),
    (r"\boxed{0.5}", r"\frac12"),
    (r"\boxed{1\frac12}", "3/2"),
    ("The answer is 12.", 12),
    ("It is 3", 3.0),
    ("It is 0.0000001", 1e-7),
    ("#### 20000000000000000", 2e16),
    ("It is 1e3.", "1000"),
    (r"\boxed{1.5e-3}", "0.0015"),
    ("1000", "1e3"),
    ("\u22121e\u22123", "-0.001"),
    ("#### - 3", "-3"),
    ("so x = \u2212 3", "-3"),
    (r"#### - \frac{6}{2}", "-3"),
    (r"\boxed{2e^3}", "2e^3"),
    ("That is 50%", "50%"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{[0,1)}", "[0, 1)"),
    (r"\boxed{x\ge 3}", r"[3,\infty)"),
    (r"\boxed{\{3,1,2\}}", r"\{1,2,3\}"),
    (r"\boxed{1 \text{ or } 2}", "1,2"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{18}", "16 - 7 = <<16-7=9>>9, 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"),
    ("$4.00 + $2.00 = $6.00\n#### 6", "6"),
    ("It costs $18.", "$18"),
    (r"It costs \$18.", "$18"),
    ("$x=5$", "5"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{3}, no, \boxed{4}", "4"),
    (r"\boxed{4} and \boxed{", "4"),
    ("#### 1,234", "1234"),
    (r"\boxed{10\,000}", "10000"),
    (r"\boxed{10{,}000}", "10000"),
    (r"\boxed{2}", r"It is $\boxed{2}$."),
    (r"\boxed{2}", r"First \boxed{1}, then \boxed{2}."),
    (r"\boxed{\sqrt{8}}", r"2\sqrt2"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{-\infty}", r"-\infty"),
    ("\u22123", "-3"),
    (r"\boxed{5 \text{ cm}}", "5"),
    (r"\boxed{\text{Monday}}", "Monday"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\boxed{\frac{2\pi}{4}}", r"\frac{\pi}{2}"),
]

DIFFERENT = [
    (r"\boxed{(0,1)}", "[0, 1)"),
    (r"\boxed{Tuesday}", "Monday"),
    ("#### - 3", "3"),
    (r"\boxed{3}, no, \boxed{4}", "3"),
    (r"\boxed{1,2,3}", "3"),
    (r"\boxed{3.14}", r"\pi"),
    (r"\boxed{-3}", "3"),
    (r"\boxed{12", "13"),
    (r"\boxed{}", "0"),
    ("5", 1e-7),
    ("3", "1e3"),
    ("16", 2e16),
    ("none", "3"),
    ("", "3"),
]


@pytest.mark.parametrize(("response", "answer"), EQUAL)
def test_an_equal_answer_scores_one(response: str, answer: object) -> None:
    assert score(response, answer) == 1.0


@pytest.mark.parametrize(("response", "answer"), DIFFERENT)
def test_a_different_answer_scores_zero(response: str, answer: object) -> None:
    assert score(response, answer) == 0.0


@pytest.mark.parametrize("answer", ["", "  ", "####", None, True, ["3"]])
def test_a_row_without_ground_truth_is_rejected(answer: object) -> None:
    with pytest.raises(ValueError, match="answer"):
        score("3", answer)


def test_only_boxed_ignores_other_answers() -> None:
    assert [score(text, "4", only_boxed=True) for text in (r"\boxed{4}", "4", "#### 4", r"\boxed{4")] == [1, 0, 0, 0]


ADVERSARIAL = {
    "tower of powers": r"\boxed{9^{9^{9^{9}}}}",
    "plain tower": "The answer is 9**9**9**9",
    "factorial": r"\boxed{100000000!}",
    "power of a sum": r"\boxed{(x+y+z)^{500}}",
    "integral": r"\boxed{\int_0^1 e^{x^{x^x}} dx}",
    "sum": r"\boxed{\sum_{n=1}^{10^{9}} n^n}",
    "unclosed boxes": r"\boxed{" * 14_000,
    "unclosed braces": r"\boxed{" + "{" * 100_000,
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 300 + "1" + "}" * 301,
    "nested roots": r"\boxed{" + r"\sqrt{" * 500 + "2" + "}" * 501,
    "parentheses": r"\boxed{" + "(" * 2000 + "1" + ")" * 2000 + "}",
    "digits": "1" * 100_000,
    "boxed digits": r"\boxed{" + "1" * 5000 + "}",
    "numbers": "1 " * 50_000,
    "minus": "1-" * 50_000,
    "dollars": "$" * 100_000,
    "backslashes": "\\" * 100_000,
    "null characters": "\0" * 100_000,
    "surrogates": "\ud800" * 1000,
    "text": "the answer is " * 7000,
}


# An interruption in a callback of a weak reference is printed, and lost. The next one ends the evaluation.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_an_adversarial_response_scores_zero(name: str) -> None:
    assert score(ADVERSARIAL[name], "5", timeout_s=1) == 0.0


def test_an_answer_after_a_long_text_is_read() -> None:
    assert score("1 + 1 = 2\n" * 10_000 + r"\boxed{5}", "5") == 1.0


def test_the_function_works_outside_of_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.extend(score(r"\boxed{\frac12}", text) for text in ("0.5", "0.6")))
    thread.start()
    thread.join()
    assert scores == [1.0, 0.0]


def test_an_answer_that_cannot_be_evaluated_in_time_is_rejected() -> None:
    math_reward._parse_answer.cache_clear()
    with pytest.raises(ValueError, match="answer"):
        score("5", r"\boxed{" + "(" * 2000 + "1" + ")" * 2000 + "}", timeout_s=1)


def rows(split: str) -> list[dict[str, str]]:
    folder = os.environ.get("GSM8K")
    if folder is None:
        pytest.skip("the environment variable GSM8K does not name a folder with GSM8K")
    lines = (Path(folder) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_all_solutions_of_gsm8k_are_correct() -> None:
    wrong = [row["answer"] for row in rows("test") if score(row["answer"], row["answer"]) != 1.0]
    assert wrong == []


def test_a_boxed_answer_of_gsm8k_is_compared_with_its_solution() -> None:
    for row in rows("test"):
        number = row["answer"].rpartition("####")[2].strip()
        assert score(rf"It is \boxed{{{number}}}.", row["answer"]) == 1.0
        assert score(rf"It is \boxed{{{number}1}}.", row["answer"]) == 0.0


def test_a_missing_library_is_reported_with_its_extra() -> None:
    code = (
        "import sys; sys.modules['math_verify'] = sys.modules['reasoning_gym'] = None\n"
        "from flowrl.rewards.reward_function import RewardError, load_reward_function\n"
        "for name in ('math', 'reasoning_gym'):\n"
        "    try: load_reward_function(f'flowrl.rewards.{name}:score')\n"
        "    except RewardError as error: print(\"pip install 'flowrl[rewards]'\" in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 3 x }", "3x"),
        ("so #### 18 ", "18"),
        ("so #### \u2212 3", "-3"),
        ("\\boxed{\u22123}", "-3"),
        ("so 18", None),
    ],
)
def test_the_box_is_the_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer
