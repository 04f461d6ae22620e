"""A teacher behind an HTTP endpoint: a vLLM or SGLang server that gives log-probs of tokens that it is sent.

vLLM: `prompt_logprobs` of its completions. SGLang: `return_logprob` of /generate; its completions have no log-probs of
prompts. Both are of logits at the temperature 1.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.backends.batching.batch import RolloutLogprobs
from rlctl.errors import ConfigError, InputError, WorkerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAUSE_S = 1.0
"""Before the first repetition; each next one waits twice as long."""
REPEATED = (408, 429, 500, 502, 503, 504)
"""HTTP statuses of a server that is busy or restarting."""
PROBED = 512
"""Tokens of the run's vocabulary whose texts the server tokenizes."""
TEXTS = ("The quick brown fox, 12345 + 67.89!\n\n", "def f(x):\n    return x**2\t# ok", "Grüße, 你好 мир 🙂")


@dataclass(frozen=True)
class Endpoint:
    """A server's address and how it is asked."""

    url: str
    """Address without the path, such as http://host:8000."""
    model: str | None = None
    """The server's name of the model; None: its only one."""
    key: str | None = None
    """The environment variable with the API key; None: the server asks for none."""
    timeout_s: float = 120.0
    retries: int = 3
    concurrency: int = 16

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer of a request. Raises InputError where the server refuses it, and WorkerError where it does
        not answer in `retries` repetitions."""
        url = f"{self.url.rstrip('/').removesuffix('/v1')}{path}"
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self._secret}"
        request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read(2000).decode(errors='replace')}"
                if error.code not in REPEATED:
                    hint = "Compare teacher.models with the server's options."
                    if error.code in (401, 403):
                        hint = "Name the environment variable with the API key: teacher.models[].api_key_env."
                    elif "max allowed" in reason:
                        hint = "Start the server with a larger --max-logprobs, or lower distillation.top_k."
                    raise InputError(f"The teacher at {url} refuses a request: {reason}.", hint) from None
            except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
                reason = str(error) or type(error).__name__
            if attempt < self.retries:
                time.sleep(PAUSE_S * 2**attempt)
        raise WorkerError(
            f"The teacher at {url} does not answer ({reason}), asked {self.retries + 1} times.",
            "Start it again and resume; teacher.models[].timeout_s and retries are its limits.",
        )

    @property
    def _secret(self) -> str:
        assert self.key is not None
        if not (secret := os.environ.get(self.key)):
            raise ConfigError(
                f"teacher.models[].api_key_env = {self.key}, and that environment variable is not set.",
                f"Set it where the run starts: export {self.key}=..., on a cluster in each node's Ray.",
            )
        return secret

    @cached_property
    def _served(self) -> tuple[str, bool]:
        """(name of the model, the server is SGLang)."""
        models = self._ask("/v1/models").get("data", [])
        names = {str(entry["id"]): entry for entry in models}
        if self.model is None and len(names) != 1:
            raise InputError(
                f"The teacher at {self.url} serves {', '.join(names) or 'no model'}.",
                "Name one: teacher.models[].model.",
            )
        name = self.model or next(iter(names))
        if name not in names:
            raise InputError(
                f"The teacher at {self.url} serves {', '.join(names) or 'no model'}, and not {name}.",
                "Set teacher.models[].model to one of these.",
            )
        return name, names[name].get("owned_by") == "sglang"

    @property
    def label(self) -> str:
        return f"{self._served[0]} at {self.url}"

    def require_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise InputError unless the server reads texts as the run's tokenizer does."""
        name, _ = self._served
        ids = np.linspace(0, len(tokenizer) - 1, PROBED).astype(int).tolist()
        for text in (*TEXTS, " ".join(str(tokenizer.decode([token])) for token in ids)):
            ours = tokenizer(text, add_special_tokens=False)["input_ids"]
            theirs = self._ask("/tokenize", {"model": name, "prompt": text, "add_special_tokens": False})["tokens"]
            if ours != theirs:
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
                raise InputError(
                    f"The teacher {self.label} does not read the tokens of the run: of {text[:40]!r} token {at} is "
                    f"{theirs[at] if theirs else None}, and the run's is {ours[at]}.",
                    "An endpoint needs the policy's tokenizer: serve a model of the same family.",
                )

    def logprobs(self, texts: Sequence[tuple[np.ndarray, np.ndarray]], top: int) -> list[RolloutLogprobs]:
        """Return the log-probs of each text, given as (tokens [T], which are response tokens [T]), with its `top` most
        likely tokens at each position."""
        with ThreadPoolExecutor(self.concurrency, "teacher") as pool:
            return list(pool.map(lambda text: self._logprobs(text[0], text[1], top), texts))

    def _logprobs(self, tokens_T: np.ndarray, mask_T: np.ndarray, top: int) -> RolloutLogprobs:
        name, of_sglang = self._served
        tokens, sampling = tokens_T.tolist(), {"temperature": 1.0}
        if of_sglang:
            body = {"input_ids": tokens, "sampling_params": sampling | {"max_new_tokens": 1}, "return_logprob": True,
                    "logprob_start_len": 0, "top_logprobs_num": top}  # fmt: skip
            answer = self._ask("/generate", body)["meta_info"]
            chosen = [entry[0] for entry in answer["input_token_logprobs"]]
            likely = [[(entry[1], entry[0]) for entry in each or ()] for each in answer.get("input_top_logprobs") or ()]
        else:
            body = {"model": name, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": top, **sampling}
            places = self._ask("/v1/completions", body)["choices"][0]["prompt_logprobs"]
            chosen = [each and each[str(token)]["logprob"] for each, token in zip(places, tokens, strict=True)]
            ranked = [sorted((each or {}).items(), key=lambda item: item[1]["rank"]) for each in places]
            likely = [[(int(token), entry["logprob"]) for token, entry in each[:top]] for each in ranked]
        where = np.flatnonzero(mask_T).tolist()
        if len(chosen) != len(tokens) or any(chosen[at] is None for at in where):
            raise WorkerError(f"The teacher at {self.url} gave {len(chosen)} log-probs of {len(tokens)} tokens.")
        if any(len(likely[at]) != top for at in where if top):
            raise WorkerError(f"The teacher at {self.url} gave less than {top} likely tokens (distillation.top_k).")
        shape = (len(where), top)
        ids, values = ([[pair[part] for pair in likely[at][:top]] for at in where] if top else [] for part in (0, 1))
        return RolloutLogprobs(
            np.array([chosen[at] for at in where], np.float32),
            np.array(ids, np.int32).reshape(shape),
            np.array(values, np.float32).reshape(shape),
        )
