"""The session inside the measuring child: load a model, decode, read raw logits, roll the KV cache back.

This is the low-level API of ``llama_cpp`` (ctypes), because the high-level ``Llama`` keeps ``n_ctx x n_vocab``
floats. Logits are read per pass. Sizes are checked before each native call, since llama.cpp answers a batch that
is too large with ``abort()``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hiraishin.binding import (
    SWITCH_MAX,
    SWITCH_OFF,
    SWITCH_SERIAL,
    GGMLTensor,
    check_abi,
    fallbacks,
    load_native,
    set_switch,
)
from hiraishin.errors import UserError

__all__ = [
    "SWITCH_MAX",
    "SWITCH_OFF",
    "SWITCH_SERIAL",
    "GGMLTensor",
    "Logits",
    "Model",
    "Session",
    "check_abi",
    "fallbacks",
    "get_model",
    "load_native",
    "set_switch",
    "tokenize_prompts",
]

Logits = npt.NDArray[np.float32]

_FLASH = {False: 0, True: 1}


class Model:
    """A loaded GGUF.

    Args:
        path: the file.
        gpu_layers: layers on the GPU (0 on a CPU build).
        extra_bufts: allow the CPU's repacked weights (llama.cpp's default).
        vocab_only: load the tokenizer alone.

    Raises:
        UserError: the file is missing or llama.cpp refuses it.
    """

    def __init__(
        self, path: str | Path, *, gpu_layers: int = 0, extra_bufts: bool = True, vocab_only: bool = False
    ) -> None:
        self.native = native = load_native()
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(
                f"there is no model file {self.path}", "Check the path in the profile or on the command line."
            )
        parameters = native.llama_model_default_params()
        parameters.n_gpu_layers = gpu_layers
        parameters.use_extra_bufts = extra_bufts
        parameters.vocab_only = vocab_only
        self._pointer = native.llama_model_load_from_file(str(self.path).encode(), parameters)
        if not self._pointer:
            raise UserError(
                f"llama.cpp cannot load the model {self.path.name}",
                "Its own words are in the newest native-*.log of the logs folder in HIRAISHIN_HOME.",
            )
        self.vocab = native.llama_model_get_vocab(self._pointer)
        self.n_vocab = int(native.llama_vocab_n_tokens(self.vocab))
        self.n_ctx_train = int(native.llama_model_n_ctx_train(self._pointer))
        self.vocab_only = vocab_only

    @property
    def pointer(self) -> Any:
        """The native handle."""
        return self._pointer

    def close(self) -> None:
        """Free the native model."""
        if self._pointer:
            self.native.llama_model_free(self._pointer)
            self._pointer = None

    @property
    def can_roll_back(self) -> bool:
        """False for recurrent and hybrid models: their state has no positions to remove."""
        return not (
            self.native.llama_model_is_recurrent(self._pointer) or self.native.llama_model_is_hybrid(self._pointer)
        )

    def is_end(self, token: int) -> bool:
        """Whether the token ends generation."""
        return bool(self.native.llama_vocab_is_eog(self.vocab, token))

    def tokenize(self, text: str, *, special: bool = False, add_special: bool = True) -> list[int]:
        """Token ids of a text; ``special`` lets control tokens in the text count as such."""
        blob = text.encode()
        buffer = (ctypes.c_int32 * (len(blob) + 8))()
        count = self.native.llama_tokenize(self.vocab, blob, len(blob), buffer, len(buffer), add_special, special)
        if count < 0:
            raise UserError("a prompt could not be tokenized: its text is too long for the tokenizer's buffer")
        return list(buffer[:count])

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes that the tokens stand for, control tokens left out (they may end inside a UTF-8 character)."""
        pieces = []
        for token in tokens:
            size = 256
            buffer = ctypes.create_string_buffer(size)
            count = self.native.llama_token_to_piece(self.vocab, token, buffer, size, 0, False)
            if count < 0:
                buffer = ctypes.create_string_buffer(-count)
                count = self.native.llama_token_to_piece(self.vocab, token, buffer, -count, 0, False)
            pieces.append(buffer.raw[: max(count, 0)])
        return b"".join(pieces)

    def chat(self, text: str) -> list[int]:
        """Token ids of one user turn rendered with the model's own chat template, ready for the answer.

        The template is untrusted: it runs in jinja2's sandbox. A model without one gets the bare text.

        Raises:
            UserError: the template is not valid or tries something that the sandbox forbids.
        """
        template = self.native.llama_model_chat_template(self._pointer, None)
        if not template:
            return self.tokenize(text)
        import jinja2
        import jinja2.sandbox

        def refuse(message: str = "") -> None:
            raise jinja2.TemplateError(message)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        pieces = {
            name: self._piece(token)
            for name, token in (
                ("bos_token", self.native.llama_vocab_bos(self.vocab)),
                ("eos_token", self.native.llama_vocab_eos(self.vocab)),
            )
        }
        try:
            rendered = environment.from_string(template.decode()).render(
                messages=[{"role": "user", "content": text}],
                add_generation_prompt=True,
                raise_exception=refuse,
                **pieces,
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError, OverflowError, MemoryError) as error:
            raise UserError(
                f"the chat template of {self.path.name} does not render ({type(error).__name__}: {error})",
                "Use a model with a plain template.",
            ) from error
        # The template writes the beginning-of-text token itself when the model wants one.
        starts = bool(pieces["bos_token"]) and rendered.startswith(pieces["bos_token"])
        return self.tokenize(rendered, special=True, add_special=not starts)

    def _piece(self, token: int) -> str:
        if token < 0:
            return ""
        text = self.native.llama_vocab_get_text(self.vocab, token)
        return text.decode("utf-8", errors="replace") if text else ""


class Session:
    """One context over a model: a KV cache, and passes that return raw logits.

    Args:
        model: the loaded model.
        n_ctx: cells of the KV cache (rounded up to a multiple of 256).
        n_batch: tokens in the longest pass.
        threads: threads for one token and for many alike.
        flash_attn: on or off (never "auto", which depends on the backend).
        kv_type: type of the K and V cache.
        cb_eval: an eval callback, for watching operations.

    Raises:
        UserError: llama.cpp refuses the combination (for example a quantized V cache without flash attention).
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int = 512,
        threads: int = 2,
        flash_attn: bool = True,
        kv_type: str = "f16",
        cb_eval: Any = None,
    ) -> None:
        import llama_cpp

        self.model = model
        self.native = native = model.native
        self.n_ctx = -(-n_ctx // 256) * 256
        self.n_batch = n_batch
        parameters = native.llama_context_default_params()
        parameters.n_ctx = self.n_ctx
        parameters.n_batch = parameters.n_ubatch = n_batch
        parameters.n_seq_max = 1
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = _FLASH[flash_attn]
        parameters.type_k = parameters.type_v = getattr(llama_cpp, f"GGML_TYPE_{kv_type.upper()}")
        parameters.no_perf = True
        if cb_eval is not None:
            parameters.cb_eval = cb_eval
            self._keep = cb_eval
        self._pointer = native.llama_init_from_model(model.pointer, parameters)
        if not self._pointer:
            raise UserError(
                f"llama.cpp refuses a context with flash attention {'on' if flash_attn else 'off'}, KV type {kv_type}, "
                f"{self.n_ctx} cells",
                "A quantized V cache needs flash attention; a smaller context needs less memory.",
            )
        self.memory = native.llama_get_memory(self._pointer)
        self.n_past = 0
        self._tokens = np.empty(n_batch, np.int32)
        self._positions = np.empty(n_batch, np.int32)
        self._counts = np.ones(n_batch, np.int32)
        self._wanted = np.empty(n_batch, np.int8)
        self._sequence = (ctypes.c_int32 * 1)(0)
        pointer = ctypes.POINTER(ctypes.c_int32)
        self._sequences = (pointer * (n_batch + 1))(*[ctypes.cast(self._sequence, pointer)] * n_batch, None)  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the native context."""
        if self._pointer:
            self.native.llama_free(self._pointer)
            self._pointer = None

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, logits: str = "all") -> Logits:
        """One pass over ``tokens`` at the end of the cache.

        Returns:
            float32 logits ``[rows, n_vocab]``: a row for every token (``logits="all"``), for the last
            (``"last"``) or for none (``"none"``). A view into llama.cpp's buffer, valid until the next pass.

        Raises:
            UserError: the pass is empty, wider than ``n_batch``, past the end of the context, holds a token that
                the vocabulary lacks, or llama.cpp fails.
        """
        width = len(tokens)
        if not 1 <= width <= self.n_batch:
            raise UserError(f"a pass of {width} tokens; between 1 and {self.n_batch} are possible")
        if self.n_past + width > self.n_ctx:
            raise UserError(
                f"the pass ends at position {self.n_past + width}, past the context of {self.n_ctx} tokens",
                "Ask for fewer tokens or a longer context.",
            )
        self._tokens[:width] = tokens
        if self._tokens[:width].min() < 0 or self._tokens[:width].max() >= self.model.n_vocab:
            raise UserError(f"a token id lies outside the vocabulary of {self.model.n_vocab}")
        self._positions[:width] = np.arange(self.n_past, self.n_past + width)
        self._wanted[:width] = 1 if logits == "all" else 0
        if logits == "last":
            self._wanted[width - 1] = 1
        n = self.native
        batch = n.llama_batch()
        batch.n_tokens = width
        batch.token = self._tokens.ctypes.data_as(ctypes.POINTER(n.llama_token))
        batch.pos = self._positions.ctypes.data_as(ctypes.POINTER(n.llama_pos))
        batch.n_seq_id = self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.seq_id = ctypes.cast(self._sequences, ctypes.POINTER(ctypes.POINTER(n.llama_seq_id)))
        batch.logits = self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        status = n.llama_decode(self._pointer, batch)
        if status != 0:
            raise UserError(
                f"llama.cpp could not decode a pass of {width} tokens at position {self.n_past} (status {status})"
            )
        self.n_past += width
        rows = {"all": width, "last": 1, "none": 0}[logits]
        if rows == 0:
            n.llama_synchronize(self._pointer)
            return np.empty((0, self.model.n_vocab), np.float32)
        address = ctypes.cast(n.llama_get_logits(self._pointer), ctypes.POINTER(ctypes.c_float))
        if not address:
            raise UserError("llama.cpp returned no logits for the pass")
        return np.ctypeslib.as_array(address, shape=(rows, self.model.n_vocab))

    def prefill(self, tokens: Sequence[int], *, last_alone: bool = False) -> Logits:
        """Fill the cache with a prompt, in passes of at most ``n_batch`` tokens, the switch as it stands.

        Returns:
            float32 ``[n_vocab]``, a copy of the logits after the last token.

        Raises:
            UserError: the prompt is empty or does not fit in the context.
        """
        if not len(tokens):
            raise UserError("the prompt has no tokens", "A prompt needs at least one token.")
        if self.n_past + len(tokens) > self.n_ctx:
            raise UserError(f"a prompt of {len(tokens)} tokens does not fit in a context of {self.n_ctx}")
        body = list(tokens[:-1]) if last_alone and len(tokens) > 1 else list(tokens)
        logits = None
        for start in range(0, len(body), self.n_batch):
            piece = body[start : start + self.n_batch]
            final = start + self.n_batch >= len(body)
            logits = self.decode(piece, logits="last" if final else "none")
        if last_alone and len(tokens) > 1:
            logits = self.decode([tokens[-1]], logits="last")
        assert logits is not None
        return logits[0].copy()  # type: ignore[no-any-return]

    def rollback(self, n_past: int) -> None:
        """Forget every token from position ``n_past`` on.

        Raises:
            UserError: the model's memory cannot do that (recurrent and some sliding-window caches); going on
                would leave rejected tokens in the cache.
        """
        if not 0 <= n_past <= self.n_past:
            raise UserError(f"cannot roll back to position {n_past} from {self.n_past}")
        if n_past == self.n_past:
            return
        removed = self.native.llama_memory_seq_rm(self.memory, 0, n_past, -1)
        top = int(self.native.llama_memory_seq_pos_max(self.memory, 0))
        if not removed or top != n_past - 1:
            raise UserError(
                f"the KV cache of {self.model.path.name} cannot be rolled back to position {n_past}",
                "Speculative decoding needs a cache that can forget; recurrent and some sliding-window models cannot.",
            )
        self.n_past = n_past

    def clear(self) -> None:
        """Empty the cache."""
        self.native.llama_memory_clear(self.memory, True)
        self.n_past = 0


_model: tuple[tuple[str, int, bool], Model] | None = None


def get_model(path: str, *, gpu_layers: int = 0, extra_bufts: bool = True) -> Model:
    """The model at ``path``, kept loaded until another one is asked for (a child measures many units on one)."""
    global _model
    key = (path, gpu_layers, extra_bufts)
    if _model is None or _model[0] != key:
        if _model is not None:
            _model[1].close()
            _model = None
        _model = (key, Model(path, gpu_layers=gpu_layers, extra_bufts=extra_bufts))
    return _model[1]


def tokenize_prompts(*, model_path: str, texts: list[str]) -> Any:
    """Child: token ids of each text as one chat turn, and the model's trained context."""
    model = Model(model_path, vocab_only=True)
    try:
        yield {"return": {"tokens": [model.chat(text) for text in texts], "n_ctx_train": model.n_ctx_train}}
    finally:
        model.close()
