"""Write docs/price.md from docs/price.md.j2 and the data it quotes; ``--check`` only says whether the two are in step.

    python docs/make_price.py [--check]

Every number of the page is looked up here: prices in the receipts of data/receipts, registers and the micro-benchmark's output in
data/compiled, what was measured by hand or predicted in data/compiled/price.toml, the post's in data/published/post.toml.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jinja2  # noqa: E402

from hiraishin.errors import UserError  # noqa: E402
from hiraishin.numerics.occupancy import Gpu, blocks_per_sm  # noqa: E402
from hiraishin.results import Result, load_receipt  # noqa: E402

COMPILED = ROOT / "data" / "compiled"
H200 = Gpu(sms=132, warps=64, blocks=32)
SHAPES = ((12288, 4096), (4096, 12288), (4096, 4096))  # rows, K
BLOCK_BYTES, BLOCK_WEIGHTS = 144, 256  # a Q4_K block
WITHOUT_FAST = "patched-without-cuda-fast"
PRICES = (  # heading, receipt, inputs
    ("synthetic 8B Q4_K_M, 256 tokens of context", "synthetic-8b", {"context": 256, "env": None, "settle": 4}),
    ("the same, CUDA graphs off", "synthetic-8b", {"context": 256, "env": "GGML_CUDA_DISABLE_GRAPHS=1", "settle": 4}),
    ("synthetic 8B Q4_K_M, 2,048 tokens", "synthetic-8b", {"context": 2048, "settle": 4}),
    ("synthetic 8B Q6_K, 256 tokens", "synthetic-8b-q6", {"context": 256, "settle": 4}),
    ("SmolLM2-135M Q4_K_M, 200 tokens", "smollm2", {"context": 200, "settle": 4}),
    *(
        (f"synthetic 8B {quant}, 256 tokens", "synthetic-8b-types", {"quant": quant, "context": 256, "settle": 4})
        for quant in ("Q8_0", "Q5_K", "Q4_0", "Q4_1", "Q5_0")
    ),
)


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; floats with two digits, ``None`` as an empty cell."""

    def line(cells: Iterable[Any]) -> str:
        shown = (
            "" if c is None else f"{c:.2f}" if isinstance(c, float) else f"{c:,}" if isinstance(c, int) else c
            for c in cells
        )
        return "| " + " | ".join(shown) + " |"

    head = list(head)
    return "\n".join([line(head), "| " + " | ".join("---" for _ in head) + " |", *(line(r) for r in rows)])


def widths_in_words(widths: list[int]) -> str:
    """``[2, 3, 4, 7]`` as ``"2 to 4, 7"``."""
    spans: list[list[int]] = []
    for width in widths:
        if spans and spans[-1][1] == width - 1:
            spans[-1][1] = width
        else:
            spans.append([width, width])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)


class Price:
    """One price unit of a receipt: ratios over stock's one-token pass, by build and width."""

    def __init__(self, heading: str, result: Result) -> None:
        self.heading, self.record = heading, result.record
        self.widths: list[int] = sorted(result.inputs["widths"])
        self.weight_bytes = int(result.inputs["weight_bytes"])
        self.rounds = int(result.inputs["rounds"])

    def ratio(self, build: str, width: int) -> float:
        return float(self.record["ratio"][build][str(width)])

    def ms(self, build: str, width: int) -> float:
        return float(self.record["median_ms"][build][str(width)])

    def spread(self, build: str, width: int) -> float:
        """Interquartile range over the median."""
        return float(self.record["spread"][build][str(width)])

    def dearer(self, width: int) -> float:
        """Exact over stock at the same width."""
        return self.ms("patched", width) / self.ms("stock", width)

    def not_dearer(self) -> str:
        """The widths from 2 on where exact takes no longer than stock."""
        widths = [w for w in self.widths if w > 1 and self.dearer(w) <= 1]
        return f"widths {widths_in_words(widths)}" if widths else "no width"

    def differing(self) -> int:
        """Passes of the exact build whose first row differed from the one-token pass's."""
        return int(sum(self.record["first_row_differs"]["patched"].values()))

    def rows(self) -> list[list[Any]]:
        names = {"stock": "stock", "patched": "exact", WITHOUT_FAST: "exact, generic kernels"}
        rows: list[list[Any]] = []
        for build, name in names.items():
            if build in self.record["ratio"]:
                worst = max(self.spread(build, w) for w in self.widths)
                ratios = (self.ratio(build, w) for w in self.widths)
                rows.append(["" if rows else self.heading, name, *ratios, f"{100 * worst:.0f} %"])
        return [*rows, ["", "exact over stock", *(self.dearer(w) for w in self.widths), ""]]


def prices() -> tuple[list[Price], Price]:
    """The settled prices in the order of ``PRICES``, and the one measured without settling."""
    loaded = {
        name: load_receipt(ROOT / "data" / "receipts" / f"h200-2026-11-30-{name}")
        for name in ("synthetic-8b", "synthetic-8b-q6", "synthetic-8b-types", "smollm2")
    }

    def one(heading: str, name: str, **inputs: Any) -> Price:
        (result,) = [r for r in loaded[name].of("price") if all(r.inputs.get(k) == v for k, v in inputs.items())]
        return Price(heading, result)

    settled = [one(heading, name, **inputs) for heading, name, inputs in PRICES]
    return settled, one("widths alternating", "synthetic-8b", context=256, env=None, settle=0)


class Bench:
    """A micro-benchmark's output: ``[rows, K][variant] -> (columns, us, differing, values)``.

    ``prefix`` is what the names of its own variants start with; the others are the references that it repeats.
    """

    LINE = re.compile(r"(.+?)\s+cols\s+(\d+)\s+([\d.]+) us\s+\d+ GB/s\s+differing (\d+) of (\d+)")

    def __init__(self, name: str, prefix: str) -> None:
        self.prefix = prefix
        self.results: dict[tuple[int, int], dict[str, tuple[int, float, int, int]]] = {}
        for line in (COMPILED / f"{name}-h200.txt").read_text(encoding="utf-8").splitlines():
            if start := re.match(r"K=(\d+) N=(\d+) ", line):
                here = self.results.setdefault((int(start[2]), int(start[1])), {})
            elif found := self.LINE.fullmatch(line):
                here[found[1]] = (int(found[2]), float(found[3]), int(found[4]), int(found[5]))

    def us(self, variant: str, shape: tuple[int, int] = SHAPES[0]) -> float:
        return self.results[shape][variant][1]

    def best(self, columns: int, shape: tuple[int, int] = SHAPES[0]) -> tuple[str, float]:
        """The fastest variant for so many columns that differed nowhere in any shape, and its time."""
        sound = {
            n: r[1]
            for n, r in self.results[shape].items()
            if n.startswith(f"{self.prefix} C={columns} ")
            and all(s[n][2] == 0 for s in self.results.values() if n in s)
        }
        name = min(sound, key=lambda n: sound[n])
        return name, sound[name]

    def wrong(self) -> dict[str, int]:
        """Variants with differing values, those of stock's other order and of the packing left out."""
        found: dict[str, int] = {}
        for here in self.results.values():
            for name, (_, _, differing, _) in here.items():
                if differing and name.startswith((self.prefix, "generic")):
                    found[name] = found.get(name, 0) + differing
        return found

    def variants(self) -> str:
        """Every variant: times in the shapes, differing values."""
        names = list(dict.fromkeys(n for here in self.results.values() for n in here if not n.startswith("pack")))
        rows = []
        for name in names:
            times = [self.results[s].get(name) for s in SHAPES]
            rows.append([name, *(t and t[1] for t in times), sum(t[2] for t in times if t)])
        return table(["variant", *(f"{n} x {k}, us" for n, k in SHAPES), "differing"], rows)


def passes() -> tuple[str, dict[str, dict[str, Any]]]:
    """Where a pass goes: microseconds of each kind of kernel, as a table and by ``build-context-width``."""
    profiled = json.loads((COMPILED / "pass-profile-h200.json").read_text(encoding="utf-8"))
    found = {f"{p['build']}-{p['context']}-{p['width']}": p for p in profiled["passes"]}
    kinds = sorted(
        {k for p in found.values() for k in p["kinds"]}, key=lambda k: -found["exact-256-9"]["kinds"][k]["us"]
    )
    rows = [
        [
            p["build"],
            p["context"],
            p["width"],
            p["kernels"],
            round(p["us"]),
            *(round(p["kinds"][k]["us"]) for k in kinds),
        ]
        for p in sorted(found.values(), key=lambda p: (p["context"], p["width"], p["build"]))
    ]
    return table(["build", "context", "width", "kernels", "us", *kinds], rows), found


def others(profiled: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each profiled pass that no mat-vec takes."""
    return {
        key: one["us"] - sum(v["us"] for kind, v in one["kinds"].items() if kind.startswith("mat-vec"))
        for key, one in profiled.items()
    }


def alternating(settled: Price, unsettled: Price) -> dict[str, float]:
    """What a one-token pass takes among passes of other widths, over what it takes settled."""
    return {build: unsettled.ms(build, 1) / settled.ms(build, 1) for build in ("stock", "patched")}


def unsupported(
    settled: list[Price], arms: dict[str, Any], profiled: dict[str, Any], plain: dict[str, dict[str, float]]
) -> list[str]:
    """What the page says in words alone and its data, having changed, no longer say."""
    rest, decoding = others(profiled), plain["with"]
    drafts = {name: arm["speculative"]["ms_a_cycle"]["draft"] for name, arm in arms.items()}
    held = {
        "a lone token has the same bits in every pass": not any(p.differing() for p in settled),
        "a lone token of Q8_0 took longer with the fast kernel": settled[5].dearer(1) > 1,
        "what is not a mat-vec costs as much as in stock": abs(rest["exact-256-9"] / rest["stock-256-9"] - 1) < 0.05,
        "exact speculation does not beat plain decoding": arms["exact"]["speculative_over_plain"] < 1,
        "stock's draft takes longer": drafts["stock"] > drafts["exact without the fast kernels"],
        "plain decoding does not show recorded graphs": abs(decoding["stock"] / decoding["patched-off"] - 1) < 0.05,
    }
    return [sentence for sentence, true in held.items() if not true]


def needed_us(price: Price, profiled: dict[str, Any], bench: Bench, target: float) -> float:
    """What the mat-vec of 9 columns would have to take for the target, if every mat-vec of the pass gained alike."""
    too_much = price.ms("patched", 9) - target * price.ms("stock", 1)
    products = sum(v["us"] for kind, v in profiled["kinds"].items() if kind.startswith("mat-vec")) / 1000
    return bench.best(9)[1] * (1 - too_much / products)


def best_of_each(fast: Bench, ring: Bench, mma: Bench, tensor: Bench) -> str:
    """Best variant of each kernel for each number of columns, over the one-column kernel of the same run."""
    one = "one column (stock geometry)"
    rows: list[list[Any]] = []
    for name in ("stock 8: 2 warps x2 rows", "generic exact 8"):
        cells = (x for s in SHAPES for x in (ring.us(name, s), ring.us(name, s) / ring.us(one, s)))
        rows.append([name, *cells])
    for label, bench in (
        ("first kernel", fast),
        ("in the patches", ring),
        ("tensor cores", mma),
        ("tensor cores again", tensor),
    ):
        for columns in sorted({r[0] for n, r in bench.results[SHAPES[0]].items() if n.startswith(bench.prefix)}):
            cells_: list[Any] = []
            for shape in SHAPES:
                try:
                    best = bench.best(columns, shape)[1]
                except ValueError:  # the columns do not fit into shared memory
                    cells_ += [None, None]
                else:
                    cells_ += [best, best / bench.us(one, shape)]
            rows.append([f"{label}, {columns} column{'s' if columns > 1 else ''}", *cells_])
    return table(["kernel", *(h for n, k in SHAPES for h in (f"{n} x {k}, us", "over one column"))], rows)


def slots_per_us(notes: dict[str, Any]) -> float:
    """Warp instructions the H200 can issue in a microsecond: the median of what the profiles imply."""
    implied = sorted(p["instructions_m"] * 1e6 / (p["issue_busy"] * p["us"]) for p in notes["h200"]["profile"])
    return float(implied[len(implied) // 2])


def floors(notes: dict[str, Any], bench: Bench) -> str:
    """Bytes and inner arithmetic of one 12288 x 4096 mat-vec beside what was measured."""
    rows, k = SHAPES[0]
    read = rows * k / BLOCK_WEIGHTS * BLOCK_BYTES / (notes["h200"]["copy_tb_per_s"] * 1e6)
    rate = slots_per_us(notes)
    lines: list[list[Any]] = []
    for columns in (1, 2, 4, 8, 9, 12):
        issue = rows * k / 512 * columns * notes["h200"]["slots_per_512"] / rate
        best = bench.best(columns)[1]
        generic = {1: bench.us("one column (stock geometry)"), 8: bench.us("generic exact 8")}.get(columns)
        lines.append([columns, read, issue, max(read, issue), generic, best, best / max(read, issue)])
    head = ["columns", "bytes, us", "inner arithmetic, us", "floor, us", "generic order, us", "in the patches, us"]
    return table([*head, "over the floor"], lines)


def compiled_kernels() -> str:
    """Registers and occupancy on sm_90 of the kernels in the patched llama.cpp."""
    kernels = json.loads((COMPILED / "registers.json").read_text(encoding="utf-8"))["kernels"]
    lines: list[list[Any]] = []
    for k in kernels:
        if k["arch"] != 90:
            continue
        if k["kernel"] == "mul_mat_vec_q":
            warps = 2 if k["geometry"] == "stock" and k["columns"] > 4 else 4
            name = f"mat-vec {k['type']}, {k['columns']} column{'s' if k['columns'] > 1 else ''}"
            name += ", exact" if k["geometry"] == "one-column" else ""
        elif k["head"] == 128:
            warps, name = 4, f"vector attention, head 128, {k['type']} cache, queries a block: {k['queries']}"
        else:
            continue
        fit = blocks_per_sm(k["registers"], H200, 32 * warps)
        lines.append([name, warps, k["registers"], k["shared_bytes"], k["stack_bytes"], fit, fit * warps])
    head = ["kernel", "warps a block", "registers", "shared bytes", "stack bytes", "blocks an SM", "warps an SM, of 64"]
    return table(head, lines)


def fast_kernels() -> str:
    """Registers of the fast kernels of patch 0113 as compiled."""
    kernels = json.loads((COMPILED / "mmvq-fast-registers.json").read_text(encoding="utf-8"))["kernels"]
    columns = sorted({k["columns"] for k in kernels})
    rows = []
    for arch, kind in dict.fromkeys((k["arch"], k["type"]) for k in kernels):
        registers = {k["columns"]: k["registers"] for k in kernels if (k["arch"], k["type"]) == (arch, kind)}
        spilled = sum(k["spilled_bytes"] for k in kernels if (k["arch"], k["type"]) == (arch, kind))
        rows.append([f"sm_{arch}", kind, *(registers[c] for c in columns), spilled])
    return table(["architecture", "weights", *columns, "spilled bytes, all"], rows)


def fast_profile() -> tuple[str, dict[str, dict[str, Any]]]:
    """The Nsight profile of the ring's variants, as a table and by name."""
    kernels = json.loads((COMPILED / "q4k_ring-profile-h200.json").read_text(encoding="utf-8"))["kernels"]
    head = ["kernel", "time", "warp instructions", "issue slots busy", "warps an SM, of 64", "memory, of peak"]
    rows = [
        [
            k["kernel"],
            f"{k['us']:.1f} us",
            f"{k['instructions'] / 1e6:.1f} M",
            f"{k['issue_busy_percent']:.0f} %",
            f"{k['warps_an_sm']:.0f}",
            f"{k['memory_percent']:.0f} %",
        ]
        for k in kernels
    ]
    return table(head, rows), {k["kernel"]: k for k in kernels}


def free_draft(arm: dict[str, Any]) -> float:
    """Speculative over plain if the same cycles had only their verifying passes to pay for: a bound."""
    cycle, speed = arm["speculative"]["ms_a_cycle"], arm["speculative"]["tokens_per_second"]
    tokens = speed * (cycle["draft"] + cycle["verify"]) / 1000
    return float(tokens / (cycle["verify"] / 1000) / arm["plain"]["tokens_per_second"])


def end_to_end() -> tuple[str, dict[str, Any]]:
    """Whole decodes at the post's acceptance: the table, and the numbers by arm."""
    run = json.loads((COMPILED / "end-to-end-h200.json").read_text(encoding="utf-8"))
    arms = {a["name"]: a for a in run["arms"]}
    rows = []
    for name, arm in arms.items():
        spec, plain = arm["speculative"], arm["plain"]
        cycle = spec["ms_a_cycle"]
        rows.append(
            [
                name,
                plain["tokens_per_second"],
                spec["tokens_per_second"],
                spec["tokens_per_second"] / plain["tokens_per_second"],
                free_draft(arm),
                spec["width"],
                f"{100 * spec['acceptance']:.1f} %",
                cycle["draft"],
                cycle["verify"],
                f"{spec['picks_as_plain']:,} of {spec['picks']:,}",
            ]
        )
    head = [
        "build",
        "plain, tokens/s",
        "speculative, tokens/s",
        "over its plain",
        "with a draft that costs nothing",
        "mean width",
        "acceptance",
    ]
    return table([*head, "draft, ms a cycle", "verify, ms a cycle", "picks as in the plain decode"], rows), arms


def plain_decodes() -> dict[str, dict[str, float]]:
    """Tokens a second of plain decoding, median over the prompts: ``[graphs or not][build]``; and prompts whose text differs."""
    found: dict[str, dict[str, list[float]]] = {}
    for result in load_receipt(ROOT / "data" / "receipts" / "h200-2026-11-30-synthetic-8b-plain").of("plain"):
        graphs = "without" if result.inputs["env"] else "with"
        found.setdefault(graphs, {}).setdefault(result.inputs["build"], []).append(result.record["tokens_per_second"])
    return {g: {b: statistics.median(v) for b, v in builds.items()} for g, builds in found.items()}


def cpu_span(cpu: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The least and the greatest of exact over stock, over all widths, with one thread and with two (wall time)."""
    found = {}
    for quant, by_width in cpu["ratios"].items():
        over = [v[2] for v in by_width.values()] + [v[0] for v in cpu["two_threads"][quant].values()]
        found[quant] = (min(over), max(over))
    return found


def cpu_tables(cpu: dict[str, Any]) -> dict[str, Any]:
    """The tables of the CPU half."""
    ratios = []
    for quant, by_width in cpu["ratios"].items():
        for pick, label in enumerate(("off", "on", "on over off")):
            ratios.append(["" if pick else quant, label, *(v[pick] for v in by_width.values())])
    two, loop, before = cpu["two_threads"], cpu["column_loop"], cpu["before"]["f16"]
    kernels = {k: v for k, v in cpu["kernels"].items() if isinstance(v, list) and k != "columns"}
    floor = cpu["slots"]["fma_floor_ps"]
    return {
        "ratios": table(["weights", "switch", *next(iter(cpu["ratios"].values()))], ratios),
        "two_threads": table(
            ["weights", "on over off", *next(iter(two.values()))],
            [
                ["" if pick else q, label, *(v[pick] for v in by_width.values())]
                for q, by_width in two.items()
                for pick, label in enumerate(("wall time", "CPU time"))
            ],
        ),
        "before_span": (min(before.values()), max(before.values())),
        "loop": table(["weights", *loop["Q4_K_M"]], [[q, *v.values()] for q, v in loop.items()]),
        "kernels": table(
            ["weights", *(f"{c} columns" for c in cpu["kernels"]["columns"]), "best over the FMA floor"],
            [[k, *v, min(v) / floor if k != "Q6_K" else None] for k, v in kernels.items()],
        ),
    }


def profile(notes: dict[str, Any]) -> str:
    """The Nsight profiles."""
    rows = [
        [
            p["kernel"],
            f"{p['us']} us",
            f"{p['instructions_m']} M",
            f"{100 * p['issue_busy']:.0f} %",
            p["warps"],
            f"{100 * p['memory']:.0f} %",
        ]
        for p in notes["h200"]["profile"]
    ]
    return table(
        ["kernel", "time", "warp instructions", "issue slots busy", "warps an SM, of 64", "memory, of peak"], rows
    )


def page() -> str:
    """The text of docs/price.md."""
    notes = tomllib.loads((COMPILED / "price.toml").read_text(encoding="utf-8"))
    post = tomllib.loads((ROOT / "data" / "published" / "post.toml").read_text(encoding="utf-8"))["numbers"]
    settled, unsettled = prices()
    bench, fast, mma = Bench("q4k_ring", "ring"), Bench("q4k_fast", "fast"), Bench("q4k_mma", "mma")
    tensor, bulk, before = (
        Bench("q4k_tensor", "tensor"),
        Bench("q4k_ring_bulk", "ring"),
        Bench("q4k_ring_first", "ring"),
    )
    pass_table, profiled = passes()
    ring_profile, ring_by_name = fast_profile()
    decodes, arms = end_to_end()
    plain = plain_decodes()
    if wrong := unsupported(settled, arms, profiled, plain):
        raise UserError(f"the data no longer say that {'; that '.join(wrong)}", "Change the words in docs/price.md.j2.")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "x": lambda v: f"{v:.2f}",
        "pc": lambda v: f"{100 * v:.0f} %",
        "us": lambda v: f"{v:.1f} us",
        "n": lambda v: f"{v:,.0f}",
    }
    template = environment.from_string((ROOT / "docs" / "price.md.j2").read_text(encoding="utf-8"))
    head = ["", "build", *settled[0].widths, "widest spread"]
    return template.render(
        n=notes,
        cpu=notes["cpu"],
        post={k: v["value"] for k, v in post.items()},
        prices=settled,
        main=settled[0],
        q6=settled[3],
        smol=settled[4],
        more=settled[5:],
        dearer_from=next(w for w in settled[0].widths if w > 1 and settled[0].dearer(w) > 1),
        long_dearer_from=next(w for w in settled[2].widths if w > 1 and settled[2].dearer(w) > 1),
        unsettled=unsettled,
        price_table=table(head, [row for p in settled for row in p.rows()]),
        bench=bench,
        fast=fast,
        mma=mma,
        tensor=tensor,
        bulk=bulk,
        before=before,
        needed_us=needed_us(settled[0], profiled["exact-256-9"], bench, post["price.target_9"]["value"]),
        pass_table=pass_table,
        others=others(profiled),
        alternating=alternating(settled[0], unsettled),
        passes=profiled,
        best=best_of_each(fast, bench, mma, tensor),
        ring_profile=ring_profile,
        ring=ring_by_name,
        fast_kernels=fast_kernels(),
        decodes=decodes,
        free_draft=free_draft(arms["exact"]),
        arms=arms,
        plain=plain,
        floors=floors(notes, bench),
        floor9=SHAPES[0][0] * SHAPES[0][1] / 512 * 9 * notes["h200"]["slots_per_512"] / slots_per_us(notes),
        floor_ms=settled[0].weight_bytes / (notes["h200"]["copy_tb_per_s"] * 1e9),
        rate=slots_per_us(notes),
        kernels=compiled_kernels(),
        cpu_tables=cpu_tables(notes["cpu"]),
        cpu_span=cpu_span(notes["cpu"]),
        profile=profile(notes),
    )


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare; 0 in step or written, 1 out of step, 2 a receipt missing or words untrue."""
    target = ROOT / "docs" / "price.md"
    try:
        text = page()
    except UserError as error:
        print(f"docs/price.md cannot be made: {error}", file=sys.stderr)
        return error.exit_code
    if "--check" in arguments:
        if target.is_file() and target.read_text(encoding="utf-8") == text:
            return 0
        print("docs/price.md is out of step with its data: run python docs/make_price.py", file=sys.stderr)
        return 1
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
