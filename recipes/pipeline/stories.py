"""A grammar of small stories: a hero loses an object, and an animal helps. Some stories have defects.

A story follows a prompt such as "Tell a story about Tom and a red ball in the park." The seed determines all stories.
"""

import random
import re
from dataclasses import dataclass

BOYS = ("Tom", "Ben", "Max", "Sam", "Leo", "Tim", "Jack", "Noah")
GIRLS = ("Lily", "Mia", "Anna", "Sue", "Zoe", "Lucy", "Ella", "Kate")
COLORS = ("red", "blue", "green", "yellow", "white", "pink", "brown", "purple")
OBJECTS = ("ball", "kite", "boat", "hat", "book", "drum", "doll", "cup", "scarf", "bag")
PLACES = ("park", "garden", "forest", "school", "farm", "village")
ANIMALS = ("dog", "cat", "fox", "bear", "duck", "mouse", "horse", "rabbit")


@dataclass(frozen=True, order=True)
class Prompt:
    """The subject of a story."""

    name: str
    color: str
    object: str
    place: str

    @property
    def text(self) -> str:
        return f"Tell a story about {self.name} and a {self.color} {self.object} in the {self.place}."

    @staticmethod
    def parse(text: str) -> "Prompt":
        """Returns the prompt with this text."""
        match = re.fullmatch(r"Tell a story about (\w+) and a (\w+) (\w+) in the (\w+)\.", text)
        assert match is not None, text
        return Prompt(*match.groups())


@dataclass(frozen=True)
class Problem:
    """A problem with the object (`event`), and its solution by an animal. Both texts contain `{thing}`."""

    event: str
    solution: str


PROBLEMS = (
    Problem("The wind blew the {thing} into a tree.", "climbed up and got the {thing}"),
    Problem("Then the {thing} fell into the water.", "jumped in and got the {thing}"),
    Problem("Soon the {thing} broke into two parts.", "fixed the {thing} with glue"),
    Problem("Then the {thing} was full of mud.", "washed the {thing} with soap"),
    Problem("A bird hid the {thing} in the ground.", "dug a hole and found the {thing}"),
    Problem("It got dark and the {thing} was lost.", "looked for the {thing} with a lamp"),
)

OPENINGS = (
    "{name} took a {color} {thing} to the {place}.",
    "{name} went to the {place} with {his} {color} {thing}.",
    "In the {place}, {name} played with {his} {color} {thing}.",
)
FEELINGS = ("{name} was very sad.", "{name} began to cry.", "What could {he} do?")
HELPERS = ("A kind {animal} wanted to help.", "{He} met a {animal}.")
THANKS = '"Thank you!" said {name}.'
ENDINGS = (
    "{name} was happy and hugged {his} {color} {thing}.",
    "In the end, {he} went home with {his} {color} {thing}.",
)

DEFECTS = {
    "name": 0.3,
    "object": 0.3,
    "solution": 0.35,
    "animal": 0.25,
    "repetition": 0.3,
    "pronoun": 0.2,
    "ending": 0.2,
    "thanks": 0.5,
}
"""Probability of each defect of a story. The defects are independent."""


def all_prompts(seed: int) -> list[Prompt]:
    """Returns all 7,680 prompts in a random order that the seed determines."""
    prompts = [Prompt(n, c, o, p) for n in BOYS + GIRLS for c in COLORS for o in OBJECTS for p in PLACES]
    random.Random(seed).shuffle(prompts)
    return prompts


def tell(prompt: Prompt, generator: random.Random) -> str:
    """Returns a story with random sentences and random defects."""
    return tell_with(prompt, {name for name, rate in DEFECTS.items() if generator.random() < rate}, generator)


def tell_with(prompt: Prompt, defects: set[str], generator: random.Random) -> str:
    """Returns a story with exactly these defects, which are keys of DEFECTS."""
    problem, helper = generator.choice(PROBLEMS), generator.choice(ANIMALS)
    solution, solver, later = problem.solution, helper, prompt.name
    color, thing = prompt.color, prompt.object
    if "solution" in defects:
        solution = generator.choice([other.solution for other in PROBLEMS if other != problem])
    if "animal" in defects:
        solver = generator.choice([animal for animal in ANIMALS if animal != helper])
    if "name" in defects:
        later = generator.choice([name for name in BOYS + GIRLS if name != prompt.name])
    if "object" in defects:
        color, thing = generator.choice(COLORS), generator.choice([other for other in OBJECTS if other != thing])

    first = _words(prompt.name, prompt, "pronoun" in defects) | {"animal": helper}
    second = _words(later, prompt, "pronoun" in defects)
    sentences = [
        generator.choice(OPENINGS).format(**first),
        problem.event.format(**first),
        generator.choice(FEELINGS).format(**first),
        generator.choice(HELPERS).format(**first),
        f"The {solver} {solution.format(**first)}.",
    ]
    if "thanks" not in defects:
        sentences.append(THANKS.format(**second))
    if "ending" not in defects:
        sentences.append(generator.choice(ENDINGS).format(**second | {"color": color, "thing": thing}))
    if "repetition" in defects:
        index = generator.randrange(1, len(sentences))
        sentences.insert(index, sentences[index])
    return " ".join(sentences)


def _words(name: str, prompt: Prompt, swaps_pronouns: bool) -> dict[str, str]:
    he, his = ("he", "his") if (name in BOYS) != swaps_pronouns else ("she", "her")
    places = {"color": prompt.color, "thing": prompt.object, "place": prompt.place}
    return {"name": name, "he": he, "He": he.capitalize(), "his": his} | places
