"""The native builds: configure, compile, keep the libraries, describe them.

One working copy and one build folder per backend. Stock is built and its libraries kept; then the series is applied,
the same folder rebuilt, and those libraries kept. (A copied build folder would go on compiling the first source.)
``build.json`` is written last, so a folder that has one is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.native import cublas, environment, source, tools
from hiraishin.native.fetch import make_folder, sha256, sweep

SCHEMA = 1
BUILDS: dict[str, Callable[[], list[source.Patch]]] = {
    "stock": list,
    "patched": source.series,
    "witness": source.witness,
}
"""What can be built, and the patches of each. The witness build has a fault on purpose: only tests ask for it."""
TOOLS = ("llama-bench", "test-backend-ops", "llama-server")
ABI_PROGRAM = Path(__file__).with_name("abi.c")

# Macros that gcc and clang define when they may use an instruction set, and the kernel's name for it in /proc/cpuinfo.
CPU_FEATURES = {
    "__SSE3__": "pni", "__SSSE3__": "ssse3", "__SSE4_1__": "sse4_1", "__SSE4_2__": "sse4_2", "__AVX__": "avx",
    "__AVX2__": "avx2", "__FMA__": "fma", "__F16C__": "f16c", "__BMI2__": "bmi2", "__AVXVNNI__": "avx_vnni",
    "__AVX512F__": "avx512f", "__AVX512BW__": "avx512bw", "__AVX512DQ__": "avx512dq", "__AVX512VL__": "avx512vl",
    "__AVX512CD__": "avx512cd", "__AVX512VBMI__": "avx512vbmi", "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16", "__AMX_TILE__": "amx_tile", "__AMX_INT8__": "amx_int8", "__AMX_BF16__": "amx_bf16",
    "__ARM_NEON": "asimd", "__ARM_FEATURE_DOTPROD": "asimddp", "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm", "__ARM_FEATURE_SVE": "sve", "__ARM_FEATURE_BF16": "bf16",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What ``build.sh`` was asked for. ``names``, of ``BUILDS``, in order; ``arch`` only for CUDA, ``"90"`` or ``"86;90"``."""

    names: tuple[str, ...] = ("stock", "patched")
    backend: str = "cpu"
    source: Path | None = None
    arch: str | None = None
    jobs: int = 1
    tools: bool = False


@dataclass
class _Workplace:
    """The folders and tools of one backend's builds."""

    backend: str
    folder: Path
    cmake: tools.Tool
    ninja: tools.Tool
    cxx: tools.Tool
    cc: tools.Tool
    nvcc: tools.Tool | None
    arch: str | None

    @property
    def tree(self) -> Path:
        """The working copy."""
        return self.folder / "src"

    @property
    def build(self) -> Path:
        """The build folder."""
        return self.folder / "build"


def say(text: str) -> None:
    """One line of progress."""
    print(f"[build] {text}", flush=True)


def default_jobs() -> int:
    """As many compilers as there are usable cores, and no more than one per GiB of memory to be had."""
    cores = len(os.sched_getaffinity(0))
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return cores
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    return max(1, min(cores, int(available[1]) // 2**20)) if available else cores


def build(request: Request) -> None:
    """Makes the builds that ``request`` names, doing only what is out of date.

    Raises:
        UserError: a tool is missing or too old, a patch does not apply, a compiler fails, no permission, disk full.
    """
    make_folder(paths.home())
    with environment.only_one(paths.home() / "build.lock", "building"):
        sweep(make_folder(paths.sources_dir()))
        arch = _gpu_arch(request.arch) if request.backend == "cuda" else None
        origin = source.pinned() if request.source is None else source.foreign(request.source)
        patches = {name: BUILDS[name]() for name in request.names}
        if "patched" in patches and (request.tools or _has_tools(paths.builds_dir() / request.backend / "patched")):
            patches["patched"] += source.operator_cases()
        place = _Workplace(
            backend=request.backend,
            folder=paths.sources_dir() / f"work-{request.backend}",
            cmake=_need_or_install("cmake"),
            ninja=_need_or_install("ninja"),
            cxx=tools.need("c++"),
            cc=tools.need("cc"),
            nvcc=tools.need("nvcc") if request.backend == "cuda" else None,
            arch=arch,
        )
        for name in request.names:
            _one(request, place, name, origin, patches[name])


def _need_or_install(name: str) -> tools.Tool:
    """cmake and ninja come with the environment when the machine has none."""
    found = tools.find(name)
    if found is None or found.version < tools.NEEDED[name][0]:
        environment.ensure()
    return tools.need(name)


def flags(backend: str, arch: str | None) -> list[str]:
    """CMake's options for the library: llama.cpp's own defaults, as shared libraries that find each other."""
    chosen = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON"]
    if backend == "cuda":
        chosen += ["-DGGML_CUDA=ON", "-DGGML_CUDA_NO_VMM=ON", "-DGGML_CUDA_NCCL=OFF"]
        chosen += [f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(f'{one}-real' for one in (arch or '').split(';'))}"]
    return chosen


def _describe(place: _Workplace, name: str, origin: source.Source, patches: list[source.Patch]) -> dict[str, Any]:
    """What a build is made from; no dates, and no paths but that of a source of the user's own."""
    compiler: dict[str, str] = {"c++": place.cxx.banner, "cc": place.cc.banner}
    if place.nvcc:
        compiler["nvcc"] = place.nvcc.banner
    return {
        "schema": SCHEMA,
        "name": name,
        "backend": place.backend,
        "upstream_commit": origin.commit,
        "source": {"kind": origin.kind, "tree_sha256": origin.tree_sha256, "origin": origin.origin},
        "patches": [
            {"name": patch.name, "sha256": patch.sha256, "compiled": _is_compiled(patch, place.backend)}
            for patch in patches
        ],
        "compiler": compiler,
        "flags": flags(place.backend, place.arch),
        "cpu": _native_target(place.cxx.path),
        "gpu_arch": place.arch,
    }


def _is_compiled(patch: source.Patch, backend: str) -> bool:
    """Whether a patch changes anything that this backend's libraries are compiled from.

    So an edit to a CUDA kernel leaves the CPU builds, and every result measured on them, as they are.
    """
    others = ("tests", "tools", "common") if backend == "cuda" else ("tests", "tools", "common", "ggml/src/ggml-cuda")
    return any(not any(path.is_relative_to(folder) for folder in others) for path in patch.touches)


def recipe(described: dict[str, Any]) -> dict[str, Any]:
    """What of a description decides the bits that a build computes: not its name, nor where its source came from."""
    deciding = {key: described.get(key) for key in ("schema", "backend", "compiler", "flags", "cpu", "gpu_arch")}
    deciding["source"] = described["source"]["tree_sha256"]
    deciding["patches"] = [patch["sha256"] for patch in described["patches"] if patch.get("compiled", True)]
    return deciding


def _native_target(cxx: str) -> dict[str, Any]:
    """What ``-march=native`` means on this machine: instruction sets, and gcc's names for the processor."""
    native = "-mcpu=native" if os.uname().machine in ("aarch64", "arm64") else "-march=native"
    run = [cxx, native, "-x", "c++", "-dM", "-E", os.devnull]
    macros = subprocess.run(run, capture_output=True, text=True, errors="replace", check=False).stdout
    defined = set(re.findall(r"^#define (\w+)", macros, re.MULTILINE))
    asked = [cxx, native, "-Q", "--help=target"]
    target = subprocess.run(asked, capture_output=True, text=True, errors="replace", check=False).stdout
    names = dict(re.findall(r"^\s+-(march|mtune|mcpu)=\s+(\S+)$", target, re.MULTILINE))
    return {"features": sorted(kernel for macro, kernel in CPU_FEATURES.items() if macro in defined), **names}


def read_description(folder: Path) -> dict[str, Any] | None:
    """``build.json`` of a finished build whose libraries are all there, else ``None``."""
    try:
        described = json.loads((folder / "build.json").read_text(encoding="utf-8"))
        whole = all((folder / name).is_file() for name in [*described["libraries"], *described["tools"], "abi.json"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return described if whole else None


def _has_tools(folder: Path) -> bool:
    return bool((read_description(folder) or {}).get("tools"))


def _one(request: Request, place: _Workplace, name: str, origin: source.Source, patches: list[source.Patch]) -> None:
    target = paths.builds_dir() / place.backend / name
    _finish_replacement(target)
    wanted = _describe(place, name, origin, patches)
    present = read_description(target)
    tools_are_right = not request.tools or (present and present["tools"] and present["patches"] == wanted["patches"])
    if present and recipe(present) == recipe(wanted) and tools_are_right:
        if present | wanted != present:  # the same source, named in another way
            _write_description(target, present | wanted)
        say(f"{place.backend} {name}: up to date in {target}")
        return
    started = time.monotonic()
    log = make_folder(paths.logs_dir()) / f"build-{place.backend}-{name}.log"
    log.unlink(missing_ok=True)
    changed = source.converge(place.tree, origin, patches)
    patched = f", {len(patches)} patches" if patches else ""
    say(f"{place.backend} {name}: {len(changed)} files changed in the working copy{patched}")
    _configure(request, place, origin, log)
    _compile(request, place, name, log)
    _keep(request, place, wanted, target, log)
    say(f"{place.backend} {name}: done in {time.monotonic() - started:.0f} s, {target}")


def _configure(request: Request, place: _Workplace, origin: source.Source, log: Path) -> None:
    """Runs CMake if anything it was told has changed; starts from nothing if a compiler or a folder has."""
    onoff = "ON" if request.tools else "OFF"
    blas: list[str] = []
    if place.nvcc:
        check_host_compiler(place.nvcc)
        blas = cublas.options(place.nvcc, place.folder / "cublas")
    told = [
        "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={place.ninja.path}",
        f"-DCMAKE_C_COMPILER={place.cc.path}", f"-DCMAKE_CXX_COMPILER={place.cxx.path}",
        *([f"-DCMAKE_CUDA_COMPILER={place.nvcc.path}"] if place.nvcc else []),
        *flags(place.backend, place.arch), *blas,
        # The libraries work from whatever folder they are kept in, and stay in need of nothing else there.
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON",
        # Said, not asked of git: the working copy may lie inside another project's repository.
        f"-DLLAMA_BUILD_COMMIT={origin.commit or 'unknown'}", "-DLLAMA_BUILD_NUMBER=0",
        *(f"-DLLAMA_BUILD_{part}={onoff}" for part in ("COMMON", "TESTS", "TOOLS", "SERVER")),
        *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("EXAMPLES", "APP", "UI")),
        "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
    ]  # fmt: skip
    identity = {
        "folders": [str(place.tree), str(place.build)],
        "programs": [tool.path + " " + tool.banner for tool in (place.cmake, place.cc, place.cxx, place.nvcc) if tool],
        "cpu": _native_target(place.cxx.path),
        **({"cublas": blas} if blas else {}),
    }
    marker = place.folder / "configured.json"
    try:
        before = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    if before.get("identity") != identity:
        shutil.rmtree(place.build, ignore_errors=True)
    elif before.get("told") == told:
        return
    marker.unlink(missing_ok=True)
    say(f"{place.backend}: configuring{' (cuBLAS of a Python package)' if blas else ''}")
    place.build.mkdir(parents=True, exist_ok=True)
    command = [place.cmake.path, "-S", str(place.tree), "-B", str(place.build), *told]
    if _logged(command, place, log):
        raise _failure("cmake cannot configure llama.cpp", log)
    marker.write_text(json.dumps({"identity": identity, "told": told}), encoding="utf-8")


def _compile(request: Request, place: _Workplace, name: str, log: Path) -> None:
    wanted = ["llama", *(TOOLS if request.tools else ())]
    said = time.monotonic()

    def progress(line: str) -> None:
        nonlocal said
        if (step := re.match(r"\[(\d+)/(\d+)\]", line)) and time.monotonic() - said > 15:
            said = time.monotonic()
            say(f"{place.backend} {name}: step {step[1]} of {step[2]}")

    command = [place.ninja.path, "-C", str(place.build), f"-j{request.jobs}", *wanted]
    if _logged(command, place, log, progress):
        raise _failure(f"the {place.backend} {name} build failed", log)


def _logged(command: list[str], place: _Workplace, log: Path, each: Callable[[str], None] | None = None) -> int:
    """Runs a command with its output in the log; ``each`` sees every line. Returns the exit status."""
    variables = os.environ | {
        "PATH": tools.search_path(),
        "GIT_CEILING_DIRECTORIES": str(place.folder),
        "LC_ALL": "C.UTF-8",
    }
    for name in ("NINJA_STATUS", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "MAKEFLAGS"):
        variables.pop(name, None)  # a build that its description does not describe would be worse than none
    with log.open("a", encoding="utf-8", errors="replace", buffering=1) as file:
        print("$", *command, file=file, flush=True)
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=variables,
            close_fds=False,  # compilers that outlive a kill keep holding the lock
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                if each:
                    each(line)
        return process.returncode


def _failure(what: str, log: Path) -> UserError:
    """The error with the compiler's own first complaint, the end of the log, and where the log is."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if any("No space left on device" in line for line in lines):
        return UserError(f"{what}: the disk is full", f"Free some space and start again; nothing is lost. Log: {log}")
    if any("unsupported GNU version" in line or "unsupported clang version" in line for line in lines):
        return _host_compiler_error(next(line for line in lines if "unsupported" in line))
    first = next((line.strip() for line in lines if re.search(r"\b(fatal )?error\b[: ]|Error at", line)), "")
    tail = "\n".join(f"  | {line}" for line in lines[-12:])
    return UserError(f"{what}{': ' + first if first else ''}", f"Log: {log}\n{tail}")


def _keep(request: Request, place: _Workplace, wanted: dict[str, Any], target: Path, log: Path) -> None:
    """Copies the libraries out of the build folder, with their descriptions, and puts them in place at once."""
    built = place.build / "bin"
    kept = [path for path in sorted(built.iterdir()) if re.match(r"lib(llama|ggml)[-\w]*\.so", path.name)]
    if not request.tools:
        kept = [path for path in kept if re.match(r"lib(llama|ggml(-\w+)?)\.so", path.name)]
    else:
        kept = [path for path in sorted(built.iterdir()) if ".so" in path.name or path.name in TOOLS]
    new = make_folder(target.parent) / f".{target.name}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for path in kept:
        shutil.copy2(path, new / path.name, follow_symlinks=False)
    (new / "abi.json").write_text(_abi(place, log), encoding="utf-8")
    libraries = {path.name: sha256(path) for path in sorted(new.glob("lib*.so"))}
    described = {**wanted, "libraries": libraries, "tools": [tool for tool in TOOLS if (new / tool).exists()]}
    _write_description(new, described)
    for path in new.iterdir():
        if not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _replace(new, target)


def _write_description(folder: Path, described: dict[str, Any]) -> None:
    temporary = folder / ".build.json.new"
    temporary.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8", errors="surrogateescape")
    temporary.replace(folder / "build.json")


def _replace(new: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _finish_replacement(target: Path) -> None:
    """After a kill between the two renames: the new build is whole, only its name is missing."""
    new = target.with_name(f".{target.name}.new")
    if not target.exists() and read_description(new):
        _replace(new, target)


def _abi(place: _Workplace, log: Path) -> str:
    """What ``abi.c`` prints when compiled with the working copy's headers."""
    with tempfile.TemporaryDirectory(prefix=".abi-", dir=place.folder) as scratch:
        program = Path(scratch) / "abi"
        command = [place.cc.path, "-std=c11", f"-I{place.tree}/include", f"-I{place.tree}/ggml/include"]
        if _logged([*command, str(ABI_PROGRAM), "-o", str(program)], place, log):
            raise _failure("this llama.cpp's structs are not those that llama-cpp-python 0.3.36 declares", log)
        printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    return json.dumps(json.loads(printed), indent=1) + "\n"


def _gpu_arch(given: str | None) -> str:
    """The architecture to compile for: the given one, else that of this machine's GPUs."""
    if given is not None:
        if not re.fullmatch(r"\d{2,3}[af]?(;\d{2,3}[af]?)*", given.replace(",", ";")):
            raise UserError(f"--arch {given} is no GPU architecture", "Give its number, for instance 86 or 90.")
        return given.replace(",", ";")
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found = sorted(
            {line.strip().replace(".", "") for line in done.stdout.splitlines() if re.match(r"\d+\.\d+", line)}
        )
    except (OSError, subprocess.TimeoutExpired):
        found = []
    if not found:
        raise UserError(
            "no GPU to detect the architecture from",
            "Give it: --arch 86 (RTX 30), 89 (RTX 40), 90 (H100, H200), 120 (RTX 50).",
        )
    return ";".join(found)


def check_host_compiler(place_nvcc: tools.Tool) -> None:
    """Compiles an empty CUDA file, which is how nvcc says that it refuses the host compiler.

    Raises:
        UserError: nvcc refuses the host compiler, or cannot compile at all.
    """
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch) / "empty.cu"
        empty.write_text("int main() { return 0; }\n", encoding="utf-8")
        command = [place_nvcc.path, "-c", str(empty), "-o", str(Path(scratch) / "empty.o")]
        if host := os.environ.get("CUDAHOSTCXX", "").strip():
            command[1:1] = ["-ccbin", host]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise _host_compiler_error(
            next((line for line in lines if "error" in line), lines[0] if lines else "no output")
        )


def _host_compiler_error(said: str) -> UserError:
    return UserError(
        f"nvcc refuses the host compiler: {said.strip()}",
        "Install an older g++ and name it, for instance CUDAHOSTCXX=g++-12 ./build.sh --backend cuda.",
    )
