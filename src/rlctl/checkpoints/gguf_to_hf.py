"""Write a GGUF file out as a plain Hugging Face directory: `python -m rlctl.checkpoints.gguf_to_hf SRC.gguf DST`.

Run as its own process, because it imports torch and transformers and its caller must not.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, destination: Path) -> None:
    """Dequantise every tensor of `source` and save it as bfloat16 with config, tokenizer and chat template.

    Writes `config.json`, `model.safetensors`, `generation_config.json` and the tokenizer files into `destination`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    # transformers refuses to save a model marked as quantised, although the weights no longer are.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    # GGUF holds it in float32: 9.999999747378752e-06 for what was published as 1e-05.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict({key: tensor.to(torch.bfloat16) for key, tensor in loaded.state_dict().items()})
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    destination.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
