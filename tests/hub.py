"""A stand-in for the Hugging Face hub: a real server on 127.0.0.1 that huggingface_hub accepts.

How to use it::

    folder = saved_llama(tmp_path / "llama")       # config, weights, tokenizer; no torch, 0.1 s
    with running_hub() as hub:
        commit = hub.add("acme/llama", folder)     # again: a new commit, which main then names
        place.run("train", ..., **hub.environ(tmp_path / "home"))   # for a process of its own
        hub.take_over(monkeypatch, tmp_path / "home")               # for this process
        assert hub.downloads["acme/llama", "model.safetensors"] == 1

``environ`` sends a process here and gives it an empty home for tokens and cache. What goes wrong is
set on the repository (``hub.repos["acme/llama"].is_gated = True``) or on the server (``cut``,
``pause_s``). Served: model_info, the tree of files, and files, for branches, tags and commits, with
HEAD and Range, ETag, X-Repo-Commit, X-Linked-Etag and X-Error-Code; a dataset is called
``datasets/owner/name``. Large files are not redirected to another host, and there is no Xet.

It also takes pushes: whoami, new repositories and branches, large files by LFS, and commits.
``TOKEN`` may write for ``acme``, ``STRANGER`` nowhere, and ``READER`` may only read.
"""

import hashlib
import json
import logging
import os
import re
import socket
import struct
import threading
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardyard.data.tokenizer import train_bpe
from shardyard.families.presets import PRESETS

TOKEN = "hf_of_one_who_may_read_everything"
"""The token of a user who has accepted all terms."""
STRANGER = "hf_of_one_who_has_accepted_nothing"
"""A token that the hub knows, of a user without any permission."""
READER = "hf_of_one_who_may_only_read"
"""A token of the first user that may not write."""
OWNER = "acme"
"""Whose repositories the first user may write to."""

_CHUNK = 64 * 1024
_API = re.compile(r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?")
_PUSH = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)")
_LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_FILE = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    """One repository: its commits, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    """Branch or tag -> commit."""
    is_gated: bool = False
    """Its files are for those who have accepted the terms; that it exists is known to all."""
    is_private: bool = False
    """To others it does not exist."""

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class Hub:
    """What the server holds and has counted; tests read and change it."""

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, Repo] = {}
        self.requests: Counter[tuple[str, str]] = Counter()
        """(method, path) -> how often it was asked."""
        self.downloads: Counter[tuple[str, str]] = Counter()
        """(repository, file) -> how often it was sent to its end, in one part or several."""
        self.sent: Counter[tuple[str, str]] = Counter()
        """(repository, file) -> bytes of it that were sent."""
        self.pause_s = 0.0
        """Between two parts of a file, of 64 KiB: a slow connection."""
        self.is_down = False
        """Every connection is closed without a word."""
        self.spoiled: set[str] = set()
        """Files whose bytes are changed on the way; the digests stay those of the hub."""
        self.num_hang_ups = 0
        self.objects: dict[str, bytes] = {}
        """Large files that were uploaded, by SHA-256."""
        self.uploads: Counter[str] = Counter()
        """SHA-256 of a large file -> how often it was received."""
        self.uploads_before_down: int | None = None
        """Large files that are still received before the connection breaks; None: it does not."""
        self._cuts: dict[str, list[tuple[int, bool]]] = {}
        self._lock = threading.Lock()
        self.is_over = threading.Event()

    def add(self, name: str, folder: Path, *, tag: str | None = None, branch: str = "main") -> str:
        """Commit what a folder holds, and let a branch (and a tag) name it; returns the commit."""
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        repo = self.repos.setdefault(name, Repo())
        digests = [hashlib.sha256(content).hexdigest() for content in files.values()]
        commit = hashlib.sha1(json.dumps([name, list(files), digests]).encode()).hexdigest()
        repo.commits[commit] = files
        repo.refs[branch] = commit
        if tag is not None:
            repo.refs[tag] = commit
        return commit

    def cut(self, file: str, *, after: int, times: int = 1, is_reset: bool = False) -> None:
        """Break the connection once so many bytes of a file were sent, so many times.

        Args:
            is_reset: By a reset, which huggingface_hub does not try again after; else by an end.
        """
        self._cuts[file] = [(after, is_reset)] * times

    def hang_up(self) -> None:
        """End what is being sent now: to a client that was killed it may go on unseen."""
        self.num_hang_ups += 1

    def environ(self, home: Path, *, token: str | None = None) -> dict[str, str]:
        """The environment of a process that asks this hub, with an empty home of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_TOKEN": token or "",
            "HF_HUB_OFFLINE": "",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def take_over(
        self, monkeypatch: pytest.MonkeyPatch, home: Path, *, token: str | None = None
    ) -> None:
        """As ``environ``, for this process: huggingface_hub reads most of it at its import."""
        from huggingface_hub import constants

        for name, value in self.environ(home, token=token).items():
            monkeypatch.setenv(name, value)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        # Its handler keeps the stderr of its import, which pytest has closed by now.
        monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [])

    def next_cut(self, file: str) -> tuple[int, bool] | None:
        with self._lock:
            cuts = self._cuts.get(file, [])
            return cuts.pop(0) if cuts else None

    def count(self, table: Counter[tuple[str, str]], key: tuple[str, str], by: int = 1) -> None:
        with self._lock:
            table[key] += by


@contextmanager
def running_hub(address: str = "127.0.0.1") -> Iterator[Hub]:
    """A hub that serves until the block ends.

    Args:
        address: ``0.0.0.0``: containers of this machine reach it too, by another address of it.
    """
    hub = Hub()
    server = ThreadingHTTPServer((address, 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._receive()

    def do_PUT(self) -> None:
        self._receive()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.count(self.hub.requests, (self.command, unquote(path)))
        if self.hub.is_down:
            self.close_connection = True
            return
        try:
            if path == "/api/whoami-v2":
                self._identify()
            elif found := _API.fullmatch(path):
                self._api(found[1], found[2], unquote(found[3] or "main"))
            elif found := _FILE.fullmatch(path):
                self._file(found[1], unquote(found[2]), unquote(found[3]))
            else:
                self._refuse(404, "RepoNotFound")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _receive(self) -> None:
        path = urlsplit(self.path).path
        self.hub.count(self.hub.requests, (self.command, unquote(path)))
        body = self._body()
        try:
            if self.hub.is_down:
                self.close_connection = True
            elif path == "/api/validate-yaml":
                self._send_json({"errors": [], "warnings": []})
            elif path.startswith("/lfs/"):
                self._keep_object(path.removeprefix("/lfs/"), body)
            elif path == "/api/repos/create":
                self._create(json.loads(body))
            elif found := _LFS.fullmatch(path):
                self._offer_uploads(found[1], json.loads(body))
            elif found := _PUSH.fullmatch(path):
                self._push(found[1], found[2], unquote(found[3]), body)
            else:
                self._refuse(404, "RepoNotFound")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _identify(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (TOKEN, STRANGER, READER):
            self._refuse(401, "", {"X-Error-Message": "Invalid user token."})
            return
        role = "read" if token == READER else "write"
        name = "stranger" if token == STRANGER else OWNER
        access = {"displayName": "of a test", "role": role}
        self._send_json({"name": name, "auth": {"accessToken": access}})

    def _may_write(self, name: str) -> bool:
        if self._who() == TOKEN and name.partition("/")[0] == OWNER:
            return True
        self._refuse(403, "", {"X-Error-Message": f"You don't have the rights to write to {name}"})
        return False

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        if not self._may_write(name):
            return
        if name in self.hub.repos:
            self._send_json({"error": "exists", "url": f"{self.hub.url}/{name}"}, status=409)
            return
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.hub.repos[name] = Repo(
            commits={"0" * 40: {".gitattributes": b"*.safetensors filter=lfs\n"}},
            refs={"main": "0" * 40},
            is_private=private,
        )
        self._send_json({"url": f"{self.hub.url}/{name}", "id": "1", "name": name})

    def _offer_uploads(self, name: str, wanted: dict[str, Any]) -> None:
        if not self._may_write(name):
            return
        offered = []
        for each in wanted["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}
            offered.append(entry)
        self._send_json({"transfer": "basic", "objects": offered})

    def _keep_object(self, oid: str, content: bytes) -> None:
        left = self.hub.uploads_before_down
        if left == 0:
            self.close_connection = True
            return
        if left is not None:
            self.hub.uploads_before_down = left - 1
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content
        self.hub.uploads[oid] += 1
        self._send_json({})

    def _push(self, name: str, kind: str, revision: str, body: bytes) -> None:
        if not self._may_write(name):
            return
        repo = self.hub.repos[name]
        if kind == "branch":
            repo.refs.setdefault(revision, repo.refs["main"])
            self._send_json({})
        elif kind == "preupload":
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._send_json({"files": modes})
        else:
            self._commit(repo, name, revision, [json.loads(line) for line in body.splitlines()])

    def _commit(self, repo: Repo, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        parent = repo.refs[branch]
        if lines[0]["value"].get("parentCommit", parent) != parent:
            self._refuse(412, "", {"X-Error-Message": "A commit has happened since"})
            return
        files = dict(repo.commits[parent])
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case other:
                    raise ValueError(f"{other} is not known to this hub")
        commit = hashlib.sha1(json.dumps([parent, *lines]).encode()).hexdigest()
        repo.commits[commit] = files
        repo.refs[branch] = commit
        self._send_json(
            {"commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"}
        )

    def _api(self, name: str, kind: str | None, revision: str) -> None:
        found = self._found(name, revision)
        if found is None:
            return
        repo, commit = found
        entries = [_entry(path, content) for path, content in repo.commits[commit].items()]
        if kind == "tree":
            self._send_json(entries)
            return
        siblings = [
            {
                "rfilename": entry["path"],
                "size": entry["size"],
                "blobId": entry["oid"],
                **({"lfs": _lfs_of_sibling(entry["lfs"])} if "lfs" in entry else {}),
            }
            for entry in entries
        ]
        access = {"gated": "manual" if repo.is_gated else False, "private": repo.is_private}
        self._send_json({"id": name, "sha": commit, "siblings": siblings, "tags": [], **access})

    def _file(self, name: str, revision: str, path: str) -> None:
        found = self._found(name, revision)
        if found is None:
            return
        repo, commit = found
        if repo.is_gated and self._who() != TOKEN:
            self._refuse(403 if self._who() else 401, "GatedRepo")
            return
        content = repo.commits[commit].get(path)
        if content is None:
            self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
            return
        self._send_file(name, path, content, commit)

    def _found(self, name: str, revision: str) -> tuple[Repo, str] | None:
        if self.headers.get("Authorization") and not self._who():
            words = "Invalid credentials in Authorization header"
            self._refuse(401, "", {"X-Error-Message": words})
            return None
        repo = self.hub.repos.get(name)
        if repo is None or (repo.is_private and self._who() != TOKEN):
            self._refuse(404 if self._who() else 401, "RepoNotFound")
            return None
        commit = repo.commit_of(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return None
        return repo, commit

    def _who(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return TOKEN if token == READER else token if token in (TOKEN, STRANGER) else None

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"X-Error-Code": code, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _send_file(self, name: str, path: str, content: bytes, commit: str) -> None:
        entry = _entry(path, content)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted else 0
        stop = int(wanted[2]) + 1 if wanted and wanted[2] else len(content)
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{entry["oid"]}"')
        if "lfs" in entry:
            self.send_header("X-Linked-Etag", f'"{entry["lfs"]["oid"]}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "GET":
            self._send_body(name, path, content[:stop], start)

    def _send_body(self, name: str, path: str, content: bytes, start: int) -> None:
        cut, is_reset = self.hub.next_cut(path) or (len(content), False)
        end = min(len(content), cut)
        if path in self.hub.spoiled:
            content = bytes(len(content))
        hang_ups = self.hub.num_hang_ups
        while start < end and self.hub.num_hang_ups == hang_ups:
            part = content[start : min(start + _CHUNK, end)]
            self.wfile.write(part)
            self.wfile.flush()
            start += len(part)
            self.hub.count(self.hub.sent, (name, path), len(part))
            if self.hub.pause_s and self.hub.is_over.wait(self.hub.pause_s):
                break
        if start == len(content):
            self.hub.count(self.hub.downloads, (name, path))
        else:
            if is_reset:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                os.close(self.connection.detach())  # now: else the server sends an end first
            self.close_connection = True


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """A file in a tree, as the hub lists it; weights are in LFS, and have a SHA-256."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if path.endswith((".safetensors", ".bin")):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


def _lfs_of_sibling(lfs: dict[str, Any]) -> dict[str, Any]:
    return {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}


def saved_llama(folder: Path, *, seed: int = 0) -> Path:
    """A llama-tiny with its tokenizer as save_pretrained writes it; another seed, other weights."""
    shape = PRESETS["llama-tiny"].shape
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer = train_bpe(iter(texts), vocab_size=512)
    vocab_size = len(json.loads(tokenizer["tokenizer.json"])["model"]["vocab"])
    folder.mkdir(parents=True)
    for name, content in tokenizer.items():
        (folder / name).write_bytes(content)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    draw = np.random.default_rng(seed)
    weights = {
        name: np.ones(size, np.float32)
        if len(size) == 1
        else draw.normal(0, 0.02, size).astype(np.float32)
        for name, size in _llama_sizes(config).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _llama_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> size of each tensor of transformers' LlamaForCausalLM."""
    hidden, inner, rows = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    pairs = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, hidden)}
    for number in range(config["num_hidden_layers"]):
        block = f"model.layers.{number}."
        sizes |= {
            f"{block}input_layernorm.weight": (hidden,),
            f"{block}self_attn.q_proj.weight": (hidden, hidden),
            f"{block}self_attn.k_proj.weight": (pairs, hidden),
            f"{block}self_attn.v_proj.weight": (pairs, hidden),
            f"{block}self_attn.o_proj.weight": (hidden, hidden),
            f"{block}post_attention_layernorm.weight": (hidden,),
            f"{block}mlp.gate_proj.weight": (inner, hidden),
            f"{block}mlp.up_proj.weight": (inner, hidden),
            f"{block}mlp.down_proj.weight": (hidden, inner),
        }
    return sizes | {"model.norm.weight": (hidden,), "lm_head.weight": (rows, hidden)}
