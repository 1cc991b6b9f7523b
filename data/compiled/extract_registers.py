"""Compile the kernels that the explanations need and read what each costs a thread and a block.

    python data/compiled/extract_registers.py SOURCE [--out registers.json] [--arch 86 89 90 120]

SOURCE is a llama.cpp tree, stock or patched (a patched one adds the batch-invariant kernels). Needs nvcc and the
cuBLAS headers (CPATH helps where they are elsewhere), no GPU. For every architecture it writes registers and static
shared memory of

* `mul_mat_vec_q` for Q4_K and Q6_K at 1 to 8 columns, as stock launches it, and (patched) with one column's geometry;
* `flash_attn_ext_vec`, head 64, 128 and 256, f16 and q8_0 cache, for one query and for two.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

COLUMNS = range(1, 9)
WEIGHTS = ("Q4_K", "Q6_K")
HEADS = (64, 128, 256)
CACHES = ("F16", "Q8_0")


def probe_sources(source: Path) -> dict[str, str]:
    """Two translation units that instantiate the kernels and nothing else, keyed by file stem."""
    mmvq = (source / "ggml/src/ggml-cuda/mmvq.cu").read_text()
    head, marker, _ = mmvq.partition("static void mul_mat_vec_q_switch_type(")
    if not marker:
        raise SystemExit("mmvq.cu looks different: no mul_mat_vec_q_switch_type")
    patched = "bool invariant = false>" in head
    kernels = []
    for weight in WEIGHTS:
        for columns in COLUMNS:
            kernels.append(f"mul_mat_vec_q<GGML_TYPE_{weight}, {columns}, false>")
            if patched and columns > 4:
                kernels.append(f"mul_mat_vec_q<GGML_TYPE_{weight}, {columns}, false, false, false, true>")
    table = ",\n    ".join(f"(const void *) {kernel}" for kernel in kernels)
    attention = ",\n    ".join(
        f"(const void *) flash_attn_ext_vec<{head_size}, {queries}, GGML_TYPE_{cache}, GGML_TYPE_{cache}, false>"
        for head_size in HEADS
        for cache in CACHES
        for queries in (1, 2)
    )
    return {
        "mmvq": f"{head}\nextern const void * probe_mmvq[];\nconst void * probe_mmvq[] = {{\n    {table}\n}};\n",
        "fattn": '#include "common.cuh"\n#include "fattn-vec.cuh"\n'
        f"extern const void * probe_fattn[];\nconst void * probe_fattn[] = {{\n    {attention}\n}};\n",
    }


def compile_and_read(source: Path, arch: int, stem: str, text: str, work: Path) -> str:
    """What the assembler reports about one translation unit compiled for one architecture."""
    unit, cubin = work / f"{stem}.cu", work / f"{stem}-{arch}.cubin"
    unit.write_text(text)
    cuda = source / "ggml/src/ggml-cuda"
    command = ["nvcc", "-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "-extended-lambda", "-cubin", "-Xptxas=-v"]
    command += [f"-arch=sm_{arch}", f"-I{cuda}", f"-I{cuda.parent}", f"-I{source / 'ggml/include'}"]
    command += ["-DGGML_CUDA_NO_VMM", "-o", str(cubin), str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"nvcc failed for sm_{arch}:\n{result.stderr[-2000:]}")
    return result.stderr


def demangle(name: str) -> str:
    """The C++ name behind a mangled one."""
    return subprocess.run(["c++filt", name], check=True, capture_output=True, text=True).stdout.strip()


def records(usage: str, arch: int) -> list[dict[str, Any]]:
    """One record per kernel: what it is, registers a thread, static shared memory and stack in bytes."""
    found = []
    for name, report in re.findall(r"Compiling entry function '(\S+)' for .*\n((?:(?!.*Compiling entry).*\n)*)", usage):
        kernel = demangle(name)
        costs = {
            "registers": r"Used (\d+) registers",
            "shared_bytes": r"(\d+) bytes smem",
            "stack_bytes": r"(\d+) bytes stack frame",
        }
        cost = {key: int(hit.group(1)) if (hit := re.search(pattern, report)) else 0 for key, pattern in costs.items()}
        record: dict[str, Any] = {"arch": arch}
        arguments = re.search(r"<(.*?)>\(", kernel)
        if arguments is None:
            continue
        values = [
            int(re.sub(r"\(.*?\)", "", part)) if re.search(r"\d", part) else int("true" in part)
            for part in arguments.group(1).split(", ")
        ]
        if "mul_mat_vec_q<" in kernel:
            invariant = bool(values[5]) if len(values) > 5 else False
            record |= {
                "kernel": "mul_mat_vec_q",
                "type": {12: "Q4_K", 14: "Q6_K"}[values[0]],
                "columns": values[1],
                "geometry": "one-column" if invariant else "stock",
            }
        elif "flash_attn_ext_vec<" in kernel:
            record |= {
                "kernel": "flash_attn_ext_vec",
                "head": values[0],
                "queries": values[1],
                "type": {1: "F16", 8: "Q8_0"}[values[2]],
            }
        else:
            continue
        found.append(record | cost)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=Path("registers.json"))
    parser.add_argument("--arch", type=int, nargs="+", default=[86, 89, 90, 120])
    options = parser.parse_args()
    kernels: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for stem, text in probe_sources(options.source.resolve()).items():
            for arch in options.arch:
                kernels += records(compile_and_read(options.source.resolve(), arch, stem, text, Path(work)), arch)
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"release [\d.]+, V([\d.]+)", version)
    kernels.sort(
        key=lambda k: (
            k["kernel"],
            k["arch"],
            k["type"],
            k.get("head", 0),
            k.get("columns", k.get("queries")),
            k.get("geometry", ""),
        )
    )
    document = {
        "what": "registers a thread and static shared memory a block, read from the compiled code (no GPU)",
        "compiler": f"nvcc {release.group(1) if release else version.strip()}",
        "flags": "-O3 -use_fast_math -std=c++17",
        "kernels": kernels,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
