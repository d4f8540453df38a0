"""The seeded load: prompts and the tokens that answer them, whose topics change over the rounds.

The answers are given, not sampled: an engine that is asked for their log-probabilities decodes
along them, and two engines can be compared token by token however they differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_TOPICS = 8
RESERVED = 64  # tokens of no topic
VOCABULARY = 4096
OFF_TOPIC = 0.15  # of the tokens of a prompt


def topic_tokens(topic: int) -> range:
    """The tokens of a topic."""
    width = (VOCABULARY - RESERVED) // NUM_TOPICS
    return range(RESERVED + topic * width, RESERVED + (topic + 1) * width)


@dataclass(frozen=True)
class Load:
    """Prompts with their answers, by number. A round has prompts of one topic for all ranks."""

    num_prompts: int
    per_round: int
    prompt_tokens: int
    answer_tokens: int
    rounds_of_topic: int
    seed: int

    @property
    def num_rounds(self) -> int:
        """Rounds until each prompt was served once."""
        return -(-self.num_prompts // self.per_round)

    def topic_of(self, turn: int) -> int:
        """The topic of a round; a topic never follows itself."""
        order = np.random.default_rng((self.seed, 1)).permutation(NUM_TOPICS)
        return int(order[turn // self.rounds_of_topic % NUM_TOPICS])

    def numbers_of(self, turn: int, rank: int, ranks: int) -> list[int]:
        """The numbers of the prompts that a rank serves in a round; the load repeats."""
        first = turn % self.num_rounds * self.per_round
        last = min(first + self.per_round, self.num_prompts)
        return list(range(first + rank, last, ranks))

    def tokens_of(self, number: int) -> tuple[list[int], list[int]]:
        """Prompt and answer."""
        drawn = np.random.default_rng((self.seed, 2, number))
        tokens = topic_tokens(self.topic_of(number // self.per_round))
        size = self.prompt_tokens + self.answer_tokens
        text: NDArray[np.int64] = drawn.integers(tokens.start, tokens.stop, size)
        strays = drawn.random(size) < OFF_TOPIC
        text[strays] = drawn.integers(RESERVED, VOCABULARY, strays.sum())
        return text[: self.prompt_tokens].tolist(), text[self.prompt_tokens :].tolist()
