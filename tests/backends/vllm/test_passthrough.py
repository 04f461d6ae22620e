"""What the `vllm` section passes through arrives in the configuration that vLLM itself makes of its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.backends.vllm.args import EngineSpec, engine_spec
from rlctl.errors import ConfigError
from rlctl.methods.configuration import resolve
from support.engines import tiny_facts

ARGUMENTS = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
arguments = json.loads(sys.argv[1])
made = EngineArgs(**arguments)
names = ("max_logprobs", "enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens", "hf_overrides")
print(json.dumps({name: getattr(made, name) for name in names}))
"""
CONFIGURATION = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
arguments = json.loads(sys.argv[1])
made = EngineArgs(**arguments).create_engine_config()
print(json.dumps({
    "max_logprobs": made.model_config.max_logprobs,
    "enable_prefix_caching": made.cache_config.enable_prefix_caching,
    "max_num_seqs": made.scheduler_config.max_num_seqs,
    "max_num_batched_tokens": made.scheduler_config.max_num_batched_tokens,
    "hf_overrides": {"max_window_layers": made.model_config.hf_config.max_window_layers},
}))
"""


def spec_with(model: Path, *sets: str) -> EngineSpec:
    config = resolve(sets=["generation.max_concurrent=4", *sets], environment={}).config
    return engine_spec(config, tiny_facts(tied=False), model, device="cpu", max_length=128)


def built(spec: EngineSpec, code: str) -> dict[str, Any]:
    """What `code` prints of the objects that vLLM makes of the arguments, in the engine's environment."""
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(spec.arguments)],
        env=os.environ | spec.environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [pytest.param(ARGUMENTS, marks=pytest.mark.guard), CONFIGURATION], ids=["arguments", "configuration"]
)
def test_fields_reach_the_engines_own_objects(tiny_llama: Path, code: str) -> None:
    spec = spec_with(
        tiny_llama,
        "vllm.max_logprobs=7",
        "vllm.enable_prefix_caching=false",
        "vllm.hf_overrides.max_window_layers=5",
        "vllm.max_num_seqs=3",
        "generation.max_batched_tokens=300",
    )
    assert spec.passed.keys() == {"max_logprobs", "enable_prefix_caching", "hf_overrides"}
    assert built(spec, code) == {
        "max_logprobs": 7, "enable_prefix_caching": False, "max_num_seqs": 3, "max_num_batched_tokens": 300,
        "hf_overrides": {"max_window_layers": 5},
    }  # fmt: skip


def test_an_engine_on_a_cpu_is_not_asked_to_compile(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.enforce_eager = False: engines on a CPU"):
        spec_with(tiny_llama, "vllm.enforce_eager=false")


def test_a_field_takes_the_place_of_what_rlctl_would_give(tiny_llama: Path) -> None:
    spec = spec_with(tiny_llama, "vllm.block_size=64", "vllm.enforce_eager=true")
    assert spec.arguments["block_size"] == 64
    assert spec.replaced == {"block_size": 32, "enforce_eager": True}
