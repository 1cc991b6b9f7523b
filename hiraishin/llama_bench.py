"""llama.cpp's own ``llama-bench`` beside our timing of the same passes, in turns.

The tool is there when ``build.sh --tools`` made it. It asks for the logits of the last row only, a verify pass needs all of
them, so that ours is expected to be dearer by the output layer's other rows; at one token both ask for the same.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiraishin import paths, provenance
from hiraishin.builds import Build, find_build
from hiraishin.errors import UserError
from hiraishin.intervals import median_interval
from hiraishin.models import resolve
from hiraishin.results import Result, Store, Unit
from hiraishin.worker import Worker

if TYPE_CHECKING:
    import pandas as pd

    from hiraishin.profile import Profile

TOOL = "llama-bench"
WIDTHS = (1, 2, 4, 8, 16)
ROUNDS = 5


def find_tool(build: Build) -> Path | None:
    """The build's ``llama-bench``, or ``None`` where it was built without tools."""
    program = build.lib_dir / TOOL
    return program if program.is_file() and os.access(program, os.X_OK) else None


def command(program: Path, model: Path, settings: dict[str, Any], context: int, widths: Sequence[int]) -> list[str]:
    """One call of the tool: each width once after its own warm-up, over ``context`` cells, as our timing has it."""
    return [
        *(str(program), "-m", str(model), "-n", "0", "-p", ",".join(map(str, widths)), "-d", str(context), "-r", "1"),
        *("-t", str(settings["threads"]), "-b", str(settings["n_batch"]), "-ub", str(settings["n_batch"])),
        *("-ctk", settings["kv_type"], "-ctv", settings["kv_type"], "-fa", str(int(settings["flash_attn"]))),
        *("-ngl", str(settings["gpu_layers"]), "-o", "json"),
    ]


def milliseconds(printed: str, widths: Sequence[int]) -> list[float]:
    """The tool's JSON as milliseconds a pass, in the order of ``widths``.

    Raises:
        UserError: it is no JSON of these widths.
    """
    try:
        found = {int(row["n_prompt"]): statistics.median(row["samples_ns"]) / 1e6 for row in json.loads(printed)}
        return [found[width] for width in widths]
    except (ValueError, KeyError, TypeError, statistics.StatisticsError) as error:
        raise UserError(
            f"llama-bench printed something else than times of {len(widths)} widths ({type(error).__name__}: {error})",
            "Build it again with ./build.sh stock --tools.",
        ) from error


def _run(arguments: list[str], folder: Path) -> str:
    # The libraries beside the tool, whatever the caller's environment says; nothing that switches kernels.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "LLAMA_"))}
    environment["LD_LIBRARY_PATH"] = str(folder)
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(f"llama-bench ended with status {done.returncode}: {last}", "Run it by hand to see more.")
    return done.stdout


def compare(
    profile: Profile,
    *,
    widths: Sequence[int] = WIDTHS,
    rounds: int = ROUNDS,
    store: Store | None = None,
    echo: Callable[[str], None] = lambda _: None,
) -> Result | None:
    """Time the profile's model on the stock build with ``llama-bench`` and with our timing, taking turns; stored once.

    Returns:
        One result of kind ``llama-bench`` with a table of ``timer``, ``width``, ``round`` and ``ms``; ``None`` when the tool
        was not built.

    Raises:
        UserError: no stock build, or the tool fails or prints something else.
    """
    build = find_build("stock", profile.backend)
    program = find_tool(build)
    if program is None:
        return None
    model = resolve(profile.model, profile.model.quant, echo=echo)
    settings = profile.settings.model_dump()
    context = profile.price[0].contexts[0] if profile.price else 200
    machine = provenance.machine()
    unit = Unit(
        "llama-bench",
        {
            "build": build.name, "fingerprint": build.fingerprint, **model.inputs(), **settings, "context": context,
            "widths": list(widths), "rounds": rounds, "code": provenance.code_version("timing"),
            "cpu": machine["cpu"], "cores": machine["cores"], "gpu": (machine["gpu"] or {}).get("name"),
        },
    )  # fmt: skip
    store = store or Store(paths.results_dir())
    found = store.get(unit)
    if found is not None:
        return found
    table: dict[str, list[Any]] = {"timer": [], "width": [], "round": [], "ms": []}
    with Worker(build) as worker:
        worker.result(
            "hiraishin.timing:prepare",
            model_path=str(model.path), settings=settings, context=context, max_width=max(widths),
        )  # fmt: skip
        for number in range(-1, rounds):
            echo(f"llama-bench beside our timing: round {number + 1} of {rounds}")
            ours = worker.result(
                "hiraishin.timing:time_round", widths=list(widths), switch=0, parts_off=0, hashes=False, settle=1
            )["ms"]
            theirs = milliseconds(_run(command(program, model.path, settings, context, widths), build.lib_dir), widths)
            for timer, times in (("ours", ours), (TOOL, theirs)):
                for width, ms in zip(widths, times, strict=True):
                    if number >= 0:  # the first round is warm-up
                        for column, value in zip(table, (timer, width, number, ms), strict=True):
                            table[column].append(value)
    return store.put(unit, {"rounds": rounds}, table, provenance.describe())


def bench_table(profile: Profile, **options: Any) -> pd.DataFrame:
    """Medians of both timers by width, and ours over theirs round by round; empty, with the command, without the tool."""
    import pandas as pd

    result = compare(profile, **options)
    if result is None:
        print(
            "llama-bench was not built: ./build.sh stock --tools makes it, and this cell then sets it beside our timing."
        )
        return pd.DataFrame()
    assert result.table is not None
    rows = []
    for width in sorted(set(result.table["width"])):
        times = result.table[result.table["width"] == width]
        by_timer = times.pivot_table(index="round", columns="timer", values="ms")
        ratios = list(by_timer["ours"] / by_timer[TOOL])
        low, high = median_interval(ratios) or (min(ratios), max(ratios))
        rows.append(
            {
                "width": width,
                "llama-bench, ms": by_timer[TOOL].median(),
                "all rows asked for, ms": by_timer["ours"].median(),
                "ratio": statistics.median(ratios),
                "from": low,
                "to": high,
            }
        )
    return pd.DataFrame(rows).set_index("width")
