"""A coding agent's command line solves a row in an empty folder; the reward is 1 if it prints the row's answer.

The arguments are `claude` (Claude Code) or `codex`, and the path of its program.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CODEX = """
model = "{model}"
model_provider = "policy"
[model_providers.policy]
name = "policy"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""

kind, program = sys.argv[1:]
row, model = json.load(sys.stdin), os.environ["OPENAI_MODEL"]
with tempfile.TemporaryDirectory() as place:
    home, work = Path(place, "home"), Path(place, "work")
    for folder in (home / ".codex", work):
        folder.mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(CODEX.format(model=model, url=os.environ["OPENAI_BASE_URL"]))
    commands = {
        "claude": [program, "-p", row["prompt"], "--model", model],
        "codex": [program, "exec", "--skip-git-repo-check", row["prompt"]],
    }
    # Without titles and other requests that are not turns of the task.
    env = os.environ | {"HOME": str(home), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    done = subprocess.run(commands[kind], cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
# A code other than 0 after answers is a result and no crash.
print(json.dumps({"reward": float(row["answer"] in done.stdout), "exit_code": done.returncode}))
