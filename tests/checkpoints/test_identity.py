"""What tells two model directories apart."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rlctl.checkpoints.identity import file_digest, model_fingerprint, source_identity


def test_a_copy_is_the_same_model_and_any_change_is_another(tiny_llama: Path, tmp_path: Path) -> None:
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


def in_a_hub_cache(model: Path, cache: Path) -> Path:
    """The model as huggingface_hub stores it: links to files that are named after their content."""
    snapshot, blobs = cache / "snapshots" / "main", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        blob = blobs / file_digest(path)
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(blob)
    return snapshot


def test_what_a_hub_published_is_known_again_in_every_cache(tiny_llama: Path, tmp_path: Path) -> None:
    one, other = (in_a_hub_cache(tiny_llama, tmp_path / name) for name in ("one", "other"))
    assert source_identity(one) == source_identity(other)
    (other / "config.json").unlink()
    (other / "config.json").write_text((one / "config.json").read_text().replace("10000", "20000"))
    assert source_identity(one) != source_identity(other)


def test_what_was_written_anew_is_another_source(tiny_llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    before = source_identity(copy)
    assert before == source_identity(copy) != source_identity(tiny_llama)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert source_identity(copy) != before


def test_other_weights_of_equal_size_and_time_are_another_source(tiny_llama: Path, tmp_path: Path) -> None:
    """As `cp -p`, `rsync -t`, tar and reproducible images leave them. The file is 1.7 MB; 8 kB of it differ."""
    copy, found = shutil.copytree(tiny_llama, tmp_path / "copy"), set[str]()
    file = copy / "model.safetensors"
    size = file.stat().st_size
    for at in (None, size // 10, size // 2, size - 8192):
        content = bytearray((tiny_llama / "model.safetensors").read_bytes())
        if at is not None:
            content[at : at + 8192] = bytes(one ^ 1 for one in content[at : at + 8192])
        aside = tmp_path / "aside"
        aside.write_bytes(content)
        os.utime(aside, (1704067200, 1704067200))
        aside.replace(file)
        found.add(source_identity(copy))
    assert len(found) == 4
