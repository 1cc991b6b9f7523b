"""What a speculative decode costs from end to end, on several builds and settings at once, with the same cycles in each.

    python tools/end_to_end.py --backend cuda --target qwen3-8b:Q4_K_M --draft qwen3-0.6b:Q4_K_M \\
        --arm stock=stock --arm exact=patched,16 --right 0.87 --go-on 0.492 --out result.json

For models that mean nothing (synthetic shapes) no draft guesses well, so what is guessed and what is kept is drawn once,
from a seed, and is the same in every arm: a cycle guesses on with probability ``--go-on`` after each guess, at most
``--most`` tokens, and a guess is right with probability ``--right``. 0.870 and 0.492 make 1.97 guesses a cycle with 77 %
of them kept, which is what the post reports. The draft model really runs, one pass a guess over the tokens of that
sequence, and the target's pass really verifies; only which guesses are kept is dictated, along the plain decode's tokens.
How many of the target's own picks agree with that plain decode is counted: in an exact arm, all of them.

Arms are ``NAME=BUILD[,SWITCH[,PARTS LEFT OUT]]``, for instance ``no cache=patched,16,cuda-graphs+cuda-fast``. Each arm
decodes plainly and with the draft, prompt by prompt in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hiraishin import provenance  # noqa: E402
from hiraishin.builds import find_build  # noqa: E402
from hiraishin.llama import SWITCH_OFF, Model, Session, fallbacks, set_switch  # noqa: E402
from hiraishin.models import resolve  # noqa: E402
from hiraishin.profile import Model as ModelChoice  # noqa: E402
from hiraishin.prompts import load_prompts  # noqa: E402
from hiraishin.tasks import PARTS  # noqa: E402

MOST = 15


def plan(tokens: int, *, right: float, go_on: float, most: int, seed: str) -> list[tuple[int, int]]:
    """Cycles that give ``tokens`` tokens after the first: how many are guessed and how many of those are kept.

    >>> plan(4, right=1.0, go_on=1.0, most=2, seed="")
    [(2, 2), (0, 0)]
    """
    coins = random.Random(f"hiraishin {seed}")
    cycles = []
    left = tokens
    while left > 0:
        guessed = min(1, left - 1)
        while 0 < guessed < min(most, left - 1) and coins.random() < go_on:
            guessed += 1
        kept = 0
        while kept < guessed and coins.random() < right:
            kept += 1
        cycles.append((guessed, kept))
        left -= kept + 1
    return cycles


class Follower:
    """A draft model that runs as a draft does, over tokens that it is told."""

    def __init__(self, session: Session, prompt: Sequence[int]) -> None:
        self.session = session
        session.clear()
        session.prefill(prompt)
        self._holds = list(prompt)

    def guess(self, sequence: Sequence[int], guesses: Sequence[int]) -> None:
        """Feed what is new of ``sequence`` and make ``guesses``, a pass and an argmax each."""
        known = 0
        while known < min(len(self._holds), len(sequence) - 1) and self._holds[known] == sequence[known]:
            known += 1
        self.session.rollback(known)
        piece = list(sequence[known:])
        for made in guesses:
            self.session.decode(piece, logits="last")[0].argmax()
            piece = [made]
        self._holds = [*sequence, *guesses[:-1]]


def decode(
    target: Session, draft: Session | None, prompt: list[int], trace: list[int], cycles: list[tuple[int, int]], on: Any
) -> dict[str, Any]:
    """One timed decode along ``trace``; ``on`` turns the arm's switch on (``True``) or off."""
    on(False)
    target.clear()
    target.prefill(prompt)
    follower = None if draft is None else Follower(draft, prompt)
    on(True)
    n_vocab = target.model.n_vocab
    spent = {"draft": 0.0, "verify": 0.0, "bookkeeping": 0.0}
    done, agreeing, rows_seen, before = 1, 0, 0, fallbacks() or 0
    for guessed, kept in cycles:
        began = time.perf_counter()
        after = trace[done : done + guessed]
        guesses = [t if i < kept else (t + 1) % n_vocab for i, t in enumerate(after)]
        if follower is not None and guesses:
            follower.guess([*prompt, *trace[:done]], guesses)
        drafted = time.perf_counter()
        n_past = target.n_past
        rows = target.decode([trace[done - 1], *guesses])
        verified = time.perf_counter()
        picks = [int(row.argmax()) for row in rows[: kept + 1]]
        target.rollback(n_past + kept + 1)
        agreeing += sum(a == b for a, b in zip(picks, trace[done : done + kept + 1], strict=True))
        rows_seen += kept + 1
        done += kept + 1
        ended = time.perf_counter()
        for part, seconds in zip(spent, (drafted - began, verified - drafted, ended - verified), strict=True):
            spent[part] += seconds
    on(False)
    return {
        "tokens": done - 1,
        "cycles": len(cycles),
        "guessed": sum(g for g, _ in cycles),
        "kept": sum(k for _, k in cycles),
        "seconds": spent,
        "picks": rows_seen,
        "picks_as_plain": agreeing,
        "fallbacks": (fallbacks() or 0) - before,
    }


def child(options: argparse.Namespace) -> None:
    """Serve requests, one JSON line each, on the build that the environment names."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # native output goes to the log

    def session(path: str) -> Session:
        model = Model(path, gpu_layers=options.gpu_layers)
        return Session(model, n_ctx=options.prompt_tokens + options.tokens + MOST, threads=options.threads)

    target = session(options.target)
    draft = session(options.draft) if options.draft else None
    for line in sys.stdin:
        request = json.loads(line)
        prompt = request.get("prompt") or target.model.tokenize(request["text"])[: options.prompt_tokens]
        if "text" in request:
            set_switch(SWITCH_OFF)
            target.clear()
            trace = [int(target.prefill(prompt).argmax())]
            while len(trace) <= options.tokens:
                trace.append(int(target.decode(trace[-1:])[0].argmax()))
            reply: dict[str, Any] = {"prompt": prompt, "trace": trace}
        else:

            def turn(on: bool, request: dict[str, Any] = request) -> None:
                set_switch(request["switch"] if on else SWITCH_OFF, request["parts_off"])

            speculative = request["cycles"] is not None
            cycles = [tuple(c) for c in request["cycles"]] if speculative else [(0, 0)] * options.tokens
            reply = decode(target, draft if speculative else None, prompt, request["trace"], cycles, turn)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class Child:
    """A process that holds one build."""

    def __init__(self, build: str, options: argparse.Namespace) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "LLAMA_"))} | dict(options.env)
        env["LLAMA_CPP_LIB_PATH"] = str(find_build(build, options.backend).lib_dir)
        wanted = ("target", "draft", "gpu_layers", "threads", "tokens", "prompt_tokens")
        given = [f"--{k.replace('_', '-')}={v}" for k in wanted if (v := getattr(options, k)) is not None]
        self.process = subprocess.Popen(
            [sys.executable, "-u", __file__, "--child", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=env,
        )

    def ask(self, **request: Any) -> Any:
        """One request, its reply."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a measuring process ended with {self.process.wait()}; --verbose shows its log")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def parse_arm(text: str) -> dict[str, Any]:
    """``NAME=BUILD[,SWITCH[,PARTS]]``.

    >>> parse_arm("exact=patched,16,guard+cuda-fast")
    {'name': 'exact', 'build': 'patched', 'switch': 16, 'without': 'guard+cuda-fast'}
    """
    name, _, rest = text.partition("=")
    build, switch, without, *more = [*rest.split(","), "", ""][: max(3, rest.count(",") + 1)]
    if not name or not build or more or any(part not in PARTS for part in without.split("+") if part):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=BUILD[,SWITCH[,PARTS]]; parts: {', '.join(PARTS)}")
    return {"name": name, "build": build, "switch": int(switch or 0), "without": without}


def model_path(text: str) -> str:
    """A GGUF file, or SHAPE:QUANT of a synthetic model, which is made if it is not there."""
    if text.endswith(".gguf"):
        return text
    shape, _, quant = text.partition(":")
    return str(resolve(ModelChoice(source="synthetic", shape=shape, quant=quant), quant).path)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over prompts, and the median over rounds of the speed."""
    total = {
        k: sum(r[k] for r in runs)
        for k in ("tokens", "cycles", "guessed", "kept", "picks", "picks_as_plain", "fallbacks")
    }
    speeds = []
    for number in sorted({r["round"] for r in runs}):
        here = [r for r in runs if r["round"] == number]
        speeds.append(sum(r["tokens"] for r in here) / sum(sum(r["seconds"].values()) for r in here))
    ms = {
        part: 1e3 * sum(r["seconds"][part] for r in runs) / total["cycles"]
        for part in ("draft", "verify", "bookkeeping")
    }
    return {
        **total,
        "width": 1 + total["guessed"] / total["cycles"],
        "acceptance": total["kept"] / total["guessed"] if total["guessed"] else None,
        "ms_a_cycle": ms,
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_of_each_round": speeds,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every arm on every prompt, plainly and with the draft."""
    options.target = model_path(options.target)
    options.draft = model_path(options.draft) if options.draft else None
    children = {build: Child(build, options) for build in dict.fromkeys(arm["build"] for arm in options.arm)}
    runs: list[dict[str, Any]] = []
    prompts = load_prompts("evaluation")
    texts = [p for p in prompts if len(p.text) >= options.prompt_tokens][: options.prompts]
    for prompt in texts:
        seen = next(iter(children.values())).ask(text=prompt.text)
        cycles = plan(options.tokens, right=options.right, go_on=options.go_on, most=options.most, seed=prompt.id)
        for number in range(-1, options.rounds):  # the first round warms up
            for arm in options.arm if number % 2 == 0 else options.arm[::-1]:
                parts_off = sum(PARTS[p] for p in arm["without"].split("+") if p)
                for kind, shape in (("plain", None), ("speculative", cycles)):
                    reply = children[arm["build"]].ask(**seen, cycles=shape, switch=arm["switch"], parts_off=parts_off)
                    if number >= 0:
                        runs.append({"arm": arm["name"], "kind": kind, "prompt": prompt.id, "round": number, **reply})
    for one in children.values():
        one.close()
    arms = []
    for arm in options.arm:
        row = {**arm, "fingerprint": find_build(arm["build"], options.backend).fingerprint}
        for kind in ("plain", "speculative"):
            row[kind] = summary([r for r in runs if (r["arm"], r["kind"]) == (arm["name"], kind)])
        row["speculative_over_plain"] = row["speculative"]["tokens_per_second"] / row["plain"]["tokens_per_second"]
        arms.append(row)
        print(
            f"{arm['name']}: {row['plain']['tokens_per_second']:.1f} tokens a second plain, "
            f"{row['speculative']['tokens_per_second']:.1f} speculative, "
            f"{row['speculative']['picks_as_plain']} of {row['speculative']['picks']} picks as in the plain decode",
            flush=True,
        )
    return {
        "target": Path(options.target).name,
        "draft": Path(options.draft).name if options.draft else None,
        "right": options.right,
        "go_on": options.go_on,
        "most": options.most,
        "prompts": [p.id for p in texts],
        "prompt_tokens": options.prompt_tokens,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "env": dict(options.env),
        "machine": provenance.machine(),
        "arms": arms,
        "runs": runs,
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--arm", type=parse_arm, action="append", help="NAME=BUILD[,SWITCH[,PARTS LEFT OUT]]")
    parser.add_argument("--target", required=True, help="a .gguf file or SHAPE:QUANT")
    parser.add_argument("--draft", help="the same; without it guesses cost nothing")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--right", type=float, default=0.870)
    parser.add_argument("--go-on", type=float, default=0.492)
    parser.add_argument("--most", type=int, default=8, choices=range(1, MOST + 1), metavar="N")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--gpu-layers", type=int, default=99)
    parser.add_argument(
        "--env", type=lambda t: tuple(t.split("=", 1)), action="append", default=[], help="VARIABLE=VALUE"
    )
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.child:
        child(options)
        return 0
    if not options.arm:
        parser.error("at least one --arm is needed")
    text = json.dumps(measure(options), indent=1) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
