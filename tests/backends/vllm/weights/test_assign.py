"""Which tensors are written directly, which go through the loader, and which modules that takes out of use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.backends.vllm.weights.assign import BESIDE, MODEL, UNMATCHED, Assignment, assign
from rlctl.backends.vllm.weights.locate import Storage, StoredMatrices, StoredMatrix
from rlctl.weights.vllm import MatrixPart

WHY = "is quantized"


def matrix(
    path: str, *tensors: str, parameter: str = "weight", storage: Storage = Storage.PLAIN, **kinds: object
) -> StoredMatrix:
    parts = tuple(MatrixPart(name, (4 * len(tensors), 2), (4 * i, 0), 4 * i, 4) for i, name in enumerate(tensors))
    return StoredMatrix(path, parameter, parts, 2, module=None, storage=storage, **kinds)


def layer(number: int) -> list[StoredMatrix]:
    """A decoder layer whose fused projection has a bias."""
    at = f"model.layers.{number}"
    return [
        matrix(f"{at}.attn.qkv_proj", *(f"{at}.attn.{x}_proj.weight" for x in "qkv"), storage=Storage.REPACKED),
        matrix(f"{at}.attn.qkv_proj", *(f"{at}.attn.{x}_proj.bias" for x in "qkv"), parameter="bias"),
        matrix(f"{at}.attn.o_proj", f"{at}.attn.o_proj.weight"),
        matrix(f"{at}.norm", f"{at}.norm.weight"),
    ]


MATRICES = [matrix("embed", "embed.weight"), *layer(0), *layer(1)]
TENSORS = [part.tensor for one in MATRICES for part in one.parts]


def assigned(
    every: list[StoredMatrix],
    *unclear: tuple[str, str],
    tensors: list[str] = TENSORS,
    unknown: tuple[str, ...] = (),
    alone: bool = True,
    elsewhere: tuple[str, ...] = (),
) -> Assignment:
    """The assignment of a model of which the matrices (path, parameter) are of unknown storage."""
    found = [one for one in every if (one.path, one.parameter) not in unclear]
    hidden = [replace(one, why_unknown=WHY) for one in every if (one.path, one.parameter) in unclear]
    return assign(StoredMatrices(found, hidden, {}, unknown), tensors, alone=alone, elsewhere=elsewhere)


def test_everything_is_direct_where_all_is_known() -> None:
    found = assigned(MATRICES)
    assert (found.path, found.loaded, found.reloaded) == ("direct", {}, ())
    assert list(found.direct) == MATRICES


def test_a_module_is_loaded_with_all_its_tensors_and_nothing_else_is() -> None:
    qkv = "model.layers.1.attn.qkv_proj"
    found = assigned(MATRICES, (qkv, "weight"))
    assert found.path == "mixed"
    assert found.reloaded == found.unknown_storage == (qkv,)
    at = "model.layers.1.attn"
    assert found.loaded == {f"{at}.{x}_proj.weight": f"its parameter {WHY}" for x in "qkv"} | {
        f"{at}.{x}_proj.bias": BESIDE for x in "qkv"
    }
    assert {one.path for one in found.direct} == {one.path for one in MATRICES} - {qkv}
    ways = {tensor: (one.path, one.reason) for one in found.routes() for tensor in one.tensors}
    assert set(ways) == set(TENSORS)
    assert ways["model.layers.0.attn.q_proj.weight"] == ("direct", "packed again for the processor's matrix products")


def test_a_tensor_of_two_modules_takes_both() -> None:
    head = matrix("lm_head", "embed.weight", output=True)
    found = assigned([*MATRICES, head], ("embed", "weight"))
    assert found.reloaded == ("embed", "lm_head")
    assert set(found.loaded) == {"embed.weight"}
    assert found.unknown_storage == ()  # either may be filled with the other


def test_what_is_made_of_a_loaded_tensor_is_neither_written_nor_reloaded() -> None:
    made = matrix("model.layers.0.attn.kernel", "model.layers.0.attn.o_proj.weight", derived=True)
    found = assigned([*MATRICES, made], ("model.layers.0.attn.o_proj", "weight"))
    assert found.reloaded == ("model.layers.0.attn.o_proj",)
    assert made not in found.direct
    turned = assigned([*MATRICES, made], ("model.layers.0.attn.kernel", "weight"))
    assert (turned.reloaded, turned.unknown_storage) == (("model.layers.0.attn.o_proj",), ())


def test_padding_between_parts_is_left_to_the_loader() -> None:
    norm = MATRICES[-1]
    padded = replace(norm, parts=(replace(norm.parts[0], row=2),))
    assert assigned([*MATRICES[:-1], padded]).reloaded == (norm.path,)


@pytest.mark.parametrize("alone", [True, False])
def test_a_layer_with_a_parameter_nobody_knows_is_loaded_as_a_whole(alone: bool) -> None:
    found = assigned(MATRICES, unknown=("model.layers.1.attn.scale",), alone=alone)
    assert found.reloaded == ("model.layers.1",)
    inside = [name for name in TENSORS if name.startswith("model.layers.1.")]
    assert found.loaded == dict.fromkeys(inside, UNMATCHED)


def test_tensors_that_no_parameter_holds_are_loaded_with_their_layer() -> None:
    found = assigned(MATRICES, tensors=[*TENSORS, "model.layers.0.attn.sinks"])
    assert found.reloaded == ("model.layers.0",)
    assert found.loaded["model.layers.0.attn.sinks"] == UNMATCHED
    renamed = [name.replace("layers.1.norm", "layers.1.ln") for name in TENSORS]
    assert assigned(MATRICES, tensors=renamed).reloaded == ("model.layers.1",)


@pytest.mark.parametrize(
    "tensors",
    [[*TENSORS, "extra.weight"], TENSORS[1:], [name.replace("model.", "language_model.") for name in TENSORS]],
    ids=["sent, not held", "held, not sent", "other names"],
)
def test_the_model_is_loaded_as_a_whole_where_no_layer_can_be_told(tensors: list[str]) -> None:
    found = assigned(MATRICES, tensors=tensors)
    assert (found.path, found.direct, found.reloaded) == ("loader", (), (MODEL,))
    assert set(found.loaded) == set(tensors)


def test_a_rank_need_not_hold_every_tensor() -> None:
    """Unless it does not know what some of its parameters hold."""
    other = "model.layers.1.experts.9.up_proj.weight"
    assert assigned(MATRICES, tensors=[*TENSORS, other], alone=False).path == "direct"
    one = assigned(MATRICES, ("model.layers.0.norm", "weight"), tensors=[*TENSORS, other], alone=False)
    assert one.reloaded == ("model.layers.0.norm", "model.layers.1")


def test_what_a_rank_has_zeros_for_is_not_looked_for_in_it() -> None:
    """The bias of gpt-oss's experts, which the first rank alone holds."""
    other, norm = "model.layers.1.experts.down_proj_bias", ("model.layers.0.norm", "weight")
    zeros = replace(MATRICES[-1], parameter="w2_bias", parts=(), elsewhere=(other,))
    found = assigned([*MATRICES, zeros], norm, tensors=[*TENSORS, other], alone=False)
    assert found.reloaded == ("model.layers.0.norm",)


def test_nothing_is_left_to_write_directly() -> None:
    every = [("embed", "weight"), *((one.path, one.parameter) for one in MATRICES[1:])]
    found = assigned(MATRICES, *every)
    assert (found.path, found.direct, found.reloaded) == ("loader", (), (MODEL,))


def test_what_other_workers_hold_takes_no_module_out_of_use() -> None:
    """A pipeline stage with one layer, one projection of which goes through the loader."""
    stage, unknown = layer(1), ("model.layers.1.attn.o_proj", "weight")
    found = assigned(stage, unknown, alone=False, elsewhere=("embed", "model.layers.0"))
    assert found.reloaded == ("model.layers.1.attn.o_proj",)
    assert set(found.loaded) == {"model.layers.1.attn.o_proj.weight"}
    assert assigned(stage, unknown, alone=False).reloaded == (MODEL,)
