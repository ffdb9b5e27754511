"""Text from a small probabilistic grammar, with structure that a language model has to learn.

Verbs agree in number with a subject that may be several words back, behind relative clauses within relative clauses;
names made up for one sentence come back in it; sums are right.
"""

# ruff: noqa: SIM905 (lists of words are easier to read as text)

import random

NOUNS = (
    "cat dog bird horse girl king queen farmer sailor teacher doctor painter river mountain garden house boat letter "
    "book song clock window bridge forest stone star lamp road field tower lion rabbit baker singer hunter soldier"
).split()
VERBS = (
    "see know like follow hear need find help fear love call visit answer remember draw keep lead meet want touch "
    "admire paint describe protect surprise"
).split()
MOVES = "sleep sing wait laugh dream work run fall shine wander listen return".split()
ADJECTIVES = (
    "old small green quiet happy tall young clever golden strange gentle bright hungry careful distant simple heavy "
    "silent brave lonely"
).split()
PLACES = "near behind beside above below".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
SYLLABLES = "ta mi ro ke la no su be di va".split()


class Writer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, words: list[str], even: bool = False) -> str:
        """One of the words: the k-th as often as 1 / (k + 2), as words go, or all alike."""
        weights = [1.0 if even else 1 / (k + 3) for k in range(len(words))]
        return self.random.choices(words, weights)[0]

    def verb(self, words: list[str], plural: bool) -> str:
        word = self.pick(words)
        return word if plural else word + ("es" if word.endswith("ch") else "s")

    def noun_phrase(self, plural: bool, depth: int = 0) -> str:
        words = [self.pick(["the", "some", "two", "many"] if plural else ["the", "a certain", "every", "this"])]
        if self.chance(0.4):
            words.append(self.pick(ADJECTIVES))
        words.append(self.pick(NOUNS) + ("s" if plural else ""))
        if depth < 3 and self.chance(0.3):
            words.append(self.relative_clause(plural, depth + 1))
        return " ".join(words)

    def relative_clause(self, plural: bool, depth: int) -> str:
        other = self.chance(0.5)
        if self.chance(0.5):  # the cats that see the dog
            return f"that {self.verb(VERBS, plural)} {self.noun_phrase(other, depth)}"
        return f"that {self.noun_phrase(other, depth)} {self.verb(VERBS, other)}"  # the cats that the dog sees

    def clause(self) -> str:
        plural = self.chance(0.5)
        subject = self.noun_phrase(plural)
        if self.chance(0.4):
            words = f"{subject} {self.verb(MOVES, plural)}"
        else:
            words = f"{subject} {self.verb(VERBS, plural)} {self.noun_phrase(self.chance(0.5))}"
        if self.chance(0.25):
            words += f" {self.pick(PLACES)} {self.noun_phrase(self.chance(0.5))}"
        return words

    def speech(self) -> str:
        name = "".join(self.pick(SYLLABLES, even=True) for _ in range(3)).capitalize()
        return f'{name} said: "{self.clause()}", and {name} {self.verb(MOVES, plural=False)}'

    def total(self) -> str:
        a, b = (self.pick(NUMBERS[:11], even=True) for _ in range(2))
        return f"{a} and {b} make {NUMBERS[NUMBERS.index(a) + NUMBERS.index(b)]}"

    def sentence(self) -> str:
        if self.chance(0.6):
            return self.clause() + "."
        return (self.speech() if self.chance(0.6) else self.total()) + "."


def write(characters: int, seed: int) -> str:
    """A text of at least so many characters."""
    writer = Writer(seed)
    sentences, length = [], 0
    while length < characters:
        sentences.append(writer.sentence())
        length += len(sentences[-1]) + 1
    return "\n".join(sentences) + "\n"


if __name__ == "__main__":
    print(write(1000, seed=0), end="")
