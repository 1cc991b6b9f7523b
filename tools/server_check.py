"""Ask llama-server the same questions with and without a draft model, for every build given, and count the answers that change.

    python tools/server_check.py --model M.gguf --draft D.gguf --out result.json \\
        --arm stock=builds/stock/llama-server --arm patched=builds/patched/llama-server,GGML_BATCH_INVARIANT=16

One slot, greedy, no prompt cache, so a draft should never change an answer. The result is JSON: for every build and prompt
the tokens with and without the draft, where they part, how much was drafted and accepted, and tokens a second.
Nothing but Python's standard library is needed.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts" / "evaluation.jsonl"


@dataclass(frozen=True)
class Arm:
    """A server program and the environment that it gets beyond the usual."""

    name: str
    program: Path
    env: dict[str, str]


def parse_arm(text: str) -> Arm:
    """``NAME=PROGRAM[,VARIABLE=VALUE...]``.

    >>> parse_arm("patched=/tmp/llama-server,GGML_BATCH_INVARIANT=16").env
    {'GGML_BATCH_INVARIANT': '16'}
    """
    name, _, rest = text.partition("=")
    program, *pairs = rest.split(",")
    env = dict(pair.partition("=")[::2] for pair in pairs)
    if not name or not program or not all(env):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PROGRAM[,VARIABLE=VALUE...]")
    return Arm(name, Path(program).resolve(), env)


def spread(prompts: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """``count`` prompts, taken from the categories in turn.

    >>> [p["id"] for p in spread([{"id": i, "category": i[0]} for i in ("a1", "a2", "b1")], 2)]
    ['a1', 'b1']
    """
    groups: dict[str, list[dict[str, str]]] = collections.defaultdict(list)
    for prompt in prompts:
        groups[prompt["category"]].append(prompt)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    return [prompt for prompt in turns if prompt is not None][:count]


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first index at which two token lists differ; the shorter one's length if it is a prefix; ``None`` if equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ask(port: int, path: str, body: dict[str, Any] | None = None, *, timeout: float = 300) -> Any:
    """One request to the server, its JSON reply."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)


@contextmanager
def serving(arm: Arm, arguments: list[str], *, patience: float) -> Iterator[int]:
    """A running server that answers; gives its port and ends it afterwards.

    Raises:
        SystemExit: it did not start; the last lines of its log are in the message.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "LLAMA_"))} | arm.env
    with tempfile.TemporaryFile() as log:
        command = [str(arm.program), "--host", "127.0.0.1", "--port", str(port), *arguments]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=arm.program.parent)
        try:
            until = time.monotonic() + patience
            while True:
                try:
                    ask(port, "/health", timeout=5)
                    break
                except (urllib.error.URLError, ConnectionError, TimeoutError, json.JSONDecodeError):
                    if child.poll() is not None or time.monotonic() > until:
                        log.seek(0)
                        tail = log.read().decode(errors="replace").splitlines()[-15:]
                        how = f"ended with {child.returncode}" if child.poll() is not None else "does not answer"
                        raise SystemExit("\n".join([f"{arm.name}: the server {how}", *tail])) from None
                    time.sleep(0.2)
            yield port
        finally:
            child.terminate()
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def answers(port: int, prompts: list[dict[str, str]], tokens: int) -> list[dict[str, Any]]:
    """What the server says to every prompt: tokens, text and its own timings."""
    given = []
    for prompt in prompts:
        turn = ask(port, "/apply-template", {"messages": [{"role": "user", "content": prompt["text"]}]})
        reply = ask(
            port,
            "/completion",
            {
                "prompt": turn["prompt"],
                "n_predict": tokens,
                "temperature": 0,
                "seed": 1,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        given.append({"tokens": reply["tokens"], "text": reply["content"], "timings": reply["timings"]})
    return given


def compare(
    prompts: list[dict[str, str]], plain: list[dict[str, Any]], drafted: list[dict[str, Any]]
) -> dict[str, Any]:
    """One build's answers without and with a draft, prompt by prompt and in sum."""
    rows = []
    for prompt, a, b in zip(prompts, plain, drafted, strict=True):
        fork = first_difference(a["tokens"], b["tokens"])
        rows.append(
            {
                "id": prompt["id"],
                "category": prompt["category"],
                "prompt_tokens": a["timings"].get("prompt_n"),
                "tokens": len(a["tokens"]),
                "tokens_sha256": hashlib.sha256(json.dumps(a["tokens"]).encode()).hexdigest(),
                "identical": fork is None,
                "first_differing_token": fork,
                "text": a["text"],
                "text_with_draft": None if fork is None else b["text"],
                "drafted": b["timings"].get("draft_n", 0),
                "accepted": b["timings"].get("draft_n_accepted", 0),
                "ms": a["timings"].get("predicted_ms"),
                "ms_with_draft": b["timings"].get("predicted_ms"),
            }
        )
    total = sum(r["drafted"] for r in rows)
    speed = {
        name: sum(len(x["tokens"]) for x in side) / max(1e-9, sum(x["timings"]["predicted_ms"] for x in side)) * 1e3
        for name, side in (("tokens_per_second", plain), ("tokens_per_second_with_draft", drafted))
    }
    return {
        "prompts": len(rows),
        "differing": sum(not r["identical"] for r in rows),
        "drafted": total,
        "accepted": sum(r["accepted"] for r in rows),
        **speed,
        "answers": rows,
    }


def sha256(path: Path) -> str:
    """Of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def libraries(program: Path) -> dict[str, str]:
    """The hashes of the program and of the libraries of llama.cpp beside it."""
    beside = [p for p in sorted(program.parent.glob("lib*.so")) if p.name.startswith(("libllama", "libggml"))]
    return {p.name: sha256(p) for p in [program, *beside]}


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Every arm, without and with the draft."""
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    prompts = spread([json.loads(line) for line in lines if line.strip()], options.count)
    common = ["-m", str(options.model.resolve()), "-np", "1", "-c", str(options.context), "-t", str(options.threads)]
    common += ["-ngl", str(options.gpu_layers), "-fa", "on", *options.also]
    draft = ["-md", str(options.draft.resolve()), "-ngld", str(options.gpu_layers)]
    draft += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(options.draft_max)]
    result: dict[str, Any] = {
        "model": options.model.name,
        "model_sha256": sha256(options.model),
        "draft": options.draft.name,
        "draft_sha256": sha256(options.draft),
        "tokens": options.tokens,
        "draft_max": options.draft_max,
        "arguments": [a for a in common[2:] if not a.startswith("/")],
        "arms": [],
    }
    plain_of: dict[str, list[list[int]]] = {}
    for arm in options.arm:
        sides = []
        for extra in ([], draft):
            with serving(arm, [*common, *extra], patience=options.patience) as port:
                sides.append(answers(port, prompts, options.tokens))
        found = compare(prompts, *sides)
        plain_of[arm.name] = [a["tokens"] for a in sides[0]]
        result["arms"].append({"name": arm.name, "env": arm.env, "libraries": libraries(arm.program), **found})
        print(
            f"{arm.name}: {found['differing']} of {found['prompts']} answers change with the draft; "
            f"{found['accepted']} of {found['drafted']} guesses kept; {found['tokens_per_second']:.1f} tokens a second, "
            f"{found['tokens_per_second_with_draft']:.1f} with the draft",
            flush=True,
        )
    result["plain_answers_that_differ"] = {
        f"{a} and {b}": sum(x != y for x, y in zip(plain_of[a], plain_of[b], strict=True))
        for a, b in itertools.combinations(plain_of, 2)
    }
    return result


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 if a draft was given but nothing was ever drafted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arm", type=parse_arm, action="append", required=True, help="NAME=PROGRAM[,VARIABLE=VALUE...]"
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft-max", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--gpu-layers", type=int, default=99)
    parser.add_argument("--patience", type=float, default=180, help="seconds that a server may take to start")
    parser.add_argument("--also", nargs="*", default=["--cache-ram", "0"], help="further arguments of every server")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    result = check(options)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    if not all(arm["drafted"] for arm in result["arms"]):
        print("error: a server never drafted anything, so nothing was checked", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
