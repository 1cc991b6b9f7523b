"""hiraishin: why speculative decoding changes greedy output in llama.cpp, and how to make it exact.

The package is what the notebooks and the command line call. A verb's code is found by its name:
``replay`` in ``replay.py``, ``evaluate`` in ``evaluate.py``, and so on; ``paths.py`` knows every folder.
"""

__version__ = "0.1.0"
