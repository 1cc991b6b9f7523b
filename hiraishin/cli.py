"""The command line: one thin function per verb. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hiraishin.errors import UserError
from hiraishin.terminal import Verbs, nothing_kept, run_app

if TYPE_CHECKING:
    from hiraishin.results import ResultSet

app = typer.Typer(
    cls=Verbs,
    help="Why speculative decoding changes greedy output, which operation does it, and what exactness costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
receipts_app = typer.Typer(help="Every claim of the report, and receipts from other machines.", rich_markup_mode=None)
app.add_typer(receipts_app, name="receipts")

ProfileOption = Annotated[str, typer.Option("--profile", "-p", help="A profile's name, or a .toml file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _emit(value: Any) -> None:
    print(json.dumps(value, indent=1, sort_keys=False, allow_nan=False))


def parse_widths(text: str) -> list[int]:
    """``"2-9"``, ``"2,4,8"`` or a mix, as a list of widths.

    Raises:
        UserError: not numbers, empty, or outside 1 to 16.
    """
    widths: list[int] = []
    for piece in text.split(","):
        low, dash, high = piece.strip().partition("-")
        try:
            first = int(low) if low or not dash else -int(high)
            last = int(high) if dash and low else first
        except ValueError:
            raise UserError(
                f"--widths {text!r}: {piece!r} is no width", "Give numbers and ranges, such as 2-9,12,16."
            ) from None
        if not (1 <= first <= last <= 16):
            raise UserError(
                f"--widths {text!r}: {piece.strip()} is outside 1 to 16",
                "A pass of 2 to 16 tokens is what the patches treat.",
            )
        widths.extend(range(first, last + 1))
    return sorted(set(widths))


def check_writable(path: Path | None, hint: str = "Choose another place.", *, make_folders: bool = True) -> None:
    """Refuse a place for results before anything is measured for it (``None`` is fine).

    Args:
        path: the file or folder to be written.
        hint: what to do about it.
        make_folders: folders above it that are missing will be made.

    Raises:
        UserError: nothing can be written there.
    """
    if path is None:
        return
    above = path.absolute().parent
    while make_folders and not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "cannot be written" if above.is_dir() else "is no folder" if above.exists() else "does not exist"
        raise UserError(f"cannot write {path}: {above} {why}", hint)


@app.command()
def build(
    backend: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Build stock and patched llama.cpp where they are missing or out of date (a thin call of build.sh)."""
    from hiraishin.builds import ensure_builds

    ensure_builds(backend, echo=print)


@app.command()
def model(quant: Annotated[str, typer.Option(help="Weight type of the embedded model.")] = "Q4_K_M") -> None:
    """Fetch the embedded model, requantize it, and print its path and sha256."""
    from hiraishin.models import embedded

    found = embedded(quant, echo=lambda text: print(text, file=sys.stderr))
    print(f"{found.path}  {found.sha256}")


@app.command()
def replay(
    build: Annotated[str, typer.Option(help="stock, patched, off (patched, switch off) or serial.")] = "patched",
    widths: Annotated[str, typer.Option(help="Widths, such as 2-9 or 2,4,8.")] = "2-9",
    tokens: Annotated[int, typer.Option(help="Tokens of the trace.")] = 32,
    profile: ProfileOption = "default",
    model: Annotated[Path | None, typer.Option(help="A local GGUF instead of the profile's model.")] = None,
    quant: Annotated[str | None, typer.Option(help="Weight type of the embedded model.")] = None,
    prompt: Annotated[str, typer.Option(help="A prompt's id in the set.")] = "first",
    prompts: Annotated[str, typer.Option(help="A prompt set's name, or a .jsonl file.")] = "replay",
    threads: Annotated[int | None, typer.Option(help="Threads, for one token and for many alike.")] = None,
    kv_type: Annotated[str | None, typer.Option(help="Type of the KV cache: f16, q8_0, ...")] = None,
    flash_attn: Annotated[bool | None, typer.Option(help="Flash attention on or off.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Record a plain greedy decode, push it back in batches, compare all logits bit for bit. Exit 1 if any differ."""
    from hiraishin import run
    from hiraishin.claims import claims, to_json
    from hiraishin.profile import load_profile
    from hiraishin.tasks import ARMS

    chosen = parse_widths(widths)
    if build not in ARMS:
        raise UserError(f"there is no build {build!r}", f"Known: {', '.join(ARMS)}.")
    base = change_profile(
        load_profile(profile), model=model, quant=quant, threads=threads, kv_type=kv_type, flash_attn=flash_attn
    )
    wanted = run.replay_profile(base, arms=[build], widths=chosen, tokens=tokens, prompt=prompt, prompt_set=prompts)
    results = run.measure(wanted, quiet=as_json, echo=lambda text: print(text, file=sys.stderr))
    if as_json:
        _emit(to_json(results))
    else:
        print(replay_text(results))
    _stop_on_failures(results)
    differing = sum(int(c.value or 0) for c in claims(results) if c.id == "replay.differing_positions")
    raise typer.Exit(1 if differing else 0)


def change_profile(profile: Any, *, model: Path | None = None, **settings: Any) -> Any:
    """A profile with command-line overrides, validated like the file itself.

    Raises:
        UserError: an override has a value that a profile would not accept.
    """
    from pydantic import ValidationError

    from hiraishin.profile import Profile

    body = profile.model_dump()
    quant = settings.pop("quant", None)
    body["settings"] |= {key: value for key, value in settings.items() if value is not None}
    if model is not None:
        body["model"] = {"source": "file", "path": str(model), "quant": quant or "as given"}
    elif quant is not None:
        body["model"]["quant"] = quant
    try:
        return Profile.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from error


def replay_text(results: ResultSet) -> str:
    """A replay's verdict for the terminal: what was compared, and what was found at each width."""
    lines = []
    for result in results.of("replay"):
        i, r = result.inputs, result.record
        first = "" if r["first_differing"] is None else f", first at KV position {r['first_differing_kv']}"
        diff = "not finite" if r["max_abs_diff"] is None else f"{r['max_abs_diff']:.6f}"
        lines.append(
            f"{i['build']:>14}  width {i['width']:>2}: {r['differing']} of {r['positions']} rows differ, "
            f"largest {diff}, {r['flips']} flip(s){first}"
        )
    if results.results:
        i = results.results[0].inputs
        lines.append(
            f"model {i['model']} {i['quant']}, KV {i['kv_type']}, flash attention {'on' if i['flash_attn'] else 'off'}, "
            f"{i['threads']} thread(s), prompt {i['prompt']}"
        )
    return "\n".join(lines)


def _stop_on_failures(results: ResultSet) -> None:
    if results.failures:
        raise UserError(
            f"{len(results.failures)} measurement(s) failed: {results.failures[0]}",
            "Everything else was measured and is stored; the same command tries only what is missing.",
            exit_code=3,
        )


@app.command()
def localize(
    build: Annotated[str, typer.Option(help="stock, patched, off or serial.")] = "stock",
    width: Annotated[int, typer.Option(min=2, max=16, help="Width of the pass to watch.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of the trace to search for the first difference.")] = 64,
    profile: ProfileOption = "default",
    model: Annotated[Path | None, typer.Option(help="A local GGUF instead of the profile's model.")] = None,
    quant: Annotated[str | None, typer.Option(help="Weight type of the embedded model.")] = None,
    prompt: Annotated[str, typer.Option(help="A prompt's id in the set.")] = "first",
    threads: Annotated[int | None, typer.Option(help="Threads.")] = None,
    kv_type: Annotated[str | None, typer.Option(help="Type of the KV cache.")] = None,
    flash_attn: Annotated[bool | None, typer.Option(help="Flash attention on or off.")] = None,
    all_rows: Annotated[
        bool, typer.Option("--all", help="Also show operations that only pass a difference on.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Name the operations whose rows differ between lone passes and one pass of a width. Exit 1 if any do."""
    from hiraishin import run as runner
    from hiraishin.profile import LocalizeMatrix, load_profile
    from hiraishin.tasks import ARMS

    if build not in ARMS:
        raise UserError(f"there is no build {build!r}", f"Known: {', '.join(ARMS)}.")
    base = change_profile(
        load_profile(profile), model=model, quant=quant, threads=threads, kv_type=kv_type, flash_attn=flash_attn
    )
    matrix = LocalizeMatrix.model_validate({"prompt": prompt, "widths": [width], "tokens": tokens, "arms": [build]})
    wanted = base.model_copy(update={"replay": [], "price": [], "runs": [], "localize": [matrix]})
    results = runner.measure(wanted, quiet=as_json, echo=lambda text: print(text, file=sys.stderr))
    _stop_on_failures(results)
    found = results.results[0]
    table = [] if found.table is None else found.table.to_dict("records")
    if as_json:
        _emit({"record": found.record, "operations": json.loads(json.dumps(table, default=str))})
    else:
        for row in table:
            if row["verdict"] == "origin" or (all_rows and row["verdict"] != "equal"):
                switch = f"; {row['switch']}" if row["switch"] else ""
                print(
                    f"{row['index']:>5} {row['tensor']:<24} {row['op']:<16} {row['weight_type']:<6} {row['backend']:<12} "
                    f"{row['verdict']:<10} {row['differing']} of {row['tokens']} tokens{switch}"
                )
        print(
            f"width {width} at KV position {found.record['kv_position']}: {found.record['differing_operations']} of "
            f"{found.record['operations']} operations differ, {len(found.record['origins'])} are origins"
        )
    raise typer.Exit(1 if found.record["differing_operations"] else 0)


@app.command()
def audit(
    lib: Annotated[Path | None, typer.Option(help="Folder of any llama.cpp build's libraries.")] = None,
    build: Annotated[str, typer.Option(help="One of this project's builds: stock or patched.")] = "stock",
    model: Annotated[Path | None, typer.Option(help="A local GGUF; the embedded model otherwise.")] = None,
    quant: Annotated[str, typer.Option(help="Weight type of the embedded model.")] = "Q4_K_M",
    widths: Annotated[str, typer.Option(help="Widths, such as 2-16 or 2,4,8.")] = "2-16",
    tokens: Annotated[int, typer.Option(min=2, max=8192, help="Positions to compare.")] = 128,
    prompt: Annotated[str, typer.Option(help="A prompt's id in the set.")] = "first",
    prompts: Annotated[str, typer.Option(help="A prompt set's name, or a .jsonl file.")] = "replay",
    kv_type: Annotated[str, typer.Option(help="Type of the KV cache.")] = "f16",
    threads: Annotated[int, typer.Option(min=1, max=512, help="Threads.")] = 2,
    flash_attn: Annotated[bool, typer.Option(help="Flash attention on or off.")] = True,
    gpu_layers: Annotated[int, typer.Option(min=0, help="Layers on the GPU.")] = 0,
    explain: Annotated[bool, typer.Option(help="Prove causes: flip the switches that remove one.")] = False,
    predict: Annotated[bool, typer.Option(help="State the width classes before running, then score.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write Markdown, fit for an issue.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the audit as a receipt into this folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Does a batch change greedy output, from which width, which operation? Exit 0 exact, 1 not, 2 could not tell."""
    from hiraishin.audit import AuditOptions, run_audit
    from hiraishin.audit_show import print_table, to_html, to_markdown

    chosen = parse_widths(widths)
    for path in (markdown, html):
        check_writable(path, make_folders=False)
    check_writable(out)
    if out is not None:
        from hiraishin.audit_receipt import as_result, stored_audits, write_audits

        stored_audits(out)
    with nothing_kept("an audit"):
        report = run_audit(
            AuditOptions(
                lib,
                build,
                model,
                quant,
                tuple(w for w in chosen if w > 1),
                tokens,
                prompt,
                prompts,
                kv_type,
                threads,
                flash_attn,
                gpu_layers,
                explain,
                predict,
            ),
            echo=lambda text: print(text, file=sys.stderr),
        )
    if markdown is not None:
        markdown.write_text(to_markdown(report), encoding="utf-8")
    if html is not None:
        html.write_text(to_html(report), encoding="utf-8")
    failure = None
    if out is not None:
        try:
            write_audits([as_result(report)], out)
        except UserError as error:
            failure = error  # the audit is shown all the same
    if as_json:
        _emit(report.to_json())
    else:
        print_table(report)
    if failure is not None:
        raise failure
    raise typer.Exit(report.exit_code)


@app.command()
def run(
    profile: Annotated[str, typer.Argument(help="A profile's name, or a .toml file.")] = "default",
    out: Annotated[Path | None, typer.Option(help="Also write the results as a receipt into this folder.")] = None,
    only: Annotated[str | None, typer.Option(help="Parts to run: replay, price, runs, localize (comma list).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a whole profile; what is stored already is not measured again."""
    from hiraishin import run as runner
    from hiraishin.claims import to_json
    from hiraishin.profile import load_profile

    check_writable(out)
    if out is not None:
        from hiraishin.bundle import check_place

        check_place(out)
    kinds = [k.strip() for k in only.split(",")] if only else list(runner.KINDS)
    results = runner.measure(
        load_profile(profile), kinds, quiet=as_json, echo=lambda text: print(text, file=sys.stderr)
    )
    if out is not None:
        runner.export(results, out)
    if as_json:
        _emit(to_json(results))
    else:
        print(f"profile {results.name}: {len(results.results)} results stored")
    _stop_on_failures(results)


@app.command()
def report(
    profile: ProfileOption = "default",
    out: Annotated[Path | None, typer.Option(help="Folder of the site; report/html by default.")] = None,
    check: Annotated[Path | None, typer.Option(help="Only check a rendered site in this folder.")] = None,
    notebooks: Annotated[bool, typer.Option(help="Run the notebooks.")] = True,
    measure: Annotated[bool, typer.Option(help="Measure what is missing; otherwise use what is stored.")] = True,
) -> None:
    """Everything: builds, model, measurements, notebooks, figures, and the HTML report."""
    from hiraishin import paths

    if check is not None:
        from hiraishin.report.check import check_site

        problems = check_site(check)
        for line in problems:
            print(line)
        raise typer.Exit(1 if problems else 0)
    from hiraishin import run as runner
    from hiraishin.profile import load_profile
    from hiraishin.report import build_report

    wanted = load_profile(profile)
    check_writable(out or paths.report_dir(), "Name another folder with --out or HIRAISHIN_REPORT.")
    if measure:
        from hiraishin.builds import ensure_builds

        ensure_builds(wanted.backend, echo=print)
    results = runner.measure(wanted, offline=not measure)
    outcome = build_report(
        wanted,
        results,
        out or paths.report_dir(),
        run_notebooks=notebooks,
        check=True,
        # Kernels run in the notebooks' folder: a path must survive that.
        parameters={"profile": str(Path(profile).absolute()) if Path(profile).suffix == ".toml" else profile},
    )
    print(f"report: {outcome.index}")
    for failure in outcome.failures:
        print(f"failed: {failure}", file=sys.stderr)
    _stop_on_failures(results)
    raise typer.Exit(0 if outcome.ok else 1)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A profile's name or a receipt folder.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    all_rows: Annotated[bool, typer.Option("--all", help="Also show claims that are the same.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Two sets of results side by side: bits and price, for example before and after an edit to a patch."""
    from hiraishin.compare import compare as compare_sets

    rows = compare_sets(load_results(a), load_results(b))
    if as_json:
        _emit(rows)
        return
    shown = [r for r in rows if all_rows or r["change"] != "same"]
    for row in shown:
        about = ", ".join(f"{k} {v}" for k, v in row["params"].items() if v is not None)
        ratio = f"  x{row['ratio']:.3f}" if row["ratio"] is not None else ""
        values = f"{_short(row['a'])} -> {_short(row['b'])} {row['unit']}{ratio}"
        print(f"{row['id']} [{row['build']}] {about}: {values} ({row['change']})")
    print(f"{len(rows)} claims compared, {sum(r['change'] == 'same' for r in rows)} the same")


def _short(value: Any) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def load_results(name: str) -> ResultSet:
    """The stored results of a profile, or of a receipt folder."""
    from hiraishin.results import load_receipt

    if (Path(name) / "receipt.json").is_file():
        return load_receipt(Path(name))
    from hiraishin import run as runner
    from hiraishin.profile import load_profile

    return runner.measure(load_profile(name), quiet=True, offline=True)


@receipts_app.callback(invoke_without_command=True)
def receipts(context: typer.Context, profile: ProfileOption = "default", as_json: JsonOption = False) -> None:
    """Print every claim of a profile from its stored results (nothing is measured)."""
    if context.invoked_subcommand is not None:
        return
    from hiraishin.claims import to_json

    body = to_json(load_results(profile))
    if as_json:
        _emit(body)
        return
    for claim in body["claims"]:
        about = ", ".join(f"{k} {v}" for k, v in claim["params"].items() if v is not None)
        print(f"{claim['id']} [{claim['build']}] {about}: {_short(claim['value'])} {claim['unit']}  {claim['detail']}")
    if body["missing"]:
        print(f"{body['missing']} unit(s) are not measured yet: hiraishin run {profile}", file=sys.stderr)


@receipts_app.command("import")
def receipts_import(folder: Path) -> None:
    """Check a receipt from another machine and add it to data/receipts."""
    from hiraishin.receipts import import_receipt

    print(f"added {import_receipt(folder)}")


@app.command()
def profiles() -> None:
    """List the profiles that ship with the project."""
    from hiraishin.profile import list_profiles, load_profile

    for name in list_profiles():
        print(f"{name:20} {load_profile(name).title}")


@app.command()
def doctor() -> None:
    """List what is missing on this machine, and the command that mends it."""
    from hiraishin.doctor import doctor as examine

    raise typer.Exit(examine())


def _version(value: bool) -> None:
    if value:
        from hiraishin import __version__
        from hiraishin.provenance import commit, versions

        about = commit()
        at = f" at {about['commit'][:12]}{' with changes' if about['dirty'] else ''}" if about["commit"] else ""
        print(f"hiraishin {__version__}{at}; " + ", ".join(f"{k} {v}" for k, v in versions().items()))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Versions that matter.")
    ] = False,
) -> None:
    """Options that every verb shares."""
    if debug:
        os.environ["HIRAISHIN_DEBUG"] = "1"


def main() -> None:
    """Entry point: errors for the user are one message and an exit code; tracebacks need ``--debug``."""
    run_app(app)


if __name__ == "__main__":
    main()
