#!/usr/bin/env bash
# huggingface_hub 2.4.0: snapshot_download without a network returns a folder without the files that were asked for.
#
# Input: a cache with a snapshot of config.json alone, as a download with allow_patterns="*.json" leaves it. Then
# hf_hub_download of model.safetensors and snapshot_download(allow_patterns="*.safetensors"), both with local_files_only=True.
# Guess, written down first: both raise LocalEntryNotFoundError, because the weights are not there.
# Behavior: snapshot_download returns the folder of config.json, whatever the patterns, without a warning. A caller that
# takes the folder for the model fails later, or uses other files in it.
# Output seen:
#   hf_hub_download: LocalEntryNotFoundError
#   snapshot_download, *.safetensors: ['config.json']
#   snapshot_download, all files: ['config.json']
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "huggingface_hub==2.4.0"
"$place/venv/bin/python" - "$place/cache" <<'PYTHON'
import os
import sys
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

cache, commit = Path(sys.argv[1]), "a" * 40
repository = cache / "models--someone--tiny"
for file, content in {f"snapshots/{commit}/config.json": "{}", "refs/main": commit}.items():
    (repository / file).parent.mkdir(parents=True)
    (repository / file).write_text(content)
here = {"cache_dir": cache, "local_files_only": True}
try:
    raise SystemExit(f"found {hf_hub_download('someone/tiny', 'model.safetensors', **here)}")
except LocalEntryNotFoundError as error:
    print(f"hf_hub_download: {type(error).__name__}")
weights = os.listdir(snapshot_download("someone/tiny", allow_patterns="*.safetensors", **here))
everything = os.listdir(snapshot_download("someone/tiny", **here))
print(f"snapshot_download, *.safetensors: {weights}")
print(f"snapshot_download, all files: {everything}")
assert weights == everything == ["config.json"]
PYTHON
