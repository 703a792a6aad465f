"""Creates starts of Nim, random games, a byte tokenizer, and a small untrained model.

Usage: `python -m recipes.games.prepare --output DIR --seed 0`
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.games.nim import Piles, moves, show, starts
from recipes.quickstart.prepare import create_folder, run_prepare, write_lines
from recipes.reasoning.prepare import CHAT_TEMPLATE, save_byte_model

MAX_TOKENS = 256
NUM_EXAMPLES, NUM_GAMES, NUM_HELD_OUT_GAMES = 8_000, 12_000, 600


def prepare(output: Path, seed: int) -> bool:
    """Creates the folder `output` and returns True. Returns False if the folder exists.

    Writes `sft.jsonl` (games with random moves), `train.jsonl` and `test.jsonl` (starts with the columns `piles` and
    `seed`; the seeds of the files differ), and `model/` (weights, config, tokenizer).
    """

    def write(folder: Path) -> None:
        generator, first_seed = random.Random(seed), 2 * 10**6 * seed
        games = [_random_game(generator.choice(starts()), generator) for _ in range(NUM_EXAMPLES)]
        write_lines(folder / "sft.jsonl", games)
        for name, num_games, first in (
            ("train", NUM_GAMES, first_seed),
            ("test", NUM_HELD_OUT_GAMES, first_seed + 10**6),
        ):
            rows = [_start(generator.choice(starts()), first + game) for game in range(num_games)]
            write_lines(folder / f"{name}.jsonl", rows)
        save_byte_model(folder / "model", seed, CHAT_TEMPLATE, max_tokens=MAX_TOKENS)

    return create_folder(output, write)


def _start(piles: Piles, seed: int) -> dict:
    return {"messages": [{"role": "user", "content": show(piles)}], "piles": piles, "seed": seed}


def _random_game(start: Piles, generator: random.Random) -> dict:
    """Returns the conversation of a game in which both players make random moves. It ends with a move of the policy."""
    piles, turns = list(start), []
    while any(piles):
        turns.append({"role": "user", "content": show(piles)})
        for player in ("assistant", "opponent"):
            if any(piles):
                pile, quantity = generator.choice(moves(piles))
                piles[pile] -= quantity
                if player == "assistant":
                    turns.append({"role": player, "content": f"[{pile} {quantity}]"})
    return {"messages": turns}


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Creates starts of Nim, random games, a tokenizer and a small model."
    return run_prepare("games", description, "the starts, the games and the initial weights", prepare, arguments)


if __name__ == "__main__":
    sys.exit(main())
