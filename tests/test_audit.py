"""The audit: classes, the nature of a difference, predictions; then its exit code, causes and verdicts on real builds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hiraishin import audit, paths
from hiraishin.audit import AuditOptions, AuditReport, run_audit
from hiraishin.audit_show import to_html, to_markdown
from hiraishin.audit_steps import patient
from hiraishin.binding import _DEFAULTS, check_defaults
from hiraishin.builds import find_build
from hiraishin.dispatch import predict_widths, score
from hiraishin.errors import UserError
from hiraishin.faults import LOGIC_FAULTS
from hiraishin.gguf_header import Tensor
from hiraishin.judge import LOGIC_SHARE, judge_nature, share_limit, spell_classes, width_classes
from hiraishin.worker import Event, Worker


def test_widths_with_the_same_rows_are_one_class() -> None:
    rows: dict[int, tuple[str, ...]] = {
        1: ("a", "b"),
        2: ("a", "b"),
        3: ("a", "b"),
        4: ("c", "b"),
        8: ("d", "b"),
        9: ("c", "b"),
    }
    classes = width_classes(rows)
    assert classes == [[1, 2, 3], [4, 9], [8]]
    assert spell_classes(classes) == "{1..3} {4,9} {8}"
    assert spell_classes([[1, 2], [3], [5, 6, 7, 8]]) == "{1,2} {3} {5..8}"
    assert spell_classes([]) == ""


FLOOR = {"rms_max": 0.5}


@pytest.mark.parametrize(
    ("rms", "floor", "flips", "shares", "nature"),
    [
        ([], FLOOR, [], [], "none"),
        ([0.4, 0.1], FLOOR, [], [], "rounding"),
        ([0.4], FLOOR, [(0.3, 0.9)], [1e-7], "rounding"),
        ([0.4], FLOOR, [(1.7, 0.9)], [1e-7], "rounding"),  # both logits of a pair can move
        ([0.4], FLOOR, [(1.9, 0.9)], [1e-7], "logic"),  # no move of that size flips such a margin
        ([None], FLOOR, [], [], "logic"),  # not finite
        ([5.0], FLOOR, [], [], "logic"),  # ten times the floor
        ([0.1], FLOOR, [], [0.3], "logic"),  # equal inputs, another output
        ([0.1], {"rms_max": 0.0}, [], [], "unknown"),
        ([0.1], {"rms_max": 0.0}, [], [1e-7], "rounding"),
        ([0.1], {"rms_max": 0.0}, [], [float("inf")], "logic"),
    ],
)
def test_rounding_and_logic_are_told_apart_by_size(
    rms: list[float | None],
    floor: dict[str, Any],
    flips: list[tuple[float, float | None]],
    shares: list[float],
    nature: str,
) -> None:
    assert judge_nature(rms, floor, flips, [(share, LOGIC_SHARE) for share in shares]) == nature


def test_a_product_of_quantized_weights_may_move_further_than_the_attention() -> None:
    product = {"op": "MUL_MAT", "weight": "blk.0.attn_q.weight", "weight_type": "q4_K"}
    attention = {"op": "FLASH_ATTN_EXT", "weight": "", "weight_type": "f32"}
    scores = {"op": "MUL_MAT", "weight": "", "weight_type": "q8_0"}  # keys of a quantized cache
    assert share_limit(product) > share_limit(attention) == share_limit(scores) == LOGIC_SHARE
    assert share_limit({**product, "weight_type": "f16"}) == LOGIC_SHARE
    for origin, nature in ((product, "rounding"), (attention, "logic")):
        assert judge_nature([0.1], FLOOR, [], [(0.1, share_limit(origin))]) == nature
    assert judge_nature([0.1], FLOOR, [], [(0.9, share_limit(product))]) == "logic"


def tensors(*types: tuple[str, int]) -> list[Tensor]:
    return [Tensor(f"blk.{i}.ffn_down.weight", kind, (row, 64), 0, 0) for i, (kind, row) in enumerate(types)]


CONTEXT = {"threads": 1, "flash_attn": True, "kv_type": "f16", "extra_bufts": True}


@pytest.mark.parametrize(
    ("types", "classes", "first"),
    [
        ([("Q8_0", 576)], [[1, 2, 3, 4, 8, 16]], None),
        ([("Q4_0", 576)], [[1, 2, 3, 4, 8, 16]], None),
        ([("F16", 576)], [[1], [2, 3, 4, 8, 16]], 2),
        ([("Q6_K", 1536), ("Q8_0", 576)], [[1, 2, 3, 4], [8, 16]], 8),
        ([("Q4_K", 1536)], [[1, 2, 3], [4, 8, 16]], 4),
        ([("Q4_K", 1536), ("Q6_K", 1536)], [[1, 2, 3], [4], [8, 16]], 4),
    ],
)
def test_classes_follow_from_the_types_of_the_weights(
    types: list[tuple[str, int]], classes: list[list[int]], first: int | None
) -> None:
    found = predict_widths(tensors(*types), CONTEXT, 50, 48, [2, 3, 4, 8, 16])
    assert (found["classes"], found["first_differing_width"]) == (classes, first)
    assert found["first_differing_kv"] == (None if first is None else 50)
    assert len(found["why"]) == len(set(types)) + 1


def test_a_repacked_group_is_four_columns_and_the_rest_go_alone() -> None:
    found = predict_widths(tensors(("Q4_K", 1536)), CONTEXT, 50, 12, [4, 5, 6])
    # Width 5 leaves its fifth column to gemv, and the trace ends in a pass of two.
    assert found["classes"] == [[1], [4], [5], [6]]
    unpacked = predict_widths(tensors(("Q4_K", 1536)), {**CONTEXT, "extra_bufts": False}, 50, 16, [4, 8])
    assert unpacked["classes"] == [[1, 4], [8]]  # then the tiled path takes the type
    assert predict_widths(tensors(("Q4_K", 1536)), CONTEXT, 50, 16, [4, 8], avx2=False)["classes"] == [[1, 4], [8]]


def test_a_narrow_last_pass_counts_as_what_it_is() -> None:
    # 10 tokens in passes of 8: the last two go as a pass of two, so 8 and 10 part.
    assert predict_widths(tensors(("Q6_K", 1536)), CONTEXT, 50, 10, [8, 10])["classes"] == [[1], [8], [10]]


def test_a_lone_query_is_split_from_512_padded_cells_with_more_than_one_thread() -> None:
    plain = tensors(("Q8_0", 576))
    found = predict_widths(plain, {**CONTEXT, "threads": 2}, 250, 12, [2, 4])
    assert (found["first_differing_width"], found["first_differing_kv"]) == (2, 256)
    for change in ({"threads": 1}, {"threads": 2, "kv_type": "q8_0"}):
        assert predict_widths(plain, {**CONTEXT, **change}, 250, 12, [2, 4])["classes"] == [[1, 2, 4]]
    # An attention of two multiplications takes sgemm at once.
    assert predict_widths(plain, {**CONTEXT, "flash_attn": False}, 50, 12, [2, 4])["classes"] == [[1], [2, 4]]


def test_a_prediction_is_scored_width_by_width() -> None:
    guess = predict_widths(tensors(("Q4_K", 1536)), CONTEXT, 50, 48, [2, 4, 8])
    right = score(guess, [[1, 2], [4, 8]], {2: None, 4: 51, 8: 50})
    assert right == {
        "classes_right": True,
        "exact_widths_right": True,
        "first_width_right": True,
        "late_by": {"4": 1, "8": 0},
    }
    wrong = score(guess, [[1, 4], [2, 8]], {2: 50, 4: None, 8: 50})
    assert not (wrong["classes_right"] or wrong["exact_widths_right"] or wrong["first_width_right"])
    nothing: dict[str, Any] = {"classes": [], "first_differing_width": None, "first_differing_kv_by_width": {}}
    assert not score(nothing, [[1, 2]], {2: None})["exact_widths_right"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"widths": ()}, "there is no width to audit"),
        ({"widths": (1,)}, "there is no width to audit"),
        ({"widths": (4, 16), "tokens": 8}, "a pass of 16 tokens does not fit in a trace of 8"),
        ({"kv_type": "nope"}, "there is no KV type 'nope'"),
    ],
)
def test_an_audit_of_nothing_is_refused_before_anything_is_loaded(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(what)):
        run_audit(replace(AuditOptions(lib=tmp_path / "absent"), **change), echo=lambda _: None)


def test_libraries_that_cannot_be_audited_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "libllama.so").write_bytes(b"no library")
    for folder, message in (
        ("absent", "does not exist"),
        ("empty", "is empty"),
        ("half", "has no libggml-base.so"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            run_audit(AuditOptions(lib=tmp_path / folder), echo=lambda _: None)
        assert (refused.value.exit_code, "\n" in refused.value.what) == (2, False)


def test_a_library_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int llama_nothing(void) { return 0; }\n", encoding="ascii")
    for name in ("libllama.so", "libggml.so", "libggml-base.so"):
        try:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / name), str(source)], check=True)
        except FileNotFoundError:
            pytest.skip("no C compiler")
    with pytest.raises(UserError, match=r"lacks llama_\w+ and \d+ more functions"):
        run_audit(AuditOptions(lib=tmp_path), echo=lambda _: None)


def test_a_field_more_in_a_struct_shows_in_the_default_values() -> None:
    defaults: dict[str, dict[str, Any]] = dict(_DEFAULTS)  # type: ignore[arg-type]
    known = {name: (lambda values=values: SimpleNamespace(**values)) for name, values in defaults.items()}
    check_defaults(SimpleNamespace(**known))
    for function, values in defaults.items():
        names = list(values)
        # A field put in front moves each value to its neighbour's name.
        shifted = dict(zip(names, [values[names[-1]], *list(values.values())[:-1]], strict=True))
        broken = {**known, function: lambda shifted=shifted: SimpleNamespace(**shifted)}
        with pytest.raises(UserError, match=r"where .* is expected"):
            check_defaults(SimpleNamespace(**broken))


def one_line_refusal(folder: Path) -> str:
    """What the command line says of a library folder; it must end with 2 and say it in one line."""
    command = [sys.executable, "-m", "hiraishin", "audit", "--lib", str(folder), "--tokens", "2", "--widths", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=paths.ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and lines[0].startswith("hiraishin: "), done.stderr
    return lines[0]


def test_the_command_line_refuses_a_folder_without_libggml_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_bytes(b"no library")
    assert "has no libggml-base.so. Give the folder that holds" in one_line_refusal(tmp_path)


@pytest.mark.real_model
def test_a_real_library_with_a_field_more_in_a_struct_is_refused_in_one_line(tmp_path: Path) -> None:
    stock = find_build("stock")
    for library in stock.lib_dir.glob("lib*.so*"):
        if library.name != "libllama.so":
            shutil.copyfile(library, tmp_path / library.name)
    # A libllama that is the real one but for one function: an int more at the front of what it returns.
    size = stock.abi["structs"]["llama_context_params"]["size"]
    source = f"""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <string.h>
        struct params {{ char bytes[{size}]; }};
        struct params llama_context_default_params(void) {{
            struct params (*real)(void) = (struct params (*)(void)) dlsym(RTLD_NEXT, "llama_context_default_params");
            struct params made = real(), moved;
            memset(&moved, 0, sizeof(moved));
            memcpy(moved.bytes + 4, made.bytes, sizeof(made) - 4);
            return moved;
        }}
    """
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(tmp_path / "libllama.so")]
    command += ["-Wl,--no-as-needed", str(tmp_path / "libllama.so.0"), f"-Wl,-rpath,{tmp_path}", "-ldl"]
    subprocess.run(command, input=source, text=True, check=True)
    said = one_line_refusal(tmp_path)
    assert "llama_context_default_params gives n_ctx = 0 where 512 is expected" in said
    assert "build that source" in said


def report(**changes: Any) -> AuditReport:
    about = {
        "build": "<b>",
        "backend": "cpu",
        "upstream_commit": None,
        "switch": 0,
        "libraries": {"libllama.so": "0" * 64},
        "machine": "a processor",
    }
    row = {
        "width": 4,
        "positions": 8,
        "differing": 3,
        "first_differing_kv": 256,
        "max_abs_diff": 0.25,
        "flips": 1,
        "rerun_differing": 0,
    }
    made = AuditReport(1, "not exact <script>", about, {"width1_differing_rows": 0}, [row], [[1], [4]])
    return replace(made, **changes)


def test_the_page_escapes_what_it_did_not_write_and_refers_to_nothing_outside() -> None:
    page = to_html(report())
    assert "&lt;script&gt;" in page and "<script" not in page and "&lt;b&gt;" in page
    assert not re.search(r"(src|href)=|url\(", page)


def test_markdown_holds_the_table_and_says_what_changes_at_the_position() -> None:
    text = to_markdown(report())
    assert "| 4 | 8 | 3 | 256 (a multiple of 256) | 0.250000 | 1 | yes |" in text
    assert "* width classes that give the same bits: {1} {4}" in text


# The real builds.

QUICK = AuditOptions(widths=(2, 4, 8), tokens=16, threads=1, predict=True)


def test_waiting_threads_give_way_unless_the_caller_chose_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert patient() == {"OMP_WAIT_POLICY": "PASSIVE"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert patient() == {}


def quiet_audit(options: AuditOptions) -> AuditReport:
    return run_audit(options, echo=lambda _: None)


def gone(found: AuditReport, control: str) -> list[int]:
    after = next(c for c in found.causes if c["control"] == control)["after"]
    return [width for width, rows in sorted(after.items()) if rows == 0]


@pytest.mark.real_model
def test_stock_is_not_exact_and_each_cause_is_proved_by_its_control() -> None:
    found = quiet_audit(replace(QUICK, explain=True))
    assert (found.exit_code, found.nature) == (1, "rounding")
    assert not any(found.controls.values())
    assert found.classes == [[1, 2], [4], [8]]
    assert [(o["width"], o["first"]["tensor"]) for o in found.operations] == [(4, "ffn_out-3"), (8, "ffn_out-0")]
    assert "from width 4 because of ffn_out-3" in found.verdict
    assert gone(found, "weights not repacked") == [4]  # repacking is all of it at 4, not at 8
    assert gone(found, "tiled path off") == []
    assert gone(found, "no repack, tiled path off") == [4, 8]
    assert gone(found, "quantized KV cache") == []
    assert found.prediction["score"]["classes_right"]
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.real_model
@pytest.mark.hard
def test_the_split_over_threads_is_proved_by_one_thread_and_by_a_quantized_cache() -> None:
    options = replace(QUICK, quant="Q8_0", widths=(2,), tokens=12, threads=2, prompt="long-minutes", prompt_tokens=250)
    options = replace(options, prompt_set="evaluation")
    found = quiet_audit(replace(options, explain=True))
    assert found.exit_code == 1
    assert found.widths[0]["first_differing_kv"] == 256
    assert {"one thread", "quantized KV cache"} <= {c["control"] for c in found.causes if gone(found, c["control"])}
    assert gone(found, "weights not repacked") == gone(found, "no repack, tiled path off") == []
    assert found.prediction["score"]["late_by"] == {"2": 0}


@pytest.mark.real_model
@pytest.mark.hard
def test_without_flash_attention_the_control_is_to_turn_it_on() -> None:
    found = quiet_audit(replace(QUICK, quant="Q8_0", widths=(2,), tokens=8, flash_attn=False, explain=True))
    assert (found.exit_code, found.nature) == (1, "rounding")
    assert gone(found, "flash attention on") == [2]


@pytest.mark.real_model
@pytest.mark.parametrize(
    "quant", ["Q6_K", *(pytest.param(q, marks=pytest.mark.hard) for q in ("F16", "Q8_0", "IQ4_NL"))]
)
def test_predictions_hold_and_no_rounding_is_called_a_bug(quant: str) -> None:
    found = quiet_audit(replace(QUICK, quant=quant))
    assert found.nature == ("none" if quant == "Q8_0" else "rounding")
    assert found.prediction["score"]["classes_right"], (found.prediction["classes"], found.classes)
    assert found.prediction["score"]["first_width_right"]


QUICK_FAULTS = (("stock", "position"), ("patched", "state"))


class PlantedWorker(Worker):
    """A child whose sessions have a logic fault."""

    fault = ""
    after = 0

    def call(self, function: str, **arguments: Any) -> Iterator[Event]:
        if function in ("hiraishin.replay:measure", "hiraishin.localize:measure"):
            planted = {"fault": self.fault, "after": self.after, "inner": function, "arguments": arguments}
            yield from super().call("hiraishin.faults:planted", **planted)
        else:
            yield from super().call(function, **arguments)


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("build", "fault"),
    [
        # One behind stock's rounding, one where there is no rounding; make test-hard has all of them.
        pytest.param(build, fault, marks=[] if (build, fault) in QUICK_FAULTS else pytest.mark.hard)
        for build in ("stock", "patched")
        for fault in LOGIC_FAULTS
    ],
)
def test_a_planted_logic_fault_is_called_one(fault: str, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On stock it comes after passes that differ by rounding, except where it can only be at the start.
    after = 4 if build == "stock" and fault != "state" else 0
    monkeypatch.setattr(audit, "Worker", type("Planted", (PlantedWorker,), {"fault": fault, "after": after}))
    found = quiet_audit(replace(QUICK, build=build, widths=(4,), tokens=12))
    assert (found.exit_code, found.nature) == (1, "logic")
    assert "a logic error, not rounding" in found.verdict


@pytest.mark.real_model
@pytest.mark.parametrize(("build", "code"), [("stock", 1), ("patched", 0)])
def test_the_exit_code_tells_a_build_that_is_exact_by_its_folder_too(build: str, code: int) -> None:
    folder = paths.builds_dir() / "cpu" / build
    command = [sys.executable, "-m", "hiraishin", "audit", "--lib", str(folder), "--widths", "4,8", "--tokens", "8"]
    done = subprocess.run([*command, "--threads", "1", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["exit_code"] == code
