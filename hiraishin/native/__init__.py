"""From pinned sources to a working set-up: tools, virtual environment, native builds.

Everything here runs on a bare Python 3.11 (standard library only), because it is what brings the rest.

* ``tools``: which compilers and build tools there are, and the package that brings a missing one.
* ``environment``: the virtual environment from ``requirements.lock``.
* ``fetch``: one pinned file from the package index, checked against its hash.
* ``source``: the llama.cpp source, its working copy, and the patch series applied to it.
* ``cublas``: the cuBLAS of a Python package, where the CUDA toolkit has none.
* ``compile``: the stock and patched builds; ``build.sh`` is ``python -m hiraishin.native``.
"""
