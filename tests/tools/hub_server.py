"""A server on this machine that stands for the Hugging Face hub, as far as pushing a model goes."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = (".safetensors",)


class Hub:
    """Repositories by name, each `{"private": bool, "files": {name: bytes}, "commits": [message]}`; a context manager.

    `tokens` are those that are known, with what `whoami` says of them; `fails` maps a part of a path to the status that
    requests to it get.
    """

    def __init__(self):
        self.repos: dict[str, dict[str, Any]] = {}
        self.tokens = {"hf_writer": {"name": "me", "orgs": [{"name": "team"}]}}
        self.fails: dict[str, int] = {}
        self.blobs: dict[str, bytes] = {}
        self.seen: list[str] = []
        self._server = ThreadingHTTPServer(("localhost", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://localhost:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def has(self, repo: str, private: bool = False, **files: bytes) -> None:
        """Makes a repository that is there before; names of files have _ for a dot."""
        named = {name.replace("_", "."): data for name, data in files.items()}
        self.repos[repo] = {"private": private, "files": named, "commits": []}


def sha_of(repo: dict[str, Any]) -> str:
    """The id of the newest commit of a repository."""
    return f"{len(repo['commits']):040x}"


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _say(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400 and isinstance(content, dict):
            self.send_header("X-Error-Message", content.get("error", ""))
        if content == {"error": "Repository not found"}:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(data)

    def _handle(self) -> None:
        hub, body, path = self.hub, self._body(), self.path.partition("?")[0]
        hub.seen.append(f"{self.command} {path}")
        for part, status in hub.fails.items():
            if part in path:
                return self._say(status, {"error": "said no"})
        if path.startswith("/blobs/"):
            hub.blobs[path.rsplit("/", 1)[1]] = body
            return self._say(200, {})
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return self._say(200, {"warnings": [], "errors": []})
        who = hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if who is None:
            return self._say(401, {"error": "Invalid username or password."})
        if path == "/api/whoami-v2":
            return self._say(200, {"type": "user", "auth": {"accessToken": {"role": "write"}}, **who})
        return self._of_repository(path, body)

    do_GET = do_POST = do_PUT = _handle  # noqa: N815 (names of the standard library)

    def _of_repository(self, path: str, body: bytes) -> None:
        hub = self.hub
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.repos[name] = {"private": asked.get("visibility") == "private", "files": {}, "commits": []}
            return self._say(200, {"url": f"{hub.url}/{name}", "name": name, "id": "1"})
        found = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/.]+)(?:\.git/info/lfs/objects)?/?(\w*)(?:/main)?", path)
        repo = hub.repos.get(found[1]) if found else None
        if found is None or repo is None:
            return self._say(404, {"error": "Repository not found"})
        answer = {"": self._info, "preupload": self._modes, "batch": self._places, "commit": self._commit}[found[2]]
        return self._say(200, answer(found[1], repo, body))

    def _info(self, name: str, repo: dict, body: bytes) -> dict:
        siblings = [{"rfilename": file} for file in repo["files"]]
        return {"id": name, "private": repo["private"], "siblings": siblings, "sha": sha_of(repo), "tags": []}

    def _modes(self, name: str, repo: dict, body: bytes) -> dict:
        files = [file["path"] for file in json.loads(body)["files"]]
        modes = {file: "lfs" if file.endswith(LARGE) else "regular" for file in files}
        return {"files": [{"path": f, "uploadMode": mode, "shouldIgnore": False} for f, mode in modes.items()]}

    def _places(self, name: str, repo: dict, body: bytes) -> dict:
        def place(item):
            return {**item, "actions": {"upload": {"href": f"{self.hub.url}/blobs/{item['oid']}", "header": {}}}}

        return {"transfer": "basic", "objects": [place(item) for item in json.loads(body)["objects"]]}

    def _commit(self, name: str, repo: dict, body: bytes) -> dict:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo["commits"].append(value["summary"])
            elif line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.hub.blobs[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"]
                repo["files"][value["path"]] = data
            else:
                del repo["files"][value["path"]]
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{sha_of(repo)}", "commitOid": sha_of(repo)}
