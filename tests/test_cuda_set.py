"""The packages of the documented installation for GPUs, compared by the lists of files in their wheels."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
TAIL_BYTES = 1 << 17
"""Read first, from a wheel's end; it holds the list of files of most wheels."""
NEVER_IMPORTED = {"build_backend.py"}
"""Files at the top of wheels that only a build of these packages reads."""


class RemoteFile(io.RawIOBase):
    """The end of a file on a web server, read by range requests: a wheel's list of files without the wheel."""

    def __init__(self, url: str) -> None:
        self.url, self.at, self.tail = url, 0, b""
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            self.size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def read(self, count: int = -1) -> bytes:
        end = self.size if count < 0 else min(self.size, self.at + count)
        if self.at < self.size - len(self.tail):
            start = max(0, min(self.at, self.size - TAIL_BYTES))
            request = urllib.request.Request(self.url, headers={"Range": f"bytes={start}-{self.size - 1}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                self.tail = answer.read()
        skipped = self.size - len(self.tail)
        part, self.at = self.tail[self.at - skipped : end - skipped], max(self.at, end)
        return part


@cache
def files_of(url: str) -> Mapping[str, int]:
    """The checksum of each file in a wheel."""
    return {one.filename: one.CRC for one in zipfile.ZipFile(RemoteFile(url)).infolist() if not one.is_dir()}


def resolved(uv: str, python: str, platform: str, place: Path) -> list[dict[str, Any]]:
    """The packages of the extra `cuda`, as uv would install them. Skips the test without a package index."""
    command = [uv, "pip", "compile", "pyproject.toml", "--extra", "cuda", "--python-version", python, "--quiet"]
    command += ["--python-platform", platform, "--format", "pylock.toml", "--output-file", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and any(word in done.stderr for word in ("Failed to fetch", "Could not connect", "offline")):
        pytest.skip(f"needs a package index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return tomllib.loads(place.read_text())["packages"]


def installed_wheel(package: dict[str, Any], tags: dict[Tag, int]) -> str | None:
    """The address of the wheel that an installer takes, or None for a package that has only sources."""
    places: dict[int, str] = {}
    for wheel in package.get("wheels", ()):
        name = wheel.get("name") or wheel["url"].rpartition("/")[2]
        places.update({tags[tag]: wheel["url"] for tag in parse_wheel_filename(name)[3] if tag in tags})
    return places[min(places)] if places else None


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["x86_64-manylinux_2_28", "aarch64-manylinux_2_34"])
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_no_two_wheels_of_the_cuda_set_hold_one_file(python: str, platform: str, tmp_path: Path) -> None:
    """The wheel that is unpacked last would win, and the other package break."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        pytest.skip("needs uv, with which the documented installation resolves the set")
    machine, _, glibc = platform.partition("-manylinux_2_")
    version = (int(python.partition(".")[0]), int(python.partition(".")[2]))
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(int(glibc), 4, -1)]
    platforms += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    known = [*cpython_tags(version, platforms=platforms), *compatible_tags(version, platforms=platforms)]
    tags = {tag: place for place, tag in reversed(list(enumerate(known)))}

    packages = resolved(uv, python, platform, tmp_path / "pylock.toml")
    wheels = {package["name"]: installed_wheel(package, tags) for package in packages}
    assert len(packages) > 150
    assert {"vllm", "torch", "flashinfer-python", "cuda-bindings"} <= {name for name, url in wheels.items() if url}
    holders: dict[str, dict[str, int]] = defaultdict(dict)
    with ThreadPoolExecutor(16) as pool:
        urls = {name: url for name, url in wheels.items() if url}
        try:
            listings = dict(zip(urls, pool.map(files_of, urls.values()), strict=True))
        except urllib.error.URLError as error:
            pytest.skip(f"needs a package index that answers range requests: {error}")
    for name, listing in listings.items():
        for file, checksum in listing.items():
            holders[file][name] = checksum
    shared = {file: names for file, names in holders.items() if len(set(names.values())) > 1}
    assert not {file: sorted(names) for file, names in shared.items() if file not in NEVER_IMPORTED}
