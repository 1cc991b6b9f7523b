"""One pass of the real model, watched on a real build."""

from __future__ import annotations

from typing import Any

from hiraishin.models import embedded
from hiraishin.prompts import load_prompts, select
from hiraishin.worker import Worker

SETTINGS = {"threads": 1, "flash_attn": True, "kv_type": "f16", "n_batch": 512, "extra_bufts": True}
QUIET = {"OMP_WAIT_POLICY": "PASSIVE"}


def localized(
    worker: Worker,
    quant: str,
    width: int,
    *,
    prompt_id: str = "lru-cache",
    prompt_tokens: int | None = None,
    tokens: int | None = None,
    start: int | None = None,
    switch: int | None = None,
    parts_off: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """The record of one watched pass, with its table; the switch is on except on stock. Watching must change nothing."""
    model = str(embedded(quant, echo=lambda _: None).path)
    text = select([*load_prompts("replay"), *load_prompts("evaluation")], [prompt_id])[0].text
    prompt = worker.result("hiraishin.llama:tokenize_prompts", model_path=model, texts=[text])["tokens"][0]
    assert prompt_tokens is None or len(prompt) >= prompt_tokens
    events = worker.call(
        "hiraishin.localize:measure",
        model_path=model,
        settings={**SETTINGS, **changes},
        switch=(16 if worker.build.name != "stock" else 0) if switch is None else switch,
        parts_off=parts_off,
        prompt=prompt[:prompt_tokens],
        tokens=tokens or width,
        width=width,
        start=start,
    )
    event = next(e for e in list(events) if e.get("kind") == "localize")  # all read: the child is done
    assert event["record"]["watching_changed_rows"] == 0
    return {**event["record"], "table": event["table"]}
