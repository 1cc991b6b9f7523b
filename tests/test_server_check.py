"""The comparison of llama-server's answers with and without a draft, against a server that is a few lines of Python."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "server_check.py"

# Answers with the numbers of the prompt's characters. With a draft it says that it drafted, and, when FORK is in its
# environment, ends the answer to any prompt with an "x" in it otherwise. The second line is a command to sh and a string to
# Python: the name of an interpreter in a first line may hold no space.
FAKE = f"""#!/bin/sh
"exec" "{sys.executable}" "$0" "$@"
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
drafting = "-md" in sys.argv
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers(); self.wfile.write(data)
    def do_GET(self): self.reply({{"status": "ok"}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/apply-template":
            return self.reply({{"prompt": body["messages"][0]["content"]}})
        assert body["temperature"] == 0 and body["cache_prompt"] is False
        tokens = [ord(c) for c in body["prompt"]][: body["n_predict"]]
        if drafting and os.environ.get("FORK") and "x" in body["prompt"]:
            tokens[-1] += 1
        timings = {{"prompt_n": 3, "predicted_ms": 10.0}}
        if drafting and not os.environ.get("LAZY"):
            timings |= {{"draft_n": 4, "draft_n_accepted": 2}}
        self.reply({{"tokens": tokens, "content": "".join(map(chr, tokens)), "timings": timings}})
if os.environ.get("BROKEN"):
    print("no kernel image is available"); sys.exit(3)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("server_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["server_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    server = tmp_path / "llama-server"
    server.write_text(FAKE, encoding="utf-8")
    server.chmod(0o755)
    prompts = [
        {"id": "one", "category": "a", "text": "abc"},
        {"id": "two", "category": "a", "text": "def"},
        {"id": "three", "category": "b", "text": "xyz"},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(p) for p in prompts), encoding="utf-8")
    for name in ("m.gguf", "d.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    return [
        *(
            "--model",
            str(tmp_path / "m.gguf"),
            "--draft",
            str(tmp_path / "d.gguf"),
            "--prompts",
            str(tmp_path / "p.jsonl"),
        ),
        *("--out", str(tmp_path / "out.json"), "--patience", "20"),
    ]


def run(tool: ModuleType, arguments: list[str], tmp_path: Path, *arms: str) -> tuple[int, dict[str, Any]]:
    program = tmp_path / "llama-server"
    given = [part for arm in arms for part in ("--arm", arm.replace("SERVER", str(program)))]
    status = tool.main([*arguments, *given])
    result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    return status, result


def test_a_changed_answer_is_counted_and_placed(tool: ModuleType, arguments: list[str], tmp_path: Path) -> None:
    status, result = run(tool, arguments, tmp_path, "stock=SERVER,FORK=1", "patched=SERVER,GGML_BATCH_INVARIANT=16")
    assert status == 0
    stock, patched = result["arms"]
    assert (stock["differing"], patched["differing"]) == (1, 0)
    assert patched["env"] == {"GGML_BATCH_INVARIANT": "16"}
    (changed,) = [a for a in stock["answers"] if not a["identical"]]
    assert (changed["id"], changed["first_differing_token"]) == ("three", 2)
    assert (changed["text"], changed["text_with_draft"]) == ("xyz", "xy{")
    assert result["plain_answers_that_differ"] == {"stock and patched": 0}
    assert stock["drafted"] == 12 and stock["accepted"] == 6


def test_a_server_that_never_drafts_is_no_check(tool: ModuleType, arguments: list[str], tmp_path: Path) -> None:
    status, _ = run(tool, arguments, tmp_path, "patched=SERVER,LAZY=1")
    assert status == 1


def test_a_server_that_does_not_start_is_named_with_its_last_words(
    tool: ModuleType, arguments: list[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"patched: the server ended with 3\nno kernel image"):
        run(tool, arguments, tmp_path, "patched=SERVER,BROKEN=1")


def test_prompts_are_taken_from_the_categories_in_turn(tool: ModuleType) -> None:
    prompts = [{"id": str(i), "category": c} for i, c in enumerate("aaabbc")]
    assert [p["id"] for p in tool.spread(prompts, 5)] == ["0", "3", "5", "1", "4"]
    assert len(tool.spread(prompts, 99)) == 6


def test_lists_of_tokens_part_at_the_first_difference_or_at_the_end_of_the_shorter(tool: ModuleType) -> None:
    assert tool.first_difference([1, 2], [1, 2]) is None
    assert tool.first_difference([1, 2], [1, 3]) == 1
    assert tool.first_difference([1, 2], [1]) == 1
