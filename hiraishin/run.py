"""Run a profile: plan its units, measure those that the store lacks, hand back all of them.

See :mod:`hiraishin.tasks` for what a task is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hiraishin import paths, provenance
from hiraishin.errors import NativeCrash, UserError
from hiraishin.models import ModelFile
from hiraishin.numerics.traffic import weights_read
from hiraishin.profile import LocalizeMatrix, PriceMatrix, Profile, ReplayMatrix, RunMatrix
from hiraishin.progress import Progress
from hiraishin.prompts import Prompt, load_prompts, select
from hiraishin.results import Result, ResultSet, Store, Unit
from hiraishin.tasks import (
    ARMS,
    UNFUSED,
    Arm,
    BandwidthTask,
    Context,
    LocalizeTask,
    PriceTask,
    ReplayTask,
    RunTask,
    Task,
    arm_without,
    spell_env,
)

KINDS = ("replay", "price", "runs", "localize")
"""The parts of a profile that can be measured on their own."""


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
        [*(ARMS[name] for name in matrix.arms), *(arm_without(parts) for parts in matrix.variants)],
        matrix.flash_attn or [profile.settings.flash_attn],
        matrix.kv_types or [profile.settings.kv_type],
        matrix.threads or [profile.settings.threads],
        prompts,
    )
    for quant, arm, flash, kv_type, threads, prompt in combinations:
        if not flash and kv_type not in ("f16", "f32", "bf16"):
            continue  # llama.cpp refuses a quantized V cache without flash attention
        model = context.model(quant)
        settings = _settings(profile, flash_attn=flash, kv_type=kv_type, threads=threads)
        base = _base(context, arm, model, settings, "replay") | _prompt_inputs(prompt)
        base |= {"tokens": matrix.tokens, "prompt_tokens": matrix.prompt_tokens, "env": spell_env(matrix.env)}
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
                "env": spell_env(matrix.env),
                "widths": matrix.widths,
                "rounds": matrix.rounds,
                "settle": matrix.settle,
                "weight_bytes": weights_read(model.path),
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
        drafts = {q: context.draft(q) for q in draft_quants}
        settings = _settings(profile)
        # Arms take turns prompt by prompt, so that speeds compared were measured side by side.
        arms = [*(ARMS[name] for name in matrix.arms), *(arm_without(parts) for parts in matrix.variants)]
        for prompt, arm in itertools.product(prompts, arms):
            base = _base(context, arm, model, settings, "evaluate") | _prompt_inputs(prompt)
            base |= {"env": spell_env(matrix.env)}
            yield RunTask(arm, model, drafts, prompt, settings, matrix, base)


def _localize_tasks(context: Context, matrix: LocalizeMatrix) -> Iterator[Task]:
    profile = context.profile
    prompt = select(load_prompts(matrix.prompt_set), [matrix.prompt])[0]
    arms = [*(ARMS[name] for name in matrix.arms), *(arm_without(parts) for parts in matrix.variants)]
    for quant, arm, width in itertools.product(matrix.quants or [profile.model.quant], arms, matrix.widths):
        model, settings = context.model(quant), _settings(profile)
        base = _base(context, arm, model, settings, "localize") | _prompt_inputs(prompt)
        base |= {"width": width, "tokens": matrix.tokens}
        if matrix.prompt_tokens is not None:
            base |= {"prompt_tokens": matrix.prompt_tokens}
        env = UNFUSED if profile.backend == "cuda" and settings["gpu_layers"] else {}
        if env:
            base |= {"env": spell_env(env)}
        yield LocalizeTask(arm, model, prompt, settings, matrix, width, base, env)


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
    return [
        task
        for kind, (matrices, make) in makers.items()
        if kind in kinds
        for m in matrices
        for task in make(context, m)
    ]


def _check_builds(context: Context, kinds: Iterable[str]) -> None:
    """Say that a build is missing before a model is fetched for it."""
    profile = context.profile
    matrices: list[tuple[str, list[Any]]] = [
        ("replay", [*profile.replay]), ("price", [*profile.price]), ("runs", [*profile.runs]), ("localize", [*profile.localize])
    ]  # fmt: skip
    asked = [matrix for kind, some in matrices if kind in kinds for matrix in some]
    builds = {ARMS[arm].build for matrix in asked for arm in matrix.arms}
    builds |= {arm_without(parts).build for matrix in asked for parts in matrix.variants}
    for name in sorted(builds, reverse=True):
        context.build(name)


def _preflight(context: Context, tasks: list[Task]) -> None:
    groups: dict[tuple[str, int, int | None, bool], tuple[ModelFile, dict[str, Prompt]]] = {}
    for task in tasks:
        if isinstance(task, (ReplayTask, RunTask, LocalizeTask)):
            limit = None if isinstance(task, RunTask) else task.matrix.prompt_tokens
            key = (task.model.sha256, task.matrix.tokens, limit, isinstance(task, RunTask))
            groups.setdefault(key, (task.model, {}))[1][task.prompt.id] = task.prompt
    for (_, extra, limit, stops), (model, prompts) in groups.items():
        context.check_fits(model, list(prompts.values()), extra, limit, stops_at_end=stops)


@contextmanager
def _told_when_stopped(what: Callable[[], str]) -> Iterator[None]:
    """Whoever presses Ctrl-C is told what is kept: a note on the exception."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(what())
        raise


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
        _check_builds(context, kinds)
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
        stored_now, wanted_now = 0, sum(len(absent) for _, absent in todo)
        with (
            _told_when_stopped(lambda: f"{stored_now} of {wanted_now} results of this run are stored in {store.root}."),
            Progress(f"profile {profile.name}", sum(task.weight for task, _ in todo), quiet=quiet) as progress,
        ):
            for task, absent in todo:
                try:
                    for unit, record, table in task.execute(context, absent):
                        if unit.key in results:
                            continue  # a trace that other widths needed again
                        stored = store.put(unit, record, table, {**about, "libraries": context.libraries()})
                        stored_now += 1
                        results[stored.key] = stored
                except NativeCrash as crash:
                    failures.append(f"{task.name}: {crash}")
                    for name in ("stock", "patched"):
                        if f"the {name} build" in crash.what:
                            context.drop_workers(name)
                progress.step(task.weight, task.name)
        for line in store.problems:
            say(f"note: {line}")
    wanted = [unit.key for task in tasks for unit in task.units()]
    ordered = [results[key] for key in dict.fromkeys(wanted) if key in results]
    return ResultSet(
        profile, provenance.machine(), ordered, name=profile.name, missing=missing_at_end, failures=failures
    )


def replay_profile(
    profile: Profile,
    *,
    arms: list[str],
    widths: list[int],
    tokens: int,
    prompt: str = "first",
    prompt_set: str = "replay",
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
        hint = "Widths are 1 to 16." if "widths" in first["loc"] else ""
        raise UserError(f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}", hint) from error
    return profile.model_copy(update={"replay": [matrix], "price": [], "runs": [], "localize": []})


def export(results: ResultSet, folder: Path, *, note: str = "") -> None:
    """Write a result set as a receipt (see :mod:`hiraishin.bundle`).

    Raises:
        UserError: the folder cannot be written, or there is nothing to write.
    """
    from hiraishin.bundle import write_bundle

    write_bundle(results, folder, note=note)
