"""Run a profile: plan its units, measure those that the store lacks, hand back all of them.

A *task* is one call into a child process that yields several units (one prompt at all widths, one prompt with all
draft lengths, ...). Tasks of one build run in one child; where speeds are compared, builds take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiraishin import paths, provenance
from hiraishin.builds import Build, find_build
from hiraishin.errors import NativeCrash, UserError
from hiraishin.models import ModelFile, resolve
from hiraishin.profile import LocalizeMatrix, PriceMatrix, Profile, ReplayMatrix, RunMatrix
from hiraishin.progress import Progress
from hiraishin.prompts import Prompt, load_prompts, select
from hiraishin.results import Result, ResultSet, Store, Unit
from hiraishin.worker import Worker, same_ggml

KINDS = ("replay", "price", "runs", "localize")
"""The parts of a profile that can be measured on their own."""

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
    "guard": 1 << 0, "cpu-mul-mat": 1 << 1, "cpu-attention": 1 << 2, "cuda-attention-8": 1 << 3,
    "cuda-mul-mat": 1 << 4, "cuda-attention-16": 1 << 5, "cuda-parallel-blocks": 1 << 6, "cuda-graphs": 1 << 7,
    "cpu-fast": 1 << 8, "cuda-fast": 1 << 9,
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
    _workers: dict[str, Worker] = field(default_factory=dict)
    _tokens: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _n_ctx_train: dict[str, int] = field(default_factory=dict)
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

    def worker(self, name: str) -> Worker:
        """The one child process of a build; a new one after a crash."""
        if name not in self._workers:
            worker = self.stack.enter_context(Worker(self.build(name)))
            for other in self._workers.values():
                if worker.libraries and same_ggml(worker.libraries, other.libraries):
                    raise UserError(
                        f"the builds {name} and {other.build.name} loaded the very same libraries",
                        "A comparison would compare a build with itself; run ./build.sh all again.",
                    )
            self._workers[name] = worker
        return self._workers[name]

    def drop_worker(self, name: str) -> None:
        """Forget a child that died."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.close()

    def tokenize(self, model: ModelFile, prompts: list[Prompt]) -> list[list[int]]:
        """Chat-templated token ids of the prompts, one call for all that are not known yet."""
        todo = [p for p in prompts if (model.sha256, p.sha256) not in self._tokens]
        if todo:
            first = "stock" if "stock" in self._workers or "patched" not in self._workers else "patched"
            reply = self.worker(first).result(
                "hiraishin.llama:tokenize_prompts", model_path=str(model.path), texts=[p.text for p in todo]
            )
            self._n_ctx_train[model.sha256] = int(reply["n_ctx_train"])
            for prompt, tokens in zip(todo, reply["tokens"], strict=True):
                self._tokens[(model.sha256, prompt.sha256)] = tokens
        return [self._tokens[(model.sha256, p.sha256)] for p in prompts]

    def check_fits(self, model: ModelFile, prompts: list[Prompt], extra: int, limit: int | None) -> None:
        """Refuse prompts that do not fit in the trained context, all named at once."""
        tokens = self.tokenize(model, prompts)
        n_ctx = self._n_ctx_train.get(model.sha256, 0)
        long = [
            f"{p.id} ({n} tokens)"
            for p, t in zip(prompts, tokens, strict=True)
            if n_ctx and (n := min(len(t), limit or len(t))) + extra > n_ctx
        ]
        if long:
            raise UserError(
                f"{len(long)} prompt(s) with {extra} tokens to generate do not fit in the model's context of {n_ctx}: "
                + ", ".join(long),
                "Shorten them or ask for fewer tokens.",
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
        tokens = context.tokenize(self.model, [self.prompt])[0]
        if self.matrix.prompt_tokens is not None:
            if len(tokens) < self.matrix.prompt_tokens:
                raise UserError(f"the prompt {self.prompt.id} has {len(tokens)} tokens, {self.matrix.prompt_tokens} were asked for")
            tokens = tokens[: self.matrix.prompt_tokens]
        events = context.worker(self.arm.build).call(
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
            context.worker(build).result(
                "hiraishin.timing:prepare", model_path=str(self.model.path), settings=self.settings,
                context=self.context_tokens, max_width=max(self.matrix.widths),
            )
        table: dict[str, list[Any]] = {"build": [], "width": [], "round": [], "ms": []}
        warm: dict[str, list[Any]] = {}
        rows: dict[str, dict[str, list[str]]] = {}
        for number in range(-self.matrix.warmup, self.matrix.rounds):
            # Every other round runs backwards, so that a drift cannot favour one end.
            widths = self.matrix.widths if number % 2 == 0 else self.matrix.widths[::-1]
            for arm in self.arms if number % 2 == 0 else self.arms[::-1]:
                reply = context.worker(arm.build).result(
                    "hiraishin.timing:time_round", widths=widths, switch=arm.switch, parts_off=arm.parts_off,
                    hashes=number == 0,
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
            context.worker(build).result("hiraishin.timing:finish")
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
            if '"kind":"model"' in str(parameters.get("drafter", "")).replace(" ", "") or self.drafts:
                inputs["draft_sha256"] = {quant: model.sha256 for quant, model in sorted(self.drafts.items())}
        return Unit(kind, inputs)

    def units(self) -> list[Unit]:
        from hiraishin.evaluate import unit_params

        return [self._unit(kind, params) for kind, params in unit_params(self.matrix.model_dump())]

    def execute(self, context: Context, missing: list[Unit]) -> Iterator[Measured]:
        tokens = context.tokenize(self.model, [self.prompt])[0]
        events = context.worker(self.arm.build).call(
            "hiraishin.evaluate:measure",
            model_path=str(self.model.path),
            draft_model_paths={quant: str(model.path) for quant, model in self.drafts.items()},
            settings=self.settings,
            switch=self.arm.switch,
            parts_off=self.arm.parts_off,
            prompt={"id": self.prompt.id, "tokens": tokens},
            matrix=self.matrix.model_dump(),
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

    def __post_init__(self) -> None:
        self.weight = 3.0
        self.name = f"localize width {self.width} {self.model.quant} {self.arm.label}"

    def units(self) -> list[Unit]:
        return [Unit("localize", self.base)]

    def execute(self, context: Context, missing: list[Unit]) -> Iterator[Measured]:
        tokens = context.tokenize(self.model, [self.prompt])[0]
        events = context.worker(self.arm.build).call(
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


def _settings(profile: Profile, **changes: Any) -> dict[str, Any]:
    return {**profile.settings.model_dump(), **{k: v for k, v in changes.items() if v is not None}}


def _base(context: Context, arm: Arm, model: ModelFile, settings: dict[str, Any], code: str) -> dict[str, Any]:
    return {
        "build": arm.label,
        "fingerprint": context.build(arm.build).fingerprint,
        "switch": arm.switch,
        "parts_off": arm.parts_off,
        **model.inputs(),
        **settings,
        "code": provenance.code_version(code),
    }


def _prompt_inputs(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt.id, "prompt_sha256": prompt.sha256, "category": prompt.category}


def _replay_tasks(context: Context, matrix: ReplayMatrix) -> Iterator[Task]:
    profile = context.profile
    prompts = select(load_prompts(matrix.prompt_set), matrix.prompts)
    combinations = itertools.product(
        matrix.quants or [profile.model.quant],
        matrix.arms,
        matrix.flash_attn or [profile.settings.flash_attn],
        matrix.kv_types or [profile.settings.kv_type],
        matrix.threads or [profile.settings.threads],
        prompts,
    )
    for quant, arm_name, flash, kv_type, threads, prompt in combinations:
        if not flash and kv_type not in ("f16", "f32", "bf16"):
            continue  # llama.cpp refuses a quantized V cache without flash attention
        arm, model = ARMS[arm_name], context.model(quant)
        settings = _settings(profile, flash_attn=flash, kv_type=kv_type, threads=threads)
        base = _base(context, arm, model, settings, "replay") | _prompt_inputs(prompt)
        base |= {"tokens": matrix.tokens, "prompt_tokens": matrix.prompt_tokens}
        yield ReplayTask(arm, model, prompt, settings, matrix, base)


def _price_tasks(context: Context, matrix: PriceMatrix) -> Iterator[Task]:
    profile = context.profile
    arms = [ARMS[name] for name in matrix.arms] + [arm_without(parts) for parts in matrix.variants]
    machine = provenance.machine()
    about = {"cpu": machine["cpu"], "cores": machine["cores"], "gpu": (machine["gpu"] or {}).get("name")}
    for quant in matrix.quants or [profile.model.quant]:
        model = context.model(quant)
        settings = _settings(profile)
        for tokens in matrix.contexts:
            base = {
                "builds": [arm.label for arm in arms],
                "fingerprints": {arm.build: context.build(arm.build).fingerprint for arm in arms},
                "parts_off": [arm.parts_off for arm in arms],
                **model.inputs(),
                **settings,
                **about,
                "context": tokens,
                "widths": matrix.widths,
                "rounds": matrix.rounds,
                "code": provenance.code_version("timing"),
            }
            yield PriceTask(arms, model, tokens, settings, matrix, base)
    yield BandwidthTask(
        profile.settings.threads,
        {**about, "threads": profile.settings.threads, "code": provenance.code_version("timing")},
    )


def _run_tasks(context: Context, matrix: RunMatrix) -> Iterator[Task]:
    profile = context.profile
    prompts = select(load_prompts(matrix.prompt_set), matrix.prompts, limit_per_category=matrix.limit_per_category)
    draft_quants = sorted({d.quant for d in matrix.drafters if d.kind == "model"})
    for quant in matrix.quants or [profile.model.quant]:
        model = context.model(quant)
        drafts = {q: context.model(q) for q in draft_quants}
        settings = _settings(profile)
        # Arms take turns prompt by prompt, so that speeds compared were measured side by side.
        for prompt, arm_name in itertools.product(prompts, matrix.arms):
            arm = ARMS[arm_name]
            base = _base(context, arm, model, settings, "evaluate") | _prompt_inputs(prompt)
            yield RunTask(arm, model, drafts, prompt, settings, matrix, base)


def _localize_tasks(context: Context, matrix: LocalizeMatrix) -> Iterator[Task]:
    profile = context.profile
    prompt = select(load_prompts(matrix.prompt_set), [matrix.prompt])[0]
    for quant, arm_name, width in itertools.product(
        matrix.quants or [profile.model.quant], matrix.arms, matrix.widths
    ):
        arm, model, settings = ARMS[arm_name], context.model(quant), _settings(profile)
        base = _base(context, arm, model, settings, "localize") | _prompt_inputs(prompt)
        base |= {"width": width, "tokens": matrix.tokens}
        yield LocalizeTask(arm, model, prompt, settings, matrix, width, base)


def plan(context: Context, kinds: Iterable[str] = KINDS) -> list[Task]:
    """Every task of the profile's parts, in running order. Makes or fetches the models that the keys need."""
    makers: dict[str, tuple[list[Any], Callable[[Context, Any], Iterator[Task]]]] = {
        "replay": (context.profile.replay, _replay_tasks),
        "localize": (context.profile.localize, _localize_tasks),
        "price": (context.profile.price, _price_tasks),
        "runs": (context.profile.runs, _run_tasks),
    }
    unknown = set(kinds) - set(makers)
    if unknown:
        raise UserError(f"a profile has no part {sorted(unknown)[0]!r}", f"Known parts: {', '.join(KINDS)}.")
    return [task for kind, (matrices, make) in makers.items() if kind in kinds for m in matrices for task in make(context, m)]


def _preflight(context: Context, tasks: list[Task]) -> None:
    groups: dict[tuple[str, int, int | None], tuple[ModelFile, dict[str, Prompt]]] = {}
    for task in tasks:
        if isinstance(task, (ReplayTask, RunTask, LocalizeTask)):
            limit = task.matrix.prompt_tokens if isinstance(task, ReplayTask) else None
            key = (task.model.sha256, task.matrix.tokens, limit)
            groups.setdefault(key, (task.model, {}))[1][task.prompt.id] = task.prompt
    for (_, extra, limit), (model, prompts) in groups.items():
        context.check_fits(model, list(prompts.values()), extra, limit)


def measure(
    profile: Profile,
    kinds: Iterable[str] = KINDS,
    *,
    store: Store | None = None,
    quiet: bool = False,
    echo: Callable[[str], None] | None = None,
    offline: bool = False,
) -> ResultSet:
    """Measure what the store lacks of a profile and give all of its results.

    Args:
        profile: what to run.
        kinds: parts of it (``replay``, ``price``, ``runs``, ``localize``).
        store: where results live; the project's own by default.
        quiet: no progress.
        echo: gets one line before anything slow.
        offline: measure nothing; units that are not stored are listed in ``missing``.

    Raises:
        UserError: a build or model is missing, prompts do not fit, or nothing could be measured. A crash of one
            child does not stop the other tasks: it is listed in ``failures``.
    """
    store = store or Store(paths.results_dir())
    say = echo or (lambda text: None if quiet else print(text, flush=True))
    results: dict[str, Result] = {}
    failures: list[str] = []
    with ExitStack() as stack:
        context = Context(profile, say, stack)
        tasks = plan(context, kinds)
        todo: list[tuple[Task, list[Unit]]] = []
        missing_at_end: list[Unit] = []
        for task in tasks:
            absent = []
            for unit in task.units():
                found = store.get(unit)
                if found is None:
                    absent.append(unit)
                else:
                    results[found.key] = found
            if absent:
                todo.append((task, absent))
        if offline:
            missing_at_end = [unit for _, absent in todo for unit in absent]
            todo = []
        if todo:
            _preflight(context, [task for task, _ in todo])
        about = provenance.describe() if todo else {}
        with Progress(f"profile {profile.name}", sum(task.weight for task, _ in todo), quiet=quiet) as progress:
            for task, absent in todo:
                try:
                    for unit, record, table in task.execute(context, absent):
                        libraries = {name: w.libraries for name, w in context._workers.items()}
                        stored = store.put(unit, record, table, {**about, "libraries": libraries})
                        results[stored.key] = stored
                except NativeCrash as crash:
                    failures.append(f"{task.name}: {crash}")
                    for name in [n for n, w in context._workers.items() if w.build.name in crash.what]:
                        context.drop_worker(name)
                progress.step(task.weight, task.name)
        for line in store.problems:
            say(f"note: {line}")
    wanted = [unit.key for task in tasks for unit in task.units()]
    ordered = [results[key] for key in dict.fromkeys(wanted) if key in results]
    return ResultSet(
        profile, provenance.machine(), ordered, name=profile.name, missing=missing_at_end, failures=failures
    )


def replay_profile(
    profile: Profile, *, arms: list[str], widths: list[int], tokens: int, prompt: str = "first", prompt_set: str = "replay"
) -> Profile:
    """A profile that holds one replay only: what ``hiraishin replay`` runs.

    Raises:
        UserError: a width or a count is out of range.
    """
    from pydantic import ValidationError

    try:
        matrix = ReplayMatrix.model_validate(
            {"prompts": [prompt], "prompt_set": prompt_set, "tokens": tokens, "widths": widths, "arms": arms}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}", "Widths are 1 to 16.") from error
    return profile.model_copy(update={"replay": [matrix], "price": [], "runs": [], "localize": []})


def export(results: ResultSet, folder: Path) -> None:
    """Write a result set as a receipt: a folder that is a store of its own plus ``receipt.json``.

    Raises:
        UserError: the folder cannot be written.
    """
    import json
    from datetime import UTC, datetime

    target = Store(folder)
    for result in results.results:
        target.put(result.unit, result.record, result.table, result.provenance)
    about = {
        "profile": results.name,
        "machine": dict(results.machine),
        "created": datetime.now(UTC).strftime("%Y-%m-%d"),
        **provenance.commit(),
    }
    (folder / "receipt.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
