"""What tells two model directories apart."""

from __future__ import annotations

import shutil

from rlctl.checkpoints.identity import model_fingerprint


def test_a_copy_is_the_same_model_and_any_change_is_another(tiny_llama, tmp_path):
    copy = shutil.copytree(tiny_llama, tmp_path / "elsewhere")
    (copy / "README.md").write_text("not part of the model")
    assert model_fingerprint(copy) == model_fingerprint(tiny_llama)
    found = {model_fingerprint(copy)}
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 3] ^= 1
        (copy / name).write_bytes(content)
        found.add(model_fingerprint(copy))
    assert len(found) == 4
