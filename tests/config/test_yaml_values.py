"""Scalars as YAML 1.2 spells them."""

from __future__ import annotations

import math

import pytest

from rlctl.config.yaml_values import parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8), ("-1", -1), ("0x10", 16), ("1_000", 1000), ("1e-5", 1e-5), ("1.5", 1.5), (".5", 0.5), ("1.", 1.0),
        ("-.inf", -math.inf), ("true", True), ("False", False), ("null", None), ("None", None), ('"None"', "None"),
        ("~", None), ("", None),
        ("off", "off"), ("yes", "yes"), ("no", "no"), ("010", 10), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
        ("'8'", "8"), ("[1, a]", [1, "a"]), ("{a: 1}", {"a": 1}), ("[unclosed", "[unclosed"), ("a: b: c", "a: b: c"),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)
