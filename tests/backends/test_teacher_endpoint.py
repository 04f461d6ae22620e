"""A teacher behind an HTTP endpoint: requests and answers in the formats of vLLM and SGLang, and what servers refuse.

The server here answers from a table of log-probs. tests/jobs/test_distillation_run.py asks vLLM itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlctl.backends import teacher_endpoint
from rlctl.backends.teacher_endpoint import Endpoint
from rlctl.errors import ConfigError, InputError, WorkerError
from rlctl.tiny_models.text import VOCAB_SIZE

TABLE = np.random.default_rng(2).normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
TABLE -= np.log(np.exp(TABLE).sum(1, keepdims=True))
"""Log-probs [previous token, next token]."""
TOKENS, MASK = np.array([5, 9, 2, 7, 7], np.int32), np.array([False, False, True, False, True])


class Server:
    """What the handler answers with, and what it was asked."""

    url: str

    def __init__(self, kind: str, tokenizer: Any) -> None:
        self.kind, self.tokenizer, self.shift = kind, tokenizer, 0
        self.statuses: list[int] = []
        """Statuses of the next answers, each once."""
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.delay_s, self.names = 0.0, ["teacher"]

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": name, "owned_by": self.kind} for name in self.names]}
        if path == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return {"tokens": [token + self.shift for token in ids]}
        tokens, top = (body["input_ids"], body["top_logprobs_num"]) if path == "/generate" else (
            body["prompt"], body["prompt_logprobs"])  # fmt: skip
        rows = [TABLE[before] for before in tokens[:-1]]
        best = [np.argsort(-row)[:top].tolist() for row in rows]
        if path == "/generate":
            chosen = [[None, tokens[0], None]]
            chosen += [[float(row[token]), token, None] for row, token in zip(rows, tokens[1:], strict=True)]
            likely = [None, *([[float(row[i]), i, None] for i in ids] for row, ids in zip(rows, best, strict=True))]
            return {"meta_info": {"input_token_logprobs": chosen, "input_top_logprobs": likely if top else None}}
        places: list[Any] = [None]
        for row, token, ids in zip(rows, tokens[1:], best, strict=True):
            rank = int((row > row[token]).sum()) + 1
            named = {str(token): {"logprob": float(row[token]), "rank": rank}}
            places.append(named | {str(i): {"logprob": float(row[i]), "rank": n + 1} for n, i in enumerate(ids)})
        return {"choices": [{"prompt_logprobs": places}]}


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server(request.param, tokenizer)
    monkeypatch.setattr(teacher_endpoint, "PAUSE_S", 0.01)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.respond({})

        def do_POST(self) -> None:
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def respond(self, body: dict[str, Any]) -> None:
            state.asked.append((self.path, body, self.headers.get("Authorization")))
            time.sleep(state.delay_s)
            status = state.statuses.pop(0) if state.statuses else 200
            text = "Requested prompt logprobs of 64, which is greater than max allowed: 20"
            data = json.dumps(state.answer(self.path, body) if status == 200 else {"message": text}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


def endpoint(server: Server, **more: Any) -> Endpoint:
    return Endpoint(server.url, **more)


@pytest.mark.parametrize("top", [0, 4])
def test_both_servers_give_the_log_probs_of_response_tokens_and_of_the_most_likely_ones(
    server: Server, top: int
) -> None:
    one, other = endpoint(server).logprobs([(TOKENS, MASK), (TOKENS[:3], MASK[:3])], top)
    assert one.logprobs_R == pytest.approx([TABLE[9, 2], TABLE[7, 7]])
    assert one.top_ids_RK.tolist() == [np.argsort(-TABLE[before])[:top].tolist() for before in (9, 7)]
    assert one.top_logprobs_RK == pytest.approx(np.take_along_axis(TABLE[[9, 7]], one.top_ids_RK, 1))
    assert (other.logprobs_R.shape, other.top_ids_RK.shape) == ((1,), (1, top))
    paths = {path for path, *_ in server.asked}
    assert paths == {"/v1/models", "/generate" if server.kind == "sglang" else "/v1/completions"}


def test_a_busy_server_is_asked_again_and_one_that_stays_away_ends_the_run(server: Server) -> None:
    server.statuses = [503, 429]
    assert endpoint(server, retries=2).logprobs([(TOKENS, MASK)], 0)
    server.statuses = [200, 503, 503]
    with pytest.raises(WorkerError, match=r"does not answer \(HTTP 503.*asked 2 times"):
        endpoint(server, retries=1).logprobs([(TOKENS, MASK)], 0)
    server.delay_s = 0.5
    with pytest.raises(WorkerError, match=r"does not answer \(timed out\), asked 1 times"):
        endpoint(server, timeout_s=0.1, retries=0).logprobs([(TOKENS, MASK)], 0)
    with pytest.raises(WorkerError, match="Connection refused"):
        Endpoint("http://127.0.0.1:9", retries=0).logprobs([(TOKENS, MASK)], 0)


def test_what_a_server_refuses_is_said_with_the_key_to_change(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.statuses = [200, 400]
    with pytest.raises(InputError) as caught:
        endpoint(server).logprobs([(TOKENS, MASK)], 64)
    assert "--max-logprobs" in caught.value.hint
    server.statuses = [401]
    with pytest.raises(InputError) as caught:
        endpoint(server).logprobs([(TOKENS, MASK)], 0)
    assert "api_key_env" in caught.value.hint
    with pytest.raises(ConfigError, match="TEACHER_KEY, and that environment variable is not set"):
        endpoint(server, key="TEACHER_KEY").logprobs([(TOKENS, MASK)], 0)
    monkeypatch.setenv("TEACHER_KEY", "secret")
    assert endpoint(server, key="TEACHER_KEY").logprobs([(TOKENS, MASK)], 0)
    assert server.asked[-1][2] == "Bearer secret"


def test_the_model_is_the_one_that_is_named_or_the_only_one(server: Server) -> None:
    assert endpoint(server).label.startswith("teacher at http")
    with pytest.raises(InputError, match="serves teacher, and not student"):
        endpoint(server, model="student").logprobs([(TOKENS, MASK)], 0)
    server.names = ["teacher", "other"]
    with pytest.raises(InputError, match="serves teacher, other"):
        endpoint(server).logprobs([(TOKENS, MASK)], 0)
    assert endpoint(server, model="other").logprobs([(TOKENS, MASK)], 0)


def test_a_server_that_reads_other_tokens_is_refused(server: Server, tokenizer: Any) -> None:
    endpoint(server).require_tokens(tokenizer)
    server.shift = 1
    with pytest.raises(InputError, match="does not read the tokens of the run: of 'The quick"):
        endpoint(server).require_tokens(tokenizer)
