from __future__ import annotations

import json
import socket
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

import pytest
from huggingface_hub import constants

from hf_dflash import regenerate_server
from hf_dflash.answer_file import settings_path
from hf_dflash.chats import Chat, read_chats
from hf_dflash.loss_mask import REASONING_FIELDS
from hf_dflash.regenerate import RegenerationReport
from hf_dflash.regenerate_server import regenerate_answers_from_server

PROMPTS = [Chat([{"role": "user", "content": f"q{i}"}], labels={"n": i}) for i in range(8)]


@pytest.fixture(autouse=True)
def online(monkeypatch):
    # The client of the Hub refuses every address offline, even this machine's own.
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(regenerate_server, "PAUSES", (0.0, 0.0, 0.0))


class StandIn(ThreadingHTTPServer):
    """Answers "q3" with "a3", as an OpenAI-compatible server does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.lock = Lock()
        self.fails_at: set[str] = set()
        self.refusal = 400
        self.faults: list[int] = []  # what the next requests get; 0: a broken connection
        self.message: dict[str, Any] = {}
        self.finish_reason = "stop"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.add(self.headers["Authorization"])
            fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == 0:
            self.close_connection = True
            return
        message = {"role": "assistant", "content": question.replace("q", "a")}
        choice = {
            "index": 0,
            "message": {**message, **self.server.message},
            "finish_reason": self.server.finish_reason,
        }
        reply = json.dumps(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m",
             "choices": [choice], "usage": None}
        ).encode()  # fmt: skip
        known = self.path == "/v1/chat/completions" and question not in self.server.fails_at
        if not known:
            reply = b'{"object": "error", "message": "maximum context length"}'
        self.send_response(fault or (200 if known else self.server.refusal))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        """Tests print nothing."""


@contextmanager
def stand_in():
    with StandIn() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def run(server, path, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 9, "n_threads": 3, **options}
    return regenerate_answers_from_server(server.url, "org/model", prompts, path, **options)


def test_answers_come_through_a_server(tmp_path):
    path = tmp_path / "answers.jsonl"
    with stand_in() as server:
        report = run(
            server, path, temperature=0.5, seed=3, api_key="secret",
            template_options={"enable_thinking": False},
        )  # fmt: skip
        assert (report.n_answered, report.n_found) == (8, 0)
        assert server.keys == {"Bearer secret"}
        sent = server.requests[0]
        expected = {
            "model": "org/model",
            "max_tokens": 9,
            "temperature": 0.5,
            "seed": 3,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        assert {name: sent[name] for name in expected} == expected
    chats = sorted(read_chats(path), key=lambda chat: chat.labels["n"])
    assert [chat.messages[-1]["content"] for chat in chats] == [f"a{i}" for i in range(8)]
    assert all(chat.answer_ids is None for chat in chats)
    assert "secret" not in path.read_text() + settings_path(path).read_text()
    assert json.loads(settings_path(path).read_text())["temperature"] == 0.5


def test_a_failing_server_loses_nothing(tmp_path):
    path = tmp_path / "answers.jsonl"
    with stand_in() as server:
        server.fails_at, server.refusal = {"q7"}, 404
        with pytest.raises(RuntimeError, match=r"failed to answer a prompt: .* answers are kept"):
            run(server, path, n_threads=1)
        n_kept = len(path.read_text().splitlines())
        assert n_kept == 7
        server.fails_at = set()
        server.requests.clear()
        report = run(server, path)
        assert (report.n_answered, report.n_found) == (1, 7)
        assert [body["messages"][-1]["content"] for body in server.requests] == ["q7"]


def test_a_server_that_is_silent_ends_the_run_with_what_stands_kept(tmp_path):
    path = tmp_path / "answers.jsonl"
    with stand_in() as server:
        run(server, path, PROMPTS[:2])
    with socket.socket() as silent:  # takes requests, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(RuntimeError, match=r"timed out.*Raise `timeout`.*: 2 answers are kept"):
            regenerate_answers_from_server(
                url, "org/model", PROMPTS[:3], path, max_new_tokens=9, timeout=0.05
            )
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("fault", [0, 429, 500, 503])
def test_a_request_that_may_pass_is_sent_again(tmp_path, caplog, fault):
    with stand_in() as server:
        server.faults = [fault] * 3
        assert run(server, tmp_path / "a", PROMPTS[:1]).n_answered == 1
        assert len(server.requests) == 4
        assert caplog.text.count("Asking again in 0 s.") == 3
        server.faults = [fault] * 4
        with pytest.raises(RuntimeError, match="Give the same options again to continue: 1 answer"):
            run(server, tmp_path / "a", PROMPTS[:2])
        assert len(server.requests) == 8


@pytest.mark.parametrize("refusal", [400, 413, 422])
def test_a_request_that_the_server_refuses_is_sent_once_and_left_out(tmp_path, caplog, refusal):
    prompts = [replace(prompt, source=f"line {i}") for i, prompt in enumerate(PROMPTS)]
    with stand_in() as server:
        server.fails_at, server.refusal = {"q0", "q5"}, refusal
        report = run(server, tmp_path / "a", prompts)
        assert report == RegenerationReport(n_answered=6, n_found=0, n_left_out=2)
        assert len(server.requests) == 8
        assert "Left out line 5: " in caplog.text
        assert caplog.text.count("maximum context length") == 2
        report = run(server, tmp_path / "a", prompts)
        assert report == RegenerationReport(n_answered=0, n_found=6, n_left_out=2)
    assert len((tmp_path / "a").read_text().splitlines()) == 6


@pytest.mark.parametrize("refusal", [401, 403, 404])
def test_a_refusal_that_is_no_prompts_fault_ends_the_run(tmp_path, refusal):
    with stand_in() as server:
        run(server, tmp_path / "a", PROMPTS[:1])
        server.fails_at, server.refusal = {"q1"}, refusal
        with pytest.raises(RuntimeError, match="failed to answer a prompt"):
            run(server, tmp_path / "a", PROMPTS)


def test_a_server_that_refuses_every_prompt_ends_the_run(tmp_path, monkeypatch):
    with stand_in() as server:
        server.fails_at = {"q0", "q1"}
        with pytest.raises(RuntimeError, match=r"failed to answer a prompt: .*maximum context"):
            run(server, tmp_path / "a", PROMPTS[:2])
        assert len(server.requests) == 2
        monkeypatch.setattr(regenerate_server, "FIRST_PROMPTS", 2)
        server.requests.clear()
        with pytest.raises(RuntimeError, match="failed to answer a prompt"):
            run(server, tmp_path / "a", n_threads=1)
        assert len(server.requests) < 8


@pytest.mark.parametrize("arguments", ['{"a": ', None])
def test_a_call_whose_arguments_are_no_json_is_left_out(tmp_path, caplog, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    with stand_in() as server:
        run(server, tmp_path / "a", PROMPTS[:1])
        server.message = {"content": None, "tool_calls": [call]}
        report = run(server, tmp_path / "a", PROMPTS[:3])
        assert report == RegenerationReport(n_answered=0, n_found=1, n_left_out=2)
    assert "the arguments of its call of now are not JSON" in caplog.text


def test_a_run_that_has_ended_asks_nothing_again():
    def ask(_):
        asked.append(1)
        raise ConnectionError("gone")

    asked: list[int] = []
    ended = Event()
    ended.set()
    with pytest.raises(ConnectionError, match="gone"):
        regenerate_server._ask_again(ask, ended, PROMPTS[0])
    assert len(asked) == 1


def test_cut_answers_reasoning_and_tool_calls_are_kept(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    with stand_in() as server:
        server.finish_reason = "length"
        server.message = {"content": None, "reasoning_content": "hm", "tool_calls": [call]}
        tools = [{"type": "function", "function": {"name": "now"}}]
        run(server, tmp_path / "a", [Chat(PROMPTS[0].messages, tools=tools)])
        assert server.requests[0]["tools"] == tools
    (line,) = (tmp_path / "a").read_text().splitlines()
    record = json.loads(line)
    assert record["finished"] is False
    assert record["tools"] == tools
    assert record["messages"][-1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"type": "function", "function": {"name": "now", "arguments": {"a": 1}}},
        ],
    }


@pytest.mark.parametrize("name", REASONING_FIELDS)
def test_reasoning_is_kept_wherever_the_server_puts_it(tmp_path, name):
    with stand_in() as server:
        server.message = {"reasoning_content": None, name: "hm"}
        run(server, tmp_path / "a.jsonl", PROMPTS[:1])
    (chat,) = read_chats(tmp_path / "a.jsonl")
    expected = {"role": "assistant", "content": "a0", "reasoning_content": "hm"}
    assert chat.messages[-1] == expected


def test_answers_of_another_model_are_refused(tmp_path):
    with stand_in() as server:
        run(server, tmp_path / "a", PROMPTS[:1])
        with pytest.raises(ValueError, match="model: 'org/model' there, 'org/other' now"):
            regenerate_answers_from_server(
                server.url, "org/other", PROMPTS, tmp_path / "a", max_new_tokens=9
            )


def test_options_out_of_range_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`n_threads` must be at least 1, got 0"):
        regenerate_answers_from_server("http://x", "m", PROMPTS, tmp_path / "a", n_threads=0)
    with pytest.raises(ValueError, match="`timeout` must be a number of seconds above 0, got 0"):
        regenerate_answers_from_server("http://x", "m", PROMPTS, tmp_path / "a", timeout=0)
