"""Downloads against a local server that acts as the hub: resumed, verified, and every refusal in one line."""

from __future__ import annotations

import hashlib
import http.server
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hiraishin import hub
from hiraishin.errors import UserError
from hiraishin.models import check_file, resolve
from hiraishin.profile import Model

FILE = "tiny-Q4_K_M.gguf"


@dataclass
class Hub:
    """What the server answers, and what it was asked."""

    content: bytes
    address: str = ""
    status: int = 200
    drop_after: int | None = None
    """Close the connection after so many bytes of a body; ``None`` sends all of it."""
    then: int | None = None
    """The status of everything after the first dropped connection."""
    etag: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)


def handler(state: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def head(self, status: int, length: int, **more: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.send_header("Connection", "close")
            self.close_connection = True
            for name, value in more.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        def answer(self, body: bool) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.command, wanted))
            if state.status != 200 or not self.path.endswith(f"/owner/name/resolve/main/{FILE}"):
                status = state.status if state.status != 200 else 404
                extra = {"X_Error_Code": "EntryNotFound"} if status == 404 else {}
                self.head(status, 0, **extra)
                return
            start = int(match[1]) if wanted and (match := re.match(r"bytes=(\d+)-", wanted)) else 0
            piece = state.content[start:]
            more = {"ETag": f'"{state.etag}"', "X_Repo_Commit": "0" * 40, "Accept_Ranges": "bytes"}
            if wanted:
                more["Content_Range"] = f"bytes {start}-{len(state.content) - 1}/{len(state.content)}"
            self.head(206 if wanted else 200, len(piece), **more)
            if body:
                self.wfile.write(piece if state.drop_after is None else piece[: state.drop_after])
                state.status = state.then or state.status

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

    return Handler


@pytest.fixture
def server(tiny_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (home / "models").unlink(missing_ok=True)
    content = tiny_model.read_bytes()
    state = Hub(content, etag=hashlib.sha256(content).hexdigest())
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    state.address = f"http://127.0.0.1:{http_server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", state.address)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client's waits between its own retries
    # The client hands on 10 MB at a time, and what is less is lost with a connection; the tiny model has less.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield state
    http_server.shutdown()
    thread.join()
    http_server.server_close()


def wanted(**more: Any) -> Model:
    return Model(source="hub", repo="owner/name", file=FILE, **more)


def refused(model: Model) -> str:
    with pytest.raises(UserError) as caught:
        hub.fetch(model, echo=lambda _: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def partials() -> list[Path]:
    target = hub.target_path("owner/name", FILE)
    return [p for p in target.parent.iterdir() if p.suffix == ".partial"] if target.parent.is_dir() else []


def test_a_file_is_fetched_once_and_verified(server: Hub) -> None:
    said: list[str] = []
    path = hub.fetch(wanted(sha256=server.etag), echo=said.append)
    assert path.read_bytes() == server.content
    assert said[0].startswith(f"downloading owner/name/{FILE}")
    asked = len(server.asked)
    assert hub.fetch(wanted(sha256=server.etag)) == path
    assert len(server.asked) == asked
    assert partials() == []


def test_a_profile_model_resolves_through_the_hub(server: Hub) -> None:
    found = resolve(wanted(sha256=server.etag), echo=lambda _: None)
    assert found.sha256 == server.etag
    assert not found.synthetic
    check_file(found.path)


def test_an_interrupted_download_is_kept_and_resumed(server: Hub) -> None:
    server.drop_after, server.then = 100_000, 500
    text = refused(wanted(sha256=server.etag))
    assert "what has arrived is kept" in text
    assert [p.stat().st_size for p in partials()] == [100_000]
    server.drop_after, server.status = None, 200
    server.asked.clear()
    path = hub.fetch(wanted(sha256=server.etag), echo=lambda _: None)
    assert path.read_bytes() == server.content
    assert ("GET", "bytes=100000-") in server.asked
    assert partials() == []


def test_short_interruptions_are_bridged_without_a_word(server: Hub) -> None:
    server.drop_after = len(server.content) // 3 + 1
    path = hub.fetch(wanted(sha256=server.etag), echo=lambda _: None)
    assert path.read_bytes() == server.content
    assert [m for m, _ in server.asked].count("GET") > 2


def test_a_wrong_checksum_is_refused_and_the_file_removed(server: Hub) -> None:
    server.content = server.content[:-1] + bytes([server.content[-1] ^ 1])
    text = refused(wanted(sha256=server.etag))
    assert f"expected {server.etag}; it was removed" in text
    assert partials() == []
    assert not hub.target_path("owner/name", FILE).exists()


def test_without_a_checksum_in_the_profile_the_one_that_the_hub_states_counts(server: Hub) -> None:
    server.content = server.content[:-1] + bytes([server.content[-1] ^ 1])
    assert "it was removed" in refused(wanted())


def test_a_part_of_another_version_is_never_continued(server: Hub) -> None:
    target = hub.target_path("owner/name", FILE)
    target.parent.mkdir(parents=True)
    other = target.with_name(f".{FILE}.{'0' * 16}.partial")
    other.write_bytes(b"another version")
    assert hub.fetch(wanted(sha256=server.etag), echo=lambda _: None).read_bytes() == server.content


def test_a_damaged_part_is_refused_by_the_checksum_and_the_next_try_starts_over(server: Hub) -> None:
    target = hub.target_path("owner/name", FILE)
    target.parent.mkdir(parents=True)
    target.with_name(f".{FILE}.{server.etag[:16]}.partial").write_bytes(bytes(50_000))
    assert "it was removed" in refused(wanted(sha256=server.etag))
    assert hub.fetch(wanted(sha256=server.etag), echo=lambda _: None).read_bytes() == server.content


def test_a_changed_profile_does_not_take_the_old_file(server: Hub) -> None:
    hub.fetch(wanted(), echo=lambda _: None)
    assert "has not the sha256 that the profile names" in refused(wanted(sha256="0" * 64))


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "refuses owner/name/tiny-Q4_K_M.gguf (401)"),
        (403, "refuses owner/name/tiny-Q4_K_M.gguf (403)"),
        (404, "has no owner/name/tiny-Q4_K_M.gguf (404)"),
        (429, "limits requests (429)"),
        (500, "answers 500"),
    ],
)
def test_every_refusal_of_the_hub_is_one_line(server: Hub, status: int, said: str) -> None:
    server.status = status
    assert said in refused(wanted())


def test_no_server_at_all_is_one_line(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "connection to the hub failed" in refused(wanted())


def test_a_full_disk_is_told_before_the_download(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    assert "GB are free" in refused(wanted())
    assert partials() == []


@pytest.mark.parametrize("file", ["../../evil.gguf", "/etc/passwd", "a/../../b.gguf"])
def test_a_file_name_cannot_lead_out_of_the_models_folder(server: Hub, file: str) -> None:
    with pytest.raises(UserError, match="no name of a file"):
        hub.fetch(Model(source="hub", repo="owner/name", file=file))
    with pytest.raises(UserError, match="no name of a file"):
        hub.fetch(Model(source="hub", repo="../..", file="x.gguf"))
