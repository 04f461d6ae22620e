"""GSM8K's answers are solutions that end with `#### number`: the reward compares the last numbers."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right(completion: str, answer: str, **row: object) -> float:
    """Return 1 where the completion's last number is that of the solution."""
    found = NUMBER.findall(completion)
    return float(bool(found) and value(found[-1]) == value(answer.rpartition("####")[2].strip()))


def value(text: str) -> float:
    return float(text.replace(",", ""))
