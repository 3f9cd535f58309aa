"""A hub that is a folder: the few paths of its API that `push_to_hub` needs, on a port of this machine.

It takes large files as git LFS does. The client asks it so with HF_HUB_DISABLE_XET; the real hub takes them by Xet.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import bottle


class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass


class Hub:
    """The hub of the user "me". It keeps what is pushed in `folder`, and takes the tokens "write" and "read"."""

    def __init__(self, folder: Path):
        self.folder, self.created, self.fault, self.url = folder, {}, "", ""
        self.app = bottle.Bottle()
        self.app.get("/api/whoami-v2")(self.whoami)
        self.app.post("/api/repos/create")(self.create)
        self.app.post("/api/validate-yaml")(lambda: {"warnings": []})
        self.app.post("/api/models/<repo:path>/preupload/main")(self.choose_modes)
        self.app.post("/<repo:path>.git/info/lfs/objects/batch")(self.where_to)
        self.app.put("/lfs/<oid>")(self.keep_large)
        self.app.post("/api/models/<repo:path>/commit/main")(self.commit)

    def whoami(self):
        token = bottle.request.get_header("Authorization", "").removeprefix("Bearer ")
        if token not in ("write", "read"):
            raise bottle.HTTPResponse({"error": "who?"}, 401)
        return {"type": "user", "name": "me", "auth": {"accessToken": {"role": token}}}

    def create(self):
        asked = bottle.request.json
        repo = f"{asked['organization'] or 'me'}/{asked['name']}"
        if not repo.startswith("me/"):
            raise bottle.HTTPResponse({"error": "You don't have the rights to create a model there"}, 403)
        if repo in self.created:
            raise bottle.HTTPResponse({"error": "it is there", "url": f"{self.url}/{repo}"}, 409)
        self.created[repo] = asked.get("visibility")
        return {"url": f"{self.url}/{repo}"}

    def choose_modes(self, repo):
        files = [file["path"] for file in bottle.request.json["files"]]
        modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in files}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    def where_to(self, repo):
        objects = json.load(bottle.request.body)["objects"]
        return {
            "transfer": "basic",
            "objects": [file | {"actions": {"upload": {"href": f"{self.url}/lfs/{file['oid']}"}}} for file in objects],
        }

    def keep_large(self, oid):
        if self.fault == "large":
            raise bottle.HTTPResponse({"error": "Your storage is full"}, 403)
        (self.folder / "lfs").mkdir(parents=True, exist_ok=True)
        with bottle.request.body as body:
            (self.folder / "lfs" / oid).write_bytes(body.read())

    def commit(self, repo):
        if self.fault == "commit":
            raise bottle.HTTPResponse({"error": "Your storage is full"}, 403)
        (self.folder / repo).mkdir(parents=True, exist_ok=True)
        for line in bottle.request.body.read().splitlines():
            part = json.loads(line)
            content = None
            if part["key"] == "file":
                content = base64.b64decode(part["value"]["content"])
            elif part["key"] == "lfsFile":
                content = (self.folder / "lfs" / part["value"]["oid"]).read_bytes()
            if content is not None:
                (self.folder / repo / part["value"]["path"]).write_bytes(content)
        return {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1", "pullRequestUrl": None}


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    with make_server("127.0.0.1", 0, hub.app, handler_class=Quiet) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield hub
        server.shutdown()
