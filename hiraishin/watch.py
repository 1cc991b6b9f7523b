"""Watch the operations of a pass: an eval callback that copies what each operation wrote.

llama.cpp's scheduler asks the callback about every node and then runs the graph in pieces that end where it was told to
stop, so operations that the backend would fuse run apart. What the CPU backend fuses is left in one piece; whether
watching changed the logits all the same is a control of every use (see :mod:`hiraishin.localize`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hiraishin.binding import GGMLTensor, _ggml_base, load_native
from hiraishin.errors import UserError

VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
"""Operations that compute nothing: their value is their source's."""

FUSED_OPS = frozenset({"RMS_NORM"})
"""Operations that the CPU backend fuses with the multiplication after them, in the same loop. Between the two there would
be another rounding, so nobody looks there: the pair stays in one piece, and the norm's value is not known."""

_DTYPES: dict[str, tuple[Any, int]] = {
    "f32": (np.uint32, 4),
    "f16": (np.uint16, 2),
    "bf16": (np.uint16, 2),
    "i32": (np.uint32, 4),
}


@dataclass
class Node:
    """One operation that ran: what it is, what it read, and the bits it wrote.

    ``bits`` is an unsigned integer array in ggml's order, ``[ne3, ne2, ne1, ne0]``; ``None`` for types whose rows
    are not plain numbers (a quantized cache) and for operations fused with the next. ``sources`` are the addresses of
    the tensors it read, followed through views to the tensor that holds the data.
    """

    name: str
    op: str
    type: str
    shape: tuple[int, ...]
    address: int
    root: int
    sources: tuple[int, ...]
    weight: str
    weight_type: str
    buffer: str
    bits: npt.NDArray[Any] | None


@dataclass
class Watch:
    """Collects the nodes of the passes that run while ``active``. One entry of ``graphs`` a graph that ran."""

    active: bool = False
    graphs: list[list[Node]] = field(default_factory=list)
    problem: str = ""

    def __post_init__(self) -> None:
        native = load_native()
        base = _ggml_base()
        if base is None:
            raise UserError("watching operations needs /proc/self/maps (Linux)")
        self._base = base
        base.ggml_op_name.restype = ctypes.c_char_p
        base.ggml_type_name.restype = ctypes.c_char_p
        base.ggml_nbytes.restype = ctypes.c_size_t
        base.ggml_nbytes.argtypes = [ctypes.c_void_p]
        base.ggml_backend_buffer_name.restype = ctypes.c_char_p
        base.ggml_backend_buffer_name.argtypes = [ctypes.c_void_p]
        base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._first: str | None = None
        self.callback = native.ggml_backend_sched_eval_callback(self._called)

    def start(self) -> None:
        """Forget what was seen and watch from now on."""
        self.graphs = []
        self._first = None
        self.active = True

    def stop(self) -> list[list[Node]]:
        """Stop watching and hand over what was seen.

        Raises:
            UserError: the callback failed; the pass's logits are right, the record is not complete.
        """
        self.active = False
        if self.problem:
            raise UserError(f"an operation could not be watched: {self.problem}")
        return self.graphs

    def _called(self, pointer: Any, ask: bool, _: Any) -> bool:
        # An exception must not travel through native frames: it is kept and raised by stop().
        if not self.active:
            return not ask
        try:
            address = int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
            tensor = GGMLTensor.from_address(address)
            op = self._base.ggml_op_name(tensor.op).decode()
            if not ask:
                self._collect(address, tensor, op)
            elif op in FUSED_OPS:
                self._collect(address, tensor, op, seen=False)
                return False
            else:
                return op not in VIEW_OPS
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
        return True

    def _collect(self, address: int, tensor: GGMLTensor, op: str, *, seen: bool = True) -> None:
        name = tensor.name.decode(errors="replace")
        if self._first is None or name == self._first:
            self._first = name
            self.graphs.append([])
        kind = self._base.ggml_type_name(tensor.type).decode()
        sources = tuple(self._root(int(s)) for s in tensor.src if s)
        weight = GGMLTensor.from_address(int(tensor.src[0])) if tensor.src[0] else None
        is_weight = weight is not None and weight.op == 0 and weight.name.endswith(b".weight")
        self.graphs[-1].append(
            Node(
                name=name,
                op=op,
                type=kind,
                shape=tuple(int(n) for n in tensor.ne),
                address=address,
                root=self._root(address),
                sources=sources,
                weight=weight.name.decode(errors="replace") if is_weight and weight is not None else "",
                weight_type=self._base.ggml_type_name(weight.type).decode() if weight is not None else "",
                buffer=self._buffer(weight) if weight is not None else "",
                bits=self._bits(address, tensor, kind) if seen else None,
            )
        )

    def _buffer(self, tensor: GGMLTensor) -> str:
        return self._base.ggml_backend_buffer_name(tensor.buffer).decode() if tensor.buffer else ""

    def _root(self, address: int) -> int:
        tensor = GGMLTensor.from_address(address)
        for _ in range(16):
            if tensor.view_src:
                address = int(tensor.view_src)
            elif self._base.ggml_op_name(tensor.op).decode() in VIEW_OPS and tensor.src[0]:
                address = int(tensor.src[0])
            else:
                break
            tensor = GGMLTensor.from_address(address)
        return address

    def _bits(self, address: int, tensor: GGMLTensor, kind: str) -> npt.NDArray[Any] | None:
        if kind not in _DTYPES or tensor.op == 0:
            return None
        dtype, size = _DTYPES[kind]
        count = int(self._base.ggml_nbytes(address))
        if tensor.view_src and GGMLTensor.from_address(int(tensor.view_src)).op == 0:
            return None  # written into a leaf (the KV cache): compared through what was written, not as a whole
        blob = np.empty(count, np.uint8)
        self._base.ggml_backend_tensor_get(address, blob.ctypes.data, 0, count)
        shape = tuple(int(n) for n in reversed(tensor.ne))
        strides = tuple(int(n) for n in reversed(tensor.nb))
        if strides[-1] != size:
            return None
        view: npt.NDArray[Any] = np.lib.stride_tricks.as_strided(blob.view(dtype), shape, strides)
        return np.ascontiguousarray(view)
