"""Creates starts of Nim, random games, a byte tokenizer, and a small untrained model.

Usage: `python -m recipes.games.prepare --output DIR --seed 0`
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.checkpoints.run_folder import replacing
from flowrl.cli.command_parser import CommandParser
from recipes.games.nim import Piles, moves, show, starts
from recipes.quickstart.prepare import save_model, save_tokenizer
from recipes.reasoning.prepare import BYTES, CHAT_TEMPLATE

NUM_LAYERS, MAX_TOKENS = 3, 256
NUM_EXAMPLES, NUM_GAMES, NUM_HELD_OUT_GAMES = 8_000, 12_000, 600


def prepare(output: Path, seed: int) -> bool:
    """Creates the folder `output` and returns True. Returns False if the folder exists.

    Writes `sft.jsonl` (games with random moves), `train.jsonl` and `test.jsonl` (starts with the columns `piles` and
    `seed`; the seeds of the files differ), and `model/` (weights, config, tokenizer).
    """
    if output.exists():
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    first_seed = 2 * 10**6 * seed
    files = {
        "sft": [_random_game(generator.choice(starts()), generator) for _ in range(NUM_EXAMPLES)],
        "train": [_start(generator.choice(starts()), first_seed + game) for game in range(NUM_GAMES)],
        "test": [_start(generator.choice(starts()), first_seed + 10**6 + game) for game in range(NUM_HELD_OUT_GAMES)],
    }
    with replacing(output) as folder:
        folder.mkdir()
        for name, rows in files.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        save_tokenizer(folder / "model", BYTES, CHAT_TEMPLATE)
        save_model(folder / "model", seed, num_characters=len(BYTES), num_layers=NUM_LAYERS, max_tokens=MAX_TOKENS)
    return True


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
    parser = CommandParser(
        prog="python -m recipes.games.prepare",
        description="Creates starts of Nim, random games, a tokenizer and a small model.",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="seed of the starts, the games and the initial weights")
    options = parser.parse_args(arguments)
    is_created = prepare(options.output, options.seed)
    sys.stdout.write(f"{options.output} {'created' if is_created else 'exists already'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
