"""Prompt sets: JSON lines with ``id``, ``category`` and ``text``; the project's own or the reader's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from hiraishin import paths
from hiraishin.errors import UserError

MOST_BYTES = 64 << 20
"""No prompt set is larger; without a limit a device or a model given by mistake would fill the memory."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``text`` is untrusted: it is escaped wherever it is shown."""

    id: str
    category: str
    text: str

    @property
    def sha256(self) -> str:
        """Hash of the text; part of every unit that used the prompt."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def is_path(name: str) -> bool:
    """Whether a prompt set is named by a path, not by its name in ``data/prompts``."""
    return name.endswith(".jsonl") or "/" in name


def load_prompts(name_or_path: str | Path) -> list[Prompt]:
    """Read a prompt set by name (``replay``, ``evaluation``) or by path (``mine.jsonl``).

    Raises:
        UserError: the file is missing, not UTF-8, empty, or a line (named by its number) is not an object with
            exactly a non-empty ``id``, ``category`` and ``text``, or repeats an id.
    """
    text = str(name_or_path)
    path = Path(text) if is_path(text) else paths.prompts_dir() / f"{text}.jsonl"
    try:
        with path.open("rb") as file:
            blob = file.read(MOST_BYTES + 1)
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in paths.prompts_dir().glob("*.jsonl")))
        raise UserError(
            f"the prompt set {text!r} cannot be read: {error.strerror}", f"Known sets: {known}; or give a .jsonl file."
        ) from error
    if len(blob) > MOST_BYTES:
        raise UserError(f"the prompt set {path.name} is larger than {MOST_BYTES >> 20} MiB", "Is it the right file?")
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, raw in enumerate(blob.split(b"\n"), start=1):
        where = f"{path.name}, line {number}"
        if not raw.strip():
            continue
        try:
            item = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not valid UTF-8 (byte {error.start + 1})", "Save the file as UTF-8.") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error})", "One JSON object a line.") from error
        if not isinstance(item, dict) or set(item) != {"id", "category", "text"}:
            raise UserError(f"{where}: needs exactly the keys id, category and text")
        for key, value in item.items():
            if not isinstance(value, str) or not value.strip():
                raise UserError(f"{where}: {key} must be text that is not empty")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{where}: {key} holds half a surrogate pair, which is no character") from error
        if item["id"] in lines:
            raise UserError(f"{where}: the id {item['id']!r} was used before, in line {lines[item['id']]}")
        lines[item["id"]] = number
        prompts.append(Prompt(item["id"], item["category"], item["text"]))
    if not prompts:
        raise UserError(f"the prompt set {path.name} is empty", "It needs at least one JSON line.")
    return prompts


def select(prompts: list[Prompt], wanted: list[str], *, limit_per_category: int | None = None) -> list[Prompt]:
    """The prompts with the given ids, in the set's order; ``["all"]`` takes all, ``["first"]`` the first.

    Raises:
        UserError: an id is not in the set.
    """
    known = {p.id for p in prompts}
    unknown = [w for w in wanted if w not in known and w not in ("all", "first")]
    if unknown:
        raise UserError(f"no prompt has the id {unknown[0]!r}", f"Known ids: {', '.join(sorted(known))}.")
    if "all" in wanted:
        chosen = prompts
    else:
        chosen = [p for i, p in enumerate(prompts) if p.id in wanted or (i == 0 and "first" in wanted)]
    if limit_per_category is not None:
        taken: dict[str, int] = {}
        kept = []
        for prompt in chosen:
            taken[prompt.category] = taken.get(prompt.category, 0) + 1
            if taken[prompt.category] <= limit_per_category:
                kept.append(prompt)
        chosen = kept
    return chosen
