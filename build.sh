#!/bin/sh
# Builds llama.cpp from the pinned source: as it is (stock) and with the patch series (patched). See ./build.sh --help.
# The work is done by hiraishin/native, which needs nothing but Python 3.11.
here=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")" && pwd -P) || exit 2
# -P: the caller's folder may be another clone, whose package must not be taken for this one.
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 PYTHONUTF8=1 \
    exec "$here/tools/python" -P -m hiraishin.native "$@"
