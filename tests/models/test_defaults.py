"""Keys that config.json leaves out mean what they mean for transformers' class of the model type."""

from __future__ import annotations

import pytest

from rlctl.models.families import FAMILIES, facts_from_hf_config, family
from support.config_defaults import SIZES, differences, written


@pytest.mark.parametrize("name", FAMILIES)
def test_each_key_may_be_left_out_as_for_transformers(name: str) -> None:
    """With the key left out, the facts are those of the file that transformers writes once it has read the rest; or the
    key is named."""
    assert differences(family(name)) == {}


def test_a_key_that_is_null_says_what_null_says() -> None:
    from transformers import MistralConfig

    config = written(MistralConfig(**SIZES, head_dim=32))
    assert facts_from_hf_config(config | {"sliding_window": None}).sliding_window is None
    assert facts_from_hf_config(config | {"head_dim": None}).head_dim == MistralConfig(**SIZES).head_dim
