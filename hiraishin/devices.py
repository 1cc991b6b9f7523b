"""Whether the loaded library sees a GPU. Imported in the child process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hiraishin.binding import load_native


def visible() -> Iterator[dict[str, Any]]:
    """Child: ``{"gpu": bool}``. A CUDA library without a driver loads, logs a line and computes on the CPU."""
    yield {"return": {"gpu": bool(load_native().llama_supports_gpu_offload())}}
