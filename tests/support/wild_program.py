"""A program that asks nothing and breaks a limit, dies or hangs, as the row's field `how` says. Its argument is a mark
by which a test finds its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def leave_others() -> None:
    """Start processes in sessions of their own, whose parents are gone and which ignore signals."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            os._exit(0)
        os.wait()


def main() -> None:
    row = json.load(sys.stdin)
    how = row["how"]
    temporary = Path(os.environ.get("TMPDIR", "/tmp"))
    (temporary / "kept").mkdir()
    (temporary / "kept" / "file").write_text("1")
    if how == "eat":
        blocks = []
        while True:  # in children, since the memory of one process has a limit as well
            blocks.append(
                subprocess.Popen([sys.executable, "-c", "a = b'1' * (150 << 20); import time; time.sleep(600)"])
            )
            time.sleep(0.2)
    elif how == "fork":
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)
    elif how == "fill":
        with (temporary / "kept" / "large").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
    elif how == "fill many":
        for number in range(100_000):
            (temporary / "kept" / f"file{number}").write_bytes(bytes(1 << 20))
            time.sleep(0.005)
    elif how == "print":
        while True:
            print("x" * 100_000)
    elif how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hang":
        leave_others()
        os.chmod(temporary / "kept", 0)
        time.sleep(600)
    elif how == "leave":
        leave_others()
    elif how == "look":
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models")
        seen = {"models": len(json.load(urllib.request.urlopen(request))["data"])}
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{row['port']}/", timeout=5)
        except OSError:
            seen["refused"] = 1
        seen["home"] = int(os.access(os.environ["HOME"], os.W_OK))
        seen["secret"] = int("RLCTL_TEST_SECRET" in os.environ)
        seen["processes"] = sum(name.isdigit() for name in os.listdir("/proc"))
        seen["writes"] = int(os.access(Path.cwd(), os.W_OK))
        print(json.dumps({"reward": 1.0, **seen}))
        return
    print(json.dumps({"reward": float(row["answer"] == "7")}))


main()
