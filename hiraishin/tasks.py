"""What can be measured: arms (a build and its switch), the context they share, and one class per kind of task.

A *task* is one call into a child process that yields several units (one prompt at all widths, one prompt with all
draft lengths, ...). Tasks of one build run in one child; where speeds are compared, builds take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from hiraishin import paths
from hiraishin.builds import Build, find_build
from hiraishin.errors import UserError
from hiraishin.gguf_header import read_header
from hiraishin.models import ModelFile, check_memory, resolve
from hiraishin.profile import LocalizeMatrix, PriceMatrix, Profile, ReplayMatrix, RunMatrix
from hiraishin.prompts import Prompt
from hiraishin.results import Unit
from hiraishin.worker import Worker, same_ggml

TEMPLATE_SECONDS = 120
"""How long the chat template of a model may take for all prompts together; one that loops would never end."""

Measured = tuple[Unit, dict[str, Any], dict[str, list[Any]] | None]


@dataclass(frozen=True)
class Arm:
    """A build with a state of its switch. ``label`` is the ``build`` of its results."""

    label: str
    build: str
    switch: int
    parts_off: int = 0


ARMS = {
    "stock": Arm("stock", "stock", 0),
    "patched": Arm("patched", "patched", 16),
    "off": Arm("patched-off", "patched", 0),
    "serial": Arm("patched-serial", "patched", -1),
}

PARTS = {
    "guard": 1 << 0,
    "cpu-mul-mat": 1 << 1,
    "cpu-attention": 1 << 2,
    "cuda-attention-8": 1 << 3,
    "cuda-mul-mat": 1 << 4,
    "cuda-attention-16": 1 << 5,
    "cuda-parallel-blocks": 1 << 6,
    "cuda-graphs": 1 << 7,
    "cpu-fast": 1 << 8,
    "cuda-fast": 1 << 9,
}
"""Causes that a patched build can leave untreated, one bit each (``ggml-batch-invariant.h``)."""


def arm_without(parts: str) -> Arm:
    """The patched arm with some causes left out, e.g. ``"cpu-fast"`` or ``"guard+cpu-attention"``.

    Raises:
        UserError: a part is unknown.
    """
    mask = 0
    for part in parts.split("+"):
        if part not in PARTS:
            raise UserError(f"the switch has no part {part!r}", f"Known parts: {', '.join(PARTS)}.")
        mask |= PARTS[part]
    return Arm(f"patched-without-{parts}", "patched", 16, mask)


UNFUSED = {"GGML_CUDA_DISABLE_FUSION": "1"}
"""The environment of a child that watches operations on a GPU: fused ones write no output of their own to watch, and a pass
that is watched is not fused, so that its rows would not be those of the pass that is not."""


def spell_env(env: Mapping[str, str] | None) -> str | None:
    """An environment as one string for keys and captions: ``"A=1 B=2"``; ``None`` when there is none."""
    return " ".join(f"{k}={v}" for k, v in sorted(env.items())) if env else None


class Task:
    """Some units that one call measures. ``weight`` is the expected cost in seconds, for the estimate alone."""

    weight = 1.0
    name = ""

    def units(self) -> list[Unit]:
        """Every unit that the task can yield."""
        raise NotImplementedError

    def execute(self, context: Context, missing: list[Unit]) -> Iterator[Measured]:
        """Measure the missing ones."""
        raise NotImplementedError


@dataclass
class Context:
    """What tasks share while a profile runs: builds, child processes, models, tokenized prompts."""

    profile: Profile
    echo: Callable[[str], None]
    stack: ExitStack
    _workers: dict[tuple[str, str], Worker] = field(default_factory=dict)
    _tokens: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _models: dict[str, ModelFile] = field(default_factory=dict)

    def build(self, name: str) -> Build:
        """The native build of that name, for the profile's backend."""
        return find_build(name, self.profile.backend)

    def model(self, quant: str | None = None) -> ModelFile:
        """The profile's model, in its own or another quant."""
        key = quant or self.profile.model.quant
        if key not in self._models:
            self._models[key] = resolve(self.profile.model, key, echo=self.echo)
        return self._models[key]

    def draft(self, quant: str) -> ModelFile:
        """The draft model of a drafter: the profile's ``[draft]``, else the target in another quant."""
        draft = self.profile.draft
        return self.model(quant) if draft is None else resolve(draft, quant, echo=self.echo)

    def worker(self, name: str, env: Mapping[str, str] | None = None) -> Worker:
        """The one child process of a build (and of an environment, where one is given); a new one after a crash."""
        key = (name, spell_env(env) or "")
        if key not in self._workers:
            worker = self.stack.enter_context(Worker(self.build(name), env))
            for (other_name, _), other in self._workers.items():
                if name != other_name and worker.libraries and same_ggml(worker.libraries, other.libraries):
                    raise UserError(
                        f"the builds {name} and {other.build.name} loaded the very same libraries",
                        "A comparison would compare a build with itself; run ./build.sh all again.",
                    )
            self._workers[key] = worker
        return self._workers[key]

    def libraries(self) -> dict[str, dict[str, str]]:
        """What each child really loaded, by build."""
        return {name: worker.libraries for (name, _), worker in self._workers.items()}

    def drop_workers(self, name: str) -> None:
        """Forget a build's children, one of which died."""
        for key in [k for k in self._workers if k[0] == name]:
            self._workers.pop(key).close()

    def tokenize(self, model: ModelFile, prompts: list[Prompt]) -> list[list[int]]:
        """Chat-templated token ids of the prompts, one call for all that are not known yet."""
        todo = [p for p in prompts if (model.sha256, p.sha256) not in self._tokens]
        if todo:
            names = {name for name, _ in self._workers}
            first = "patched" if "patched" in names and "stock" not in names else "stock"
            if not model.synthetic and not read_header(model.path).has_chat_template:
                self.echo(f"note: {model.path.name} has no chat template, so prompts go in as they are")
            try:
                reply = self.worker(first).result_within(
                    TEMPLATE_SECONDS,
                    "hiraishin.llama:tokenize_prompts",
                    model_path=str(model.path),
                    texts=[p.text for p in todo],
                )
            except TimeoutError:
                raise UserError(
                    f"the chat template of {model.path.name} does not come to an end in {TEMPLATE_SECONDS} s",
                    "Use a model with a plain template.",
                ) from None
            for prompt, tokens in zip(todo, reply["tokens"], strict=True):
                self._tokens[(model.sha256, prompt.sha256)] = tokens
        return [self._tokens[(model.sha256, p.sha256)] for p in prompts]

    def prompt_tokens(self, model: ModelFile, prompt: Prompt, limit: int | None) -> list[int]:
        """The prompt's tokens, or its first ``limit``.

        Raises:
            UserError: it has fewer.
        """
        tokens = self.tokenize(model, [prompt])[0]
        if limit is not None and len(tokens) < limit:
            raise UserError(f"the prompt {prompt.id} has {len(tokens)} tokens, {limit} were asked for")
        return tokens[:limit]

    def check_fits(
        self, model: ModelFile, prompts: list[Prompt], extra: int, limit: int | None, *, stops_at_end: bool = False
    ) -> None:
        """Refuse prompts that do not fit in the trained context, all named at once, and what does not fit in memory.

        Args:
            model: the model.
            prompts: the prompts.
            extra: tokens to generate.
            limit: tokens to take of each prompt; ``None`` takes all.
            stops_at_end: generating stops where the context ends, so only the prompt and one token must fit.
        """
        tokens = self.tokenize(model, prompts)
        # From the file: a model of which only the vocabulary is loaded says 0.
        n_ctx = read_header(model.path).n_ctx_train
        room = n_ctx - (1 if stops_at_end else extra)
        long = [
            f"{p.id} ({len(t)} tokens)"
            for p, t in zip(prompts, tokens, strict=True)
            if n_ctx and min(len(t), limit or len(t)) > room
        ]
        if long:
            raise UserError(
                f"{len(long)} prompt(s) with {extra} tokens to generate do not fit in the model's context of {n_ctx}: "
                + ", ".join(long),
                "Shorten them or ask for fewer tokens.",
            )
        settings = self.profile.settings
        check_memory(
            model.path,
            max(min(len(t), limit or len(t)) for t in tokens) + extra,
            settings.kv_type,
            rows=extra,
            n_batch=settings.n_batch,
            gpu=settings.gpu_layers > 0,
        )


@dataclass
class ReplayTask(Task):
    """One prompt on one arm with one model and one way of making the context, at all widths."""

    arm: Arm
    model: ModelFile
    prompt: Prompt
    settings: dict[str, Any]
    matrix: ReplayMatrix
    base: dict[str, Any]

    def __post_init__(self) -> None:
        self.weight = 0.02 * self.matrix.tokens * (1 + len(self.matrix.widths))
        self.name = f"replay {self.prompt.id} {self.model.quant} {self.arm.label}"

    def units(self) -> list[Unit]:
        return [Unit("trace", self.base), *(Unit("replay", {**self.base, "width": w}) for w in self.matrix.widths)]

    def execute(self, context: Context, missing: list[Unit]) -> Iterator[Measured]:
        tokens = context.prompt_tokens(self.model, self.prompt, self.matrix.prompt_tokens)
        events = context.worker(self.arm.build, self.matrix.env).call(
            "hiraishin.replay:measure",
            model_path=str(self.model.path),
            settings=self.settings,
            switch=self.arm.switch,
            parts_off=self.arm.parts_off,
            prompt=tokens,
            tokens=self.matrix.tokens,
            widths=[int(u.inputs["width"]) for u in missing if u.kind == "replay"],
            scratch=str(paths.scratch_dir()),
        )
        for event in events:
            if event.get("kind") == "trace":
                yield Unit("trace", self.base), event["record"], event["table"]
            elif event.get("kind") == "replay":
                yield Unit("replay", {**self.base, "width": event["width"]}), event["record"], event["table"]


@dataclass
class PriceTask(Task):
    """Pass times of every width on every arm, interleaved."""

    arms: list[Arm]
    model: ModelFile
    context_tokens: int
    settings: dict[str, Any]
    matrix: PriceMatrix
    base: dict[str, Any]

    def __post_init__(self) -> None:
        self.weight = 0.02 * len(self.matrix.widths) * (self.matrix.rounds + self.matrix.warmup) * len(self.arms) + 2
        self.name = f"price {self.model.quant} at {self.context_tokens} tokens"

    def units(self) -> list[Unit]:
        return [Unit("price", self.base)]

    def execute(self, context: Context, missing: list[Unit]) -> Iterator[Measured]:
        from hiraishin.timing import summarize

        builds = list(dict.fromkeys(arm.build for arm in self.arms))
        for build in builds:
            context.worker(build, self.matrix.env).result(
                "hiraishin.timing:prepare",
                model_path=str(self.model.path),
                settings=self.settings,
                context=self.context_tokens,
                max_width=max(self.matrix.widths),
            )
        table: dict[str, list[Any]] = {"build": [], "width": [], "round": [], "ms": []}
        warm: dict[str, list[Any]] = {}
        rows: dict[str, dict[str, list[str]]] = {}
        for number in range(-self.matrix.warmup, self.matrix.rounds):
            # Every other round runs backwards, so that a drift cannot favour one end.
            widths = self.matrix.widths if number % 2 == 0 else self.matrix.widths[::-1]
            for arm in self.arms if number % 2 == 0 else self.arms[::-1]:
                reply = context.worker(arm.build, self.matrix.env).result(
                    "hiraishin.timing:time_round",
                    widths=widths,
                    switch=arm.switch,
                    parts_off=arm.parts_off,
                    hashes=number == 0,
                    settle=self.matrix.settle,
                )
                if number < 0:
                    warm.setdefault(arm.label, []).append(reply["ms"])
                    continue
                if number == 0:
                    rows[arm.label] = reply["rows"]
                for width, ms in zip(widths, reply["ms"], strict=True):
                    for column, value in zip(table, (arm.label, width, number, ms), strict=True):
                        table[column].append(value)
        for build in builds:
            context.worker(build, self.matrix.env).result("hiraishin.timing:finish")
        yield Unit("price", self.base), {**summarize(table, rows), "warmup_ms": warm}, table


@dataclass
class BandwidthTask(Task):
    """How fast this machine reads memory."""

    threads: int
    base: dict[str, Any]
    weight = 2.0
    name = "memory bandwidth"

    def units(self) -> list[Unit]:
        return [Unit("bandwidth", self.base)]

    def execute(self, context: Context, missing: list[Unit]) -> Iterator[Measured]:
        reply = context.worker("stock").result("hiraishin.timing:bandwidth", threads=self.threads)
        yield Unit("bandwidth", self.base), reply, None


@dataclass
class RunTask(Task):
    """One prompt on one arm: the plain decode and every speculative run of a matrix."""

    arm: Arm
    model: ModelFile
    drafts: dict[str, ModelFile]
    prompt: Prompt
    settings: dict[str, Any]
    matrix: RunMatrix
    base: dict[str, Any]

    def __post_init__(self) -> None:
        runs = len(self.matrix.draft_lengths) * len(self.matrix.drafters) * self.matrix.repeats
        self.weight = 0.02 * self.matrix.tokens * (1 + runs)
        self.name = f"{self.matrix.name} {self.prompt.id} {self.arm.label}"

    def _unit(self, kind: str, parameters: dict[str, Any]) -> Unit:
        inputs = {**self.base, **parameters}
        if kind == "speculative":
            inputs["matrix"] = self.matrix.name
            if str(parameters["drafter"]).startswith("model "):
                inputs["draft_sha256"] = {quant: model.sha256 for quant, model in sorted(self.drafts.items())}
        return Unit(kind, inputs)

    def units(self) -> list[Unit]:
        from hiraishin.evaluate import unit_params

        return [self._unit(kind, params) for kind, params in unit_params(self.matrix.model_dump())]

    def execute(self, context: Context, missing: list[Unit]) -> Iterator[Measured]:
        from hiraishin.evaluate import unit_name, unit_params

        tokens = context.tokenize(self.model, [self.prompt])[0]
        lacking = {unit.key for unit in missing}
        events = context.worker(self.arm.build, self.matrix.env).call(
            "hiraishin.evaluate:measure",
            model_path=str(self.model.path),
            draft_model_paths={quant: str(model.path) for quant, model in self.drafts.items()},
            settings=self.settings,
            switch=self.arm.switch,
            parts_off=self.arm.parts_off,
            prompt={"id": self.prompt.id, "tokens": tokens},
            matrix=self.matrix.model_dump(),
            wanted=[
                unit_name(kind, params)
                for kind, params in unit_params(self.matrix.model_dump())
                if self._unit(kind, params).key in lacking
            ],
        )
        for event in events:
            if "kind" in event:
                yield self._unit(event["kind"], event["params"]), event["record"], event.get("table")


@dataclass
class LocalizeTask(Task):
    """The operations of one pass of one width, watched on one arm."""

    arm: Arm
    model: ModelFile
    prompt: Prompt
    settings: dict[str, Any]
    matrix: LocalizeMatrix
    width: int
    base: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weight = 3.0
        self.name = f"localize width {self.width} {self.model.quant} {self.arm.label}"

    def units(self) -> list[Unit]:
        return [Unit("localize", self.base)]

    def execute(self, context: Context, missing: list[Unit]) -> Iterator[Measured]:
        tokens = context.prompt_tokens(self.model, self.prompt, self.matrix.prompt_tokens)
        events = context.worker(self.arm.build, self.env).call(
            "hiraishin.localize:measure",
            model_path=str(self.model.path),
            settings=self.settings,
            switch=self.arm.switch,
            parts_off=self.arm.parts_off,
            prompt=tokens,
            tokens=self.matrix.tokens,
            width=self.width,
        )
        for event in events:
            if event.get("kind") == "localize":
                yield Unit("localize", self.base), event["record"], event.get("table")
