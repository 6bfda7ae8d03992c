"""A stand-in for the Hub: the part of its HTTP interface that huggingface_hub's client asks.

Repositories live in memory. A commit is all there or not at all, large files are kept by their
sha256 as on the Hub, and every request is written down. `breaks_at` has the server drop one kind
of request, as a network that goes away does; `refusals` have it answer with an error.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_stand_in"
USER = "someone"


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)


@dataclass
class Refusal:
    """An error instead of an answer."""

    at: str  # a regular expression of "METHOD path"
    status: int
    code: str = ""  # by which the client knows what is meant
    times: int = 1000  # after that it is answered


class HubStandIn:
    """The server, its repositories and what it was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}  # by sha256, also of no commit yet
        self.requests: list[str] = []
        self.breaks_at: str | None = None  # a regular expression of "METHOD path"
        self.refusals: list[Refusal] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, **others: str) -> dict[str, str]:
        """Variables with which a process takes this for the Hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # its storage has a protocol of its own
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **others,
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[HubStandIn]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return self.repositories[repo_id].branches[revision]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _answer(self) -> None:
                path = unquote(urlsplit(self.path).path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked = f"{self.command} {path}"
                hub.requests.append(asked)
                if hub.breaks_at and re.search(hub.breaks_at, asked):
                    self.close_connection = True  # without an answer
                    self.connection.close()
                    return
                for refusal in hub.refusals:
                    if refusal.times and re.search(refusal.at, asked):
                        refusal.times -= 1
                        headers = {"X-Error-Code": refusal.code} if refusal.code else {}
                        self._send(refusal.status, b"<html>raw</html>", headers)
                        return
                known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                if not known and self.command != "PUT":  # a large file goes to a signed address
                    self._send(401, {"error": "Invalid username or password."})
                    return
                self._send(*hub.answer(self.command, path, self.path, body))

            def _send(self, status: int, content: Any, headers: Any = ()) -> None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in dict(headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815  # the server's names

        return Handler

    # ---- the interface, route by route ----

    def answer(self, method: str, path: str, url: str, body: bytes) -> tuple[Any, ...]:
        """Status, content and headers."""
        routes = (
            (r"GET /api/whoami-v2", self._whoami),
            (r"POST /api/repos/create", self._create),
            (r"POST /api/validate-yaml", self._validate_yaml),
            (r"POST /api/models/(?P<repo>.+)/preupload/(?P<revision>.+)", self._preupload),
            (r"POST /api/models/(?P<repo>.+)/branch/(?P<revision>.+)", self._branch),
            (r"POST /api/models/(?P<repo>.+)/commit/(?P<revision>.+)", self._commit),
            (r"POST /(?P<repo>.+)\.git/info/lfs/objects/batch", self._lfs_batch),
            (r"PUT /large/(?P<oid>\w+)", self._lfs_upload),
            (r"(GET|HEAD) /(?P<repo>.+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)", self._resolve),
            (r"GET /api/(models/)?(?P<repo>.+)/tree/(?P<revision>[^/]+)(/.*)?", self._tree),
            (r"POST /api/(models/)?(?P<repo>.+)/paths-info/(?P<revision>[^/]+)", self._tree),
            (r"GET /api/(?P<repo>datasets/[^/]+/[^/]+)/auth-check", self._is_there),
            (
                r"GET /api/(models/|(?=datasets/))(?P<repo>(datasets/)?[^/]+/[^/]+)(/revision/.*)?",
                self._info,
            ),
        )
        for pattern, route in routes:
            match = re.fullmatch(pattern, f"{method} {path}")
            if match is None:
                continue
            named = match.groupdict()
            if "repo" in named and named["repo"] not in self.repositories:
                return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            return route(body=body, url=url, **named)
        return 404, {"error": f"no such route: {method} {path}"}

    def _whoami(self, **_: Any) -> tuple[Any, ...]:
        return 200, {"type": "user", "name": USER, "orgs": []}

    def _create(self, body: bytes, **_: Any) -> tuple[Any, ...]:
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        answer = {"url": f"{self.url}/{repo_id}", "id": repo_id}
        if repo_id in self.repositories:
            return 409, {"error": "You already created this model repo", **answer}
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.repositories[repo_id] = Repository(private)
        return 200, answer

    def _validate_yaml(self, body: bytes, **_: Any) -> tuple[Any, ...]:
        content = json.loads(body)["content"]
        if not content.startswith("---\n"):
            return 400, {"errors": [{"message": "no metadata"}], "warnings": []}
        return 200, {"errors": [], "warnings": []}

    def _preupload(self, repo: str, revision: str, body: bytes, **_: Any) -> tuple[Any, ...]:
        there = self.repositories[repo].branches.get(revision, {})
        files = [
            {
                "path": asked["path"],
                "uploadMode": mode_of(asked["path"]),
                "shouldIgnore": False,
                "oid": oid_of(asked["path"], there.get(asked["path"])),
            }
            for asked in json.loads(body)["files"]
        ]
        return 200, {"files": files}

    def _branch(self, repo: str, revision: str, **_: Any) -> tuple[Any, ...]:
        branches = self.repositories[repo].branches
        if revision in branches:
            return 409, {"error": "Reference already exists"}
        branches[revision] = dict(branches["main"])
        return 200, {}

    def _lfs_batch(self, repo: str, body: bytes, **_: Any) -> tuple[Any, ...]:
        del repo
        objects = []
        for asked in json.loads(body)["objects"]:
            if asked["oid"] not in self.large_files:
                href = f"{self.url}/large/{asked['oid']}"
                asked = {**asked, "actions": {"upload": {"href": href}}}
            objects.append(asked)
        return 200, {"transfer": "basic", "objects": objects}

    def _lfs_upload(self, oid: str, body: bytes, **_: Any) -> tuple[Any, ...]:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "wrong content"}
        self.large_files[oid] = body
        return 200, {}

    def _commit(self, repo: str, revision: str, body: bytes, url: str) -> tuple[Any, ...]:
        repository = self.repositories[repo]
        if revision not in repository.branches:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        files = dict(repository.branches[revision])
        answer: dict[str, Any] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.large_files:
                    return 400, {"error": f"large file {value['path']} was not uploaded"}
                files[value["path"]] = self.large_files[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        if "create_pr=1" in url:
            revision = f"refs/pr/{len(repository.branches)}"
            answer["pullRequestUrl"] = f"{self.url}/{repo}/discussions/1"
        repository.branches[revision] = files
        oid = commit_of(files)
        answer |= {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}
        return 200, answer

    def _info(self, repo: str, **_: Any) -> tuple[Any, ...]:
        repository = self.repositories[repo]
        files = repository.branches["main"]
        siblings = [{"rfilename": name} for name in files]
        answer = {"id": repo, "private": repository.private, "sha": commit_of(files)}
        return 200, {**answer, "siblings": siblings, "tags": []}

    def _is_there(self, **_: Any) -> tuple[Any, ...]:
        return 200, {}

    def _tree(self, repo: str, revision: str, **_: Any) -> tuple[Any, ...]:
        files = self.repositories[repo].branches.get(revision, self.files(repo))
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": oid_of(name, content)}
            for name, content in files.items()
        ]
        return 200, entries

    def _resolve(self, repo: str, revision: str, name: str, **_: Any) -> tuple[Any, ...]:
        branches = self.repositories[repo].branches
        named = branches | {commit_of(files): files for files in branches.values()}
        if revision not in named:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        files = named[revision]
        if name not in files:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
        headers = {"ETag": f'"{oid_of(name, files[name])}"', "X-Repo-Commit": commit_of(files)}
        return 200, files[name], headers


def mode_of(name: str) -> str:
    return "lfs" if name.endswith(".safetensors") else "regular"


def oid_of(name: str, content: bytes | None) -> str | None:
    """What the Hub calls a file's content: git's name for it, or the sha256 of a large one."""
    if content is None:
        return None
    if mode_of(name) == "lfs":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def commit_of(files: dict[str, bytes]) -> str:
    named = [(name, oid_of(name, content)) for name, content in sorted(files.items())]
    return hashlib.sha1(repr(named).encode()).hexdigest()
