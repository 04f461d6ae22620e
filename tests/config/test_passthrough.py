"""Fields of Megatron-Core and vLLM in the configuration: read from their sources, checked, and refused with reasons."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import pytest

from rlctl.backends.megatron import backend
from rlctl.config import installed, passthrough
from rlctl.config.load import Resolved
from rlctl.config.other_trainers import NAMES
from rlctl.config.passthrough import ALIASES, CHOICES, MANAGED, TARGETS
from rlctl.errors import ConfigError
from rlctl.methods.configuration import resolve, schema


def given(*sets: str) -> Resolved:
    return resolve(sets=sets, environment={})


def refusal(*sets: str) -> str:
    with pytest.raises(ConfigError) as error:
        given(*sets)
    return error.value.message


def test_the_page_has_every_field_that_is_not_forwarded() -> None:
    """Fields of the model, fields that rlctl sets, and those that the backend refuses, in `docs/training.md`."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    table, _, of_model = page.partition("### Fields of Megatron-Core\n")[2].partition("### Fields of the model\n")
    listed = of_model.partition("\n## ")[0]
    assert re.findall(r"`(\w+)`", listed) == NAMES["megatron"]["of_the_model"]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)]
    sections = ("megatron", "ddp", "optimizer")
    apart = {key.partition(".")[2] for key in MANAGED.keys() | ALIASES.keys() if key.partition(".")[0] in sections}
    source = inspect.getsource(backend)
    quoted = set(re.findall(r'"(\w+)"', source))
    refused = quoted & {name for one in sections for name in TARGETS[one].fields() or {}}
    missing = (apart | refused) - {*NAMES["megatron"]["of_the_model"], *sections}
    assert [name for name in sorted(missing) if not any(fnmatch(name, one) for one in named)] == []
    gone = {name for one in sections for name in TARGETS[one].fields() or {}} | apart | quoted
    assert [one for one in named if not any(fnmatch(name, one) for name in gone)] == []


def test_fields_are_read_without_importing_the_package() -> None:
    code = (
        "import sys; from rlctl.methods.configuration import resolve; from rlctl.config.passthrough import TARGETS\n"
        "print([len(t.fields()) for t in TARGETS.values()])\n"
        "resolve(sets=['megatron.moe_router_dtype=fp64', 'vllm.enforce_eager=true'], environment={})\n"
        "print([m for m in ('torch', 'vllm', 'megatron.core', 'ray') if m in sys.modules])"
    )
    counts, imported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout.splitlines()
    assert min(eval(counts)) > 20
    assert imported == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("section", TARGETS)
def test_fields_are_those_of_the_imported_class(section: str) -> None:
    target = TARGETS[section]
    real = getattr(importlib.import_module(target.module), target.name)
    names = {f.name for f in dataclasses.fields(real) if f.init and not f.name.startswith("_")}
    assert set(target.fields() or ()) == names
    for name, found in (target.fields() or {}).items():
        if section != "vllm" and found.default is not None and not found.default.startswith("field("):
            default = next(f.default for f in dataclasses.fields(real) if f.name == name)
            if not callable(default) and isinstance(default, bool | int | float | str | None):
                assert eval(found.default) == default, name


@pytest.mark.slow
def test_defaults_of_the_imported_classes_are_of_the_types_read() -> None:
    for target in TARGETS.values():
        real = getattr(importlib.import_module(target.module), target.name)
        for f in dataclasses.fields(real):
            if f.name.startswith("_") or isinstance(f.default, dataclasses._MISSING_TYPE) or not f.init:
                continue
            if f.default is None or isinstance(f.default, bool | int | float | str):
                kind = passthrough.annotation((target.fields() or {})[f.name])
                passthrough._adapter(kind).validate_python(f.default)


def test_other_names_and_managed_fields_exist() -> None:
    for key in [*ALIASES, *MANAGED]:
        section, _, name = key.partition(".")
        if section != "scheduler":
            assert name in (TARGETS[section].fields() or {}), key
    assert set(ALIASES.values()) - {"ddp.overlap_param_gather"} <= set(schema().keys)
    assert not ALIASES.keys() & MANAGED.keys()


@pytest.mark.parametrize(
    "text",
    ["optimizer.optimizer=adam", "megatron.recompute_modules=[mlp,core_attn]", "megatron.cuda_graph_scope=attn,mlp",
     "megatron.cp_comm_type=[p2p,a2a+p2p]", "vllm.quantization=fp8", "vllm.model_impl=Transformers",
     "vllm.distributed_executor_backend=mp", "vllm.distributed_executor_backend=own.module.Executor",
     "vllm.mm_encoder_attn_backend=torch_sdpa", "vllm.generation_config=anything", "vllm.quantization=null",
     "vllm.compilation_config.mode=none", "vllm.attention_config={backend: flash_attn, unlisted: 3}"],
)  # fmt: skip
def test_names_that_the_installed_libraries_know_are_taken(text: str) -> None:
    given(text)


def test_choices_are_those_that_the_installed_megatron_compares_with() -> None:
    """Each name stands in quotes in Megatron-Core's code or documentation of the field."""
    from rlctl.config.installed import find_module

    package = find_module("megatron.core")
    assert package is not None
    files = ("transformer/transformer_config.py", "optimizer/__init__.py", "fp8_utils.py", "enums.py",
             "extensions/transformer_engine.py")  # fmt: skip
    code = "".join((package.path.parent / name).read_text() for name in files)
    for key, names in CHOICES.items():
        assert key.partition(".")[2] in (TARGETS[key.partition(".")[0]].fields() or {})
        assert not [name for name in names if f'"{name}"' not in code and f"'{name}'" not in code], key


def test_a_plug_in_of_another_package_may_bring_names_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passthrough, "_vllm_is_extended", lambda: True)
    given("vllm.quantization=own")


def test_fields_pass_with_their_origin() -> None:
    resolved = given("megatron.moe_router_dtype=fp64", "ddp.bucket_size=1000", "vllm.cpu_offload_gb=2")
    assert resolved.config.megatron.passed == {"moe_router_dtype": "fp64"}
    assert resolved.config.ddp.passed == {"bucket_size": 1000}
    assert resolved.config.vllm.passed == {"cpu_offload_gb": 2.0}
    assert resolved.origin["megatron.moe_router_dtype"] == "--set"
    assert resolved.config.optimizer.passed == {}


def test_values_of_files_and_the_command_line_meet_in_one_mapping(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("vllm: {hf_overrides: {a: 1, b: 2}}\nmegatron: {moe_z_loss_coeff: 0.1}\n")
    resolved = resolve(files=[file], sets=["vllm.hf_overrides.b=3"], environment={})
    assert resolved.config.vllm.passed == {"hf_overrides": {"a": 1, "b": 3}}
    again = resolve(sets=[f"{k}={v}" for k, v in resolved.leaves() if k.startswith("vllm")], environment={})
    assert again.config.vllm == resolved.config.vllm
    planned = resolved.with_values({"training.tp": 2})
    assert planned.config.vllm.passed == {"hf_overrides": {"a": 1, "b": 3}}
    assert planned.origin["megatron.moe_z_loss_coeff"] == f"file {file}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "megatron.moe_router_dtyp=fp32",
            "not a field of Megatron-Core .* did you mean `megatron.moe_router_dtype`",
        ),
        ("megatron.moe_router_dtype=fp8", "it takes fp32 | fp64 | unset"),
        ("megatron.hidden_size=8", "comes from the model"),
        ("megatron.bf16=true", "set model.dtype"),
        ("megatron.activation_func=gelu", "Python function"),
        ("ddp.bucket_size=many", "it takes integer | unset"),
        ("ddp.average_in_collective=true", "gradients are summed"),
        ("optimizer.optimizer_offload_fraction=0.5", "all states in host memory and updates on the device"),
        ("optimizer.optimizer=banana", "should be 'adamw' or 'muon'"),
        ("optimizer.optimizer=sgd", "should be 'adamw' or 'muon'"),
        ("optimizer.muon_tp_mode=blockwise", "Muon orthogonalizes each matrix whole"),
        ("optimizer.decoupled_lr=0.1", "optimizer.lr is the learning rate of all parameters"),
        ("optimizer.fp8_recipe=banana", "it takes tensorwise | delayed"),
        ("megatron.recompute_modules=[core_attn,mlq]", r"it takes core_attn \| moe_act"),
        ("megatron.moe_router_load_balancing_type=auxloss", r"it takes aux_loss \| seq_aux_loss"),
        ("megatron.cp_comm_type=banana", "it takes p2p"),
        ("megatron.cuda_graph_scope=attn,banana", r"it takes full \| full_iteration"),
        ("ddp.outer_dp_sharding_strategy=optim", "Megatron-FSDP"),
        ("vllm.model_impl=banana", r"it takes auto \| vllm \| transformers"),
        ("vllm.quantization=banana", r"it takes awq"),
        ("vllm.tokenizer_mode=banana", r"it takes auto \| hf"),
        ("vllm.enable_lora=true", "adapters reach the engines by training.lora.refit: set training.lora.rank"),
        ("vllm.max_loras=2", "set training.lora"),
        ("vllm.lora_target_modules=[q_proj]", "set training.lora.targets"),
        ("vllm.lora_dtype=float16", "model.dtype"),
        ("vllm.enforce_eagr=true", "did you mean `vllm.enforce_eager`"),
        ("vllm.enforce_eager.x=1", "no inner keys"),
        ("vllm.worker_extension_cls=a.B", "a refit reaches"),
        ("vllm.weight_transfer_config={backend: nccl}", "rlctl's own movers"),
        ("vllm.spec_method=banana", r"it takes ngram \| medusa"),
        ("vllm.attention_config={backend: banana}", r"backend takes FLASH_ATTN \|"),
        ("vllm.compilation_config.mode=banana", r"mode takes NONE \| STOCK_TORCH_COMPILE"),
        ("vllm.speculative_config={method: banana}", r"method takes ngram \|"),
        ("vllm.log_level=loud", "CRITICAL | ERROR"),
        ("optimizer.exp_avg_dtype=int3", "float32 | bfloat16"),
        ("training.moe_router_dtype=fp32", "did you mean `megatron.moe_router_dtype`"),
        ("vllm=3", "is a section of keys"),
        ("vllm.=3", "unknown key"),
        ("megatron..x=3", "unknown key"),
        ("vllm.hf_overrides.=3", "unknown key"),
    ],
)
def test_wrong_fields_are_named_with_what_they_take(text: str, words: str) -> None:
    import re

    message = refusal(text)
    assert f"`{text.partition('=')[0]}`" in message
    assert "--set" in message
    assert re.search(words.replace("|", r"\|"), message), message


def test_a_value_and_keys_inside_it_are_refused_together() -> None:
    assert "which has no keys" in refusal("vllm.compilation_config=3", "vllm.compilation_config.mode=3")


def test_names_of_the_engines_for_keys_of_rlctl() -> None:
    resolved = given(
        "megatron.tensor_model_parallel_size=4", "vllm.tensor_parallel_size=2", "optimizer.adam_beta2=0.95",
        "megatron.recompute_granularity=null", "vllm.max_num_seqs=12",
    )  # fmt: skip
    assert resolved.config.training.tp == 4
    assert resolved.origin["training.tp"] == "--set, as megatron.tensor_model_parallel_size"
    assert resolved.config.generation.tp == 2
    assert resolved.config.generation.max_concurrent == 12
    assert resolved.config.optimizer.beta2 == 0.95
    assert resolved.config.training.recompute == "none"
    assert "training.tp" in refusal("megatron.tensor_model_parallel_size=0")


def test_every_alias_takes_what_its_key_takes() -> None:
    for theirs, ours in ALIASES.items():
        assert schema().field(ours) is not None, theirs


def test_what_is_not_installed_is_passed_unchecked_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "fields_of", lambda module, name: None)
    resolved = given("vllm.anything=3")
    assert resolved.config.vllm.passed == {"anything": 3}
    assert passthrough.not_checked(list(resolved.origin)) == [
        "vllm.*: vLLM is not installed, so its fields were not checked"
    ]
    assert "comes from the model" in refusal("megatron.num_layers=3")


SOURCE = '''
from __future__ import annotations
import enum
from typing import TYPE_CHECKING, Callable, ClassVar, List, Literal, Optional, Union
from .base import Base
from .words import Kind as Sort, Nothing
if TYPE_CHECKING:
    import torch

class Color(enum.IntEnum):
    RED = 1
    BLUE = 2

@dataclass
class Thing(Base):
    a: Optional[int] = None
    """What a is."""
    b: Union[str, List[int]] = "x"
    c: Sort | None = None
    d: "Optional[torch.dtype]" = None
    e: Callable = print
    f: Color = Color.RED
    g: Unknown = 3
    h: int = field(init=False)
    i: ClassVar[int] = 3
    over: str = "mine"
'''


def test_annotations_are_followed_into_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "somepackage"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "things.py").write_text(SOURCE)
    (package / "base.py").write_text("class Base:\n    over: int = 1\n    z: dict[str, float | None] | bool = False\n")
    (package / "words.py").write_text("from .more import Kind\n")
    (package / "more.py").write_text("Two = Literal['two']\nKind = Literal['one', Two]\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = installed.fields_of("somepackage.things", "Thing") or {}
    assert {name: f.type for name, f in found.items()} == {
        "over": str, "z": dict[str, float | None] | bool, "a": int | None, "b": str | list[int],
        "c": Literal["one", "two"] | None, "d": installed.Dtype | None, "e": installed.Function,
        "f": Literal["RED", 1, "BLUE", 2], "g": installed.Open,
    }  # fmt: skip
    assert found["a"].description == "What a is."
    assert installed.fields_of("somepackage.things", "Missing") is None
    assert installed.fields_of("nosuchpackage.things", "Thing") is None


def test_rlctl_manages_all_fields_of_adapters_that_vllm_has() -> None:
    fields = TARGETS["vllm"].fields()
    assert fields is not None
    adapters = {f"vllm.{name}" for name in fields if "lora" in name}
    assert len(adapters) > 10
    assert adapters <= MANAGED.keys()
