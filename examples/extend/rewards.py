"""A reward: `--reward rewards.py:close`."""

import re


def close(completion: str, answer: str, prompt: str, **row: object) -> float:
    """Return 1 for the right number, and less the further away the last number is."""
    numbers = re.findall(r"-?\d+", completion)
    return 1 / (1 + abs(int(numbers[-1]) - int(answer))) if numbers else 0.0
