import inspect
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from flowrl.config import DataFile
from flowrl.data.reading.generated_rows import generate_lines
from flowrl.rewards.reasoning_gym import EVALUATES_FORMULAS, EVALUATES_LITERALS, _is_formula, extract_answer, score

# A dependency of arc_agi leaves its data file open, and the scorer of pool_matrix warns about answers without numbers.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in (".*arcagi", "loadtxt")]

TASKS = (
    "ab", "arc_agi", "base_conversion", "basic_arithmetic", "binary_matrix", "caesar_cipher", "chain_sum",
    "color_cube_rotation", "complex_arithmetic", "countdown", "family_relationships", "game_of_life", "gcd",
    "isomorphic_strings", "largest_island", "leg_counting", "mini_sudoku", "n_queens", "number_sorting",
    "polynomial_equations", "polynomial_multiplication", "prime_factorization", "puzzle24", "rearc",
    "simple_integration", "spell_backward", "spiral_matrix", "string_insertion", "syllogism", "tower_of_hanoi",
    "word_ladder", "word_sorting", "zebra_puzzles",
)  # fmt: skip

NO_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Tasks with many solutions, whose rows have no reference answer."""


def generate(**tasks: Any) -> dict[str, dict[str, Any]]:
    lines = generate_lines(DataFile.model_validate({"reasoning_gym": tasks, "rows": len(tasks)}))
    return {row["task"]: row for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return generate(**dict.fromkeys((*TASKS, *NO_ANSWER, "intermediate_integration", "pool_matrix"), 1))


@pytest.mark.parametrize("task", TASKS)
def test_the_reference_answer_scores_one_and_others_less(task: str, rows: dict[str, dict[str, Any]]) -> None:
    row = rows[task]
    assert score(f"I think so. <answer>{row['answer']}</answer>", **row) == 1.0
    assert score(row["answer"], **row) == 1.0
    wrong = ("", "nonsense", f"<answer>{row['answer']}</answer> no, <answer>nonsense</answer>")
    assert all(score(response, **row) < 1.0 for response in wrong)


@pytest.mark.parametrize("task", NO_ANSWER)
def test_tasks_without_a_reference_answer_are_scored(task: str, rows: dict[str, dict[str, Any]]) -> None:
    assert "answer" not in rows[task]
    assert 0.0 <= score("nonsense", **rows[task]) < 1.0


def test_the_task_is_found_in_the_metadata(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["leg_counting"]
    assert score(row["answer"], metadata=row["metadata"], answer=row["answer"]) == 1.0


def test_the_scorer_has_the_options_of_the_row() -> None:
    row = generate(puzzle24={"options": {"min_value": 1, "max_value": 6}})["puzzle24"]
    out_of_range = "8 * 3 + 1 - 1"
    assert score(out_of_range, **row) < 1.0
    assert score(out_of_range, **{**row, "task_options": {}}) == 1.0


def test_only_tagged_ignores_an_answer_without_tags(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["leg_counting"]
    assert score(row["answer"], **row, only_tagged=True) == 0.0
    assert score(f"<answer> {row['answer']} </answer>", **row, only_tagged=True) == 1.0


def test_an_unknown_task_is_rejected() -> None:
    with pytest.raises(ValueError, match="no_such_task"):
        score("1", metadata={"source_dataset": "no_such_task"})


@pytest.mark.parametrize("task", sorted(EVALUATES_FORMULAS | EVALUATES_LITERALS))
def test_an_answer_is_not_executed(task: str, tmp_path: Path, rows: dict[str, dict[str, Any]]) -> None:
    row, file = rows[task], tmp_path / "executed"
    for code in (
        f"__import__('pathlib').Path({str(file)!r}).touch()",
        f"open({str(file)!r}, 'w')",
        f"[open({str(file)!r}, 'w')]",
        f"x.__class__(open({str(file)!r}, 'w'))",
    ):
        assert score(f"<answer>{code}</answer>", **row) < 1.0
    assert not file.exists()


def test_all_tasks_that_execute_an_answer_are_known() -> None:
    """A new version of the package may add tasks whose scorer uses `eval`."""
    scorers = {name: inspect.getsource(cls.score_answer) for name, (cls, _) in DATASETS.items()}
    evaluating = re.compile(r"\b(?:eval|exec|sympify|parse_expr|parse_latex|S)\((?!entry)")
    known = EVALUATES_FORMULAS | EVALUATES_LITERALS
    own_parser = {"propositional_logic"}
    assert {name for name, text in scorers.items() if evaluating.search(text)} - own_parser == known


@pytest.mark.parametrize("task", ["boxnet", "countdown", "game_of_life", "pool_matrix", "polynomial_equations"])
@pytest.mark.parametrize("answer", ["[]", "null", "1", "9**9**9**9", "[" * 500, "1/0", "\0", "\ud800", "t" * 100_000])
def test_an_adversarial_answer_scores_less_than_one(task: str, answer: str, rows: dict[str, dict[str, Any]]) -> None:
    assert score(answer, **rows[task], timeout_s=1) < 1.0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["a" * 500 + ".", "1" * 500 + "!", "The answer is " + "x" * 500 + "."])
def test_the_time_to_check_a_formula_is_not_exponential(text: str, rows: dict[str, dict[str, Any]]) -> None:
    assert score(text, **rows["countdown"]) < 1.0


def test_a_formula_has_numbers_operators_and_known_names() -> None:
    assert all(map(_is_formula, ("", "1.5*x + sin(x)/2", "2x**3", "1..5", "(\n8 - .5) ^ 2.", "log(x)y")))
    assert not any(map(_is_formula, ("x.y", "1_000", "..", "ab", "sin2", "_", "x[0]", "log2.", "eval(1)")))


def test_the_function_works_outside_of_the_main_thread(rows: dict[str, dict[str, Any]]) -> None:
    row, scores = rows["countdown"], []
    thread = threading.Thread(target=lambda: scores.append(score(row["answer"], **row)))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_the_tagged_text_is_the_answer() -> None:
    assert extract_answer("<answer>1</answer> no, <answer> 4 </answer>") == "4"
    assert extract_answer(" 4 ") == "4"
