"""The audit of layers on a GPU, with a child that only plays its part: where it watches, and what it says of fusion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hiraishin import audit
from hiraishin.audit import AuditOptions, AuditReport, run_audit
from hiraishin.audit_show import to_markdown
from hiraishin.builds import Build
from hiraishin.errors import UserError
from hiraishin.models import ModelFile
from hiraishin.profile import Profile
from hiraishin.run import plan
from hiraishin.tasks import UNFUSED, LocalizeTask
from hiraishin.worker import Event

TOKENS = 8
ORIGIN = {
    "index": 3,
    "layer": 0,
    "tensor": "node_25",
    "op": "FLASH_ATTN_EXT",
    "weight": "",
    "weight_type": "f32",
    "backend": "CUDA0",
    "switch": "attention: vector kernel for one query, tensor-core kernel for more",
    "max_abs_diff": 1e-4,
    "relative": 5e-4,
}


class PlayedWorker:
    """A child on a card where fused and unfused rows differ in the given widths; ``open`` counts children alive."""

    fused: frozenset[int] = frozenset()
    unfused: frozenset[int] = frozenset()
    gpu = True
    watching_changes = 0
    opened: list[tuple[str, ...]]
    alive = 0

    def __init__(self, build: Build, env: Mapping[str, str] | None = None) -> None:
        self.build, self.libraries = build, {"libllama.so": "0" * 64}
        self.env = {k: v for k, v in (env or {}).items() if k.startswith("GGML_")}
        type(self).opened.append(tuple(f"{k}={v}" for k, v in self.env.items()))

    def __enter__(self) -> PlayedWorker:
        type(self).alive += 1
        assert type(self).alive == 1, "two children would hold the weights twice"
        return self

    def __exit__(self, *_: object) -> None:
        type(self).alive -= 1

    def result(self, function: str, **arguments: Any) -> Any:
        if function == "hiraishin.devices:visible":
            return {"gpu": self.gpu}
        if function == "hiraishin.llama:tokenize_prompts":
            return {"tokens": [[1, 2, 3]], "n_ctx_train": 0}  # a load of the vocabulary alone knows no context
        assert function == "hiraishin.replay:reorder_floor"
        assert list(arguments["changes"]) == ["flash_attn"]  # what only the CPU knows is not tried
        return {"differing": 3, "positions": TOKENS, "max": 1.0, "rms_max": 0.2, "rms_median": 0.1}

    def call(self, function: str, **arguments: Any) -> Iterator[Event]:
        if function == "hiraishin.localize:measure":
            assert self.env == {"GGML_CUDA_DISABLE_FUSION": "1"}
            wrong = arguments["width"] in self.unfused
            yield {
                "kind": "localize",
                "record": {
                    "origins": [ORIGIN] if wrong else [],
                    "position": 0,
                    "kv_position": 3,
                    "operations": 50,
                    "watching_changed_rows": self.watching_changes,
                },
            }
            return
        wrong_widths = self.unfused if self.env else self.fused
        yield {"kind": "trace", "table": {"row_sha256": ["a"] * TOKENS, "token": [5] * TOKENS}}
        for width in arguments["widths"]:
            wrong = width in wrong_widths
            yield {
                "kind": "replay",
                "width": width,
                "record": {
                    "positions": TOKENS,
                    "differing": TOKENS * wrong,
                    "first_differing": 0 if wrong else None,
                    "first_differing_kv": 3 if wrong else None,
                    "max_abs_diff": 0.5 * wrong,
                    "flips": 0,
                    "rerun_differing": 0 if arguments.get("rerun", True) else None,
                },
                "table": {
                    "row_sha256": [f"w{width}" if wrong else "a"] * TOKENS,
                    "differing": [wrong] * TOKENS,
                    "rms_diff": [0.1 * wrong] * TOKENS,
                    "max_abs_diff": [0.5 * wrong] * TOKENS,
                    "margin": [1.0] * TOKENS,
                    "flip": [False] * TOKENS,
                },
            }


def audited(monkeypatch: pytest.MonkeyPatch, context: int = 512, **played: Any) -> AuditReport:
    kind: Any = type("Played", (PlayedWorker,), {"opened": [], "alive": 0, **played})
    monkeypatch.setattr(audit, "Worker", kind)
    build = Build("stock", "cuda", Path("/nowhere"), {"libraries": {}}, {})
    monkeypatch.setattr(audit, "_build", lambda _: (build, 0))
    model = ModelFile(Path("/nowhere/model.gguf"), "model", "Q4_K_M", "0" * 64)
    monkeypatch.setattr(audit, "_model", lambda *_: model)
    monkeypatch.setattr(audit, "read_header", lambda _: SimpleNamespace(n_ctx_train=context))
    found = run_audit(AuditOptions(widths=(2, 4), tokens=TOKENS, gpu_layers=99), echo=lambda _: None)
    assert kind.opened == [(), ("GGML_CUDA_DISABLE_FUSION=1",)]
    return found


def test_operations_are_watched_without_fusion_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = audited(monkeypatch, fused=frozenset({2, 4}), unfused=frozenset({2, 4}))
    assert (found.exit_code, found.nature) == (1, "rounding")
    assert "because of node_25 (FLASH_ATTN_EXT" in found.verdict
    assert found.controls["watching_changed_rows"] == 0
    text = to_markdown(found)
    assert "operations were watched without CUDA fusion" in text
    assert f"width 2 {TOKENS} of {TOKENS}, width 4 {TOKENS} of {TOKENS}" in text


def test_a_difference_that_only_fusion_makes_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    found = audited(monkeypatch, fused=frozenset({4}), unfused=frozenset())
    assert found.exit_code == 1
    assert "because of fused kernels" in found.verdict
    assert found.operations[0]["first"] is None


def test_an_exact_build_is_still_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = audited(monkeypatch)
    assert (found.exit_code, [e["width"] for e in found.unfused]) == (0, [4])


def test_exact_with_fusion_is_exact_whatever_happens_without(monkeypatch: pytest.MonkeyPatch) -> None:
    found = audited(monkeypatch, unfused=frozenset({4}))
    assert found.exit_code == 0
    assert f"width 4 {TOKENS} of {TOKENS}" in to_markdown(found)


def test_where_watching_changes_rows_even_so_nothing_is_concluded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = audited(monkeypatch, fused=frozenset({2}), unfused=frozenset({2}), watching_changes=1)
    assert found.exit_code == 2
    assert "watching_changed_rows is not zero" in found.verdict


def test_layers_for_a_gpu_that_the_library_does_not_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="sees no GPU") as caught:
        audited(monkeypatch, gpu=False)
    assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (2, 1)


def test_a_prompt_that_does_not_fit_with_its_tokens_is_refused_by_the_files_own_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="do not fit in the model's context of 10"):
        audited(monkeypatch, context=3 + TOKENS - 1)


def test_who_stops_an_audit_is_not_told_that_something_was_kept() -> None:
    from hiraishin.terminal import Stopped, nothing_kept

    with pytest.raises(KeyboardInterrupt) as stop, nothing_kept("an audit"):
        raise KeyboardInterrupt
    told = str(Stopped(stop.value))
    assert "an audit keeps nothing before it ends" in told and "starts again" in told
    assert "is stored" not in told and "goes on" not in told


@pytest.mark.parametrize(("backend", "layers", "env"), [("cuda", 99, UNFUSED), ("cuda", 0, {}), ("cpu", 99, {})])
def test_a_profile_watches_a_gpu_without_fusion_and_the_results_key_says_so(
    tmp_path: Path, backend: str, layers: int, env: dict[str, str]
) -> None:
    profile = Profile.model_validate(
        {"title": "t", "backend": backend, "settings": {"gpu_layers": layers}, "localize": [{"widths": [2]}]}
    )
    context: Any = SimpleNamespace(
        profile=profile,
        model=lambda quant: ModelFile(tmp_path / "m.gguf", "m", quant, "0" * 64),
        build=lambda name: SimpleNamespace(fingerprint="1" * 64),
    )
    tasks = plan(context, ["localize"])
    assert [task.env for task in tasks if isinstance(task, LocalizeTask)] == [env, env]
    spelled = {"env": "GGML_CUDA_DISABLE_FUSION=1"} if env else {}
    assert all({k: v for k, v in unit.inputs.items() if k == "env"} == spelled for t in tasks for unit in t.units())
