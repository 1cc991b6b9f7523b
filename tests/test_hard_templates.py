"""Chat templates of model files are somebody else's programs: none is fine, a hostile one runs nothing and ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hiraishin import synthetic, tasks
from hiraishin.builds import find_build
from hiraishin.errors import UserError
from hiraishin.models import ModelFile, sha256_file
from hiraishin.profile import Profile
from hiraishin.prompts import Prompt
from hiraishin.worker import Worker

pytestmark = pytest.mark.real_model

TEXT = "Ä_test"
BYTES = [3 + byte for byte in TEXT.encode()]  # the tokenizer of synthetic models: one token a byte, after three others
BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(find_build("stock")) as worker:
        yield worker


@pytest.fixture
def templated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], Path]:
    """Makes a tiny model that carries a chat template."""
    honest = synthetic._metadata

    def make(template: str | None) -> Path:
        def metadata(*arguments: Any) -> dict[str, Any]:
            return honest(*arguments) | ({} if template is None else {"tokenizer.chat_template": template})

        with monkeypatch.context() as patch:
            patch.setenv("HIRAISHIN_HOME", str(tmp_path / hashlib.sha256(str(template).encode()).hexdigest()[:8]))
            patch.setattr(synthetic, "_metadata", metadata)
            return synthetic.make_shape("tiny", echo=lambda _: None)

    return make


def tokens(worker: Worker, model: Path) -> list[int]:
    reply = worker.result("hiraishin.llama:tokenize_prompts", model_path=str(model), texts=[TEXT])
    return list(reply["tokens"][0])


def test_a_model_without_a_template_gets_the_bare_text(worker: Worker, templated: Callable[[str | None], Path]) -> None:
    assert tokens(worker, templated(None)) == [BOS, *BYTES]


def test_a_plain_template_is_rendered_and_its_special_tokens_count(
    worker: Worker, templated: Callable[[str | None], Path]
) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    assert tokens(worker, templated(template)) == [BOS, *BYTES, EOS]


HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "helper": "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "attribute filter": "{{ (lipsum|attr('__globals__'))['os'].system('touch MARK') }}",
    "builtins": "{{ raise_exception.__builtins__['open']('MARK', 'w').write('x') }}",
    "code": "{{ raise_exception.__code__.co_consts }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "changed messages": "{{ messages.append(1) }}",
    "a file": "{% include 'MARK' %}",
    "an import": "{% import 'os' as os %}{{ os.system('touch MARK') }}",
    "huge range": "{{ range(10**12)|list }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "no such name": "{{ strftime_now('%Y') }}",
    "syntax": "{% for",
    "its own message": "{{ raise_exception('no \\x1b[31msystem\\x07 role') }}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_runs_nothing_and_is_one_line(
    worker: Worker, templated: Callable[[str | None], Path], tmp_path: Path, kind: str
) -> None:
    mark = tmp_path / "mark"
    model = templated(HOSTILE[kind].replace("MARK", str(mark)))
    with pytest.raises(UserError, match=r"the chat template of synthetic-tiny\S+ does not render") as caught:
        tokens(worker, model)
    assert not mark.exists()
    assert caught.value.exit_code == 2
    assert tokens(worker, templated(None)) == [BOS, *BYTES], "the child is of use afterwards"


def _context(stack: ExitStack, said: list[str]) -> tasks.Context:
    return tasks.Context(Profile(title="t"), said.append, stack)


def _model(path: Path) -> ModelFile:
    return ModelFile(path, "m", "Q4_K_M", sha256_file(path))


@pytest.mark.parametrize("loop", ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"])
def test_a_template_without_an_end_is_stopped(
    templated: Callable[[str | None], Path], home: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setattr(tasks, "TEMPLATE_SECONDS", 2)
    model = _model(templated(loop))
    prompt = Prompt(id="p", category="c", text=TEXT)
    with ExitStack() as stack, pytest.raises(UserError, match="does not come to an end in 2 s"):
        _context(stack, []).tokenize(model, [prompt])


def test_a_model_without_a_template_is_mentioned(templated: Callable[[str | None], Path], home: Path) -> None:
    said: list[str] = []
    with ExitStack() as stack:
        context = _context(stack, said)
        assert context.tokenize(_model(templated(None)), [Prompt(id="p", category="c", text=TEXT)]) == [[BOS, *BYTES]]
    assert said == ["note: synthetic-tiny.Q4_K_M.gguf has no chat template, so prompts go in as they are"]
