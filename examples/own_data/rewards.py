"""A reward of one's own: 1 for the right number, and a little off for every word."""

import re


def brief(completion: str, answer: str, prompt: str, kind: str, **row: object) -> float:
    """Return the reward of one completion. `kind` is a field of the row, like `answer`."""
    numbers = re.findall(r"-?\d+", completion)
    right = numbers[-1:] == [str(answer)]
    return float(right) - 0.01 * len(completion.split())
