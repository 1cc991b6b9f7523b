"""The command line of ``build.sh``."""

from __future__ import annotations

import argparse
import errno
import sys
from pathlib import Path

from hiraishin.errors import UserError
from hiraishin.native import compile as native


def parse(arguments: list[str]) -> native.Request:
    """The request that the command line makes."""
    parser = argparse.ArgumentParser(
        prog="build.sh",
        description="Builds llama.cpp from the pinned source: as it is (stock) and with the patch series (patched).",
        epilog="The libraries go to HIRAISHIN_HOME (default: .hiraishin in the clone), builds/<backend>/<name>.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="all",
        choices=(*native.BUILDS, "all"),
        help="default: all, which is stock and patched; witness is patched with a fault that tests plant",
    )
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--source", type=Path, metavar="DIR_OR_TARBALL", help="your llama.cpp instead; never modified")
    parser.add_argument("--arch", metavar="N", help="GPU architecture, such as 86 or 90; default: this machine's GPU")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at a time; default: one per core")
    parser.add_argument("--tools", action="store_true", help=f"also build {', '.join(native.TOOLS)}")
    given = parser.parse_args(arguments)
    if given.jobs is not None and given.jobs < 1:
        parser.error(f"--jobs {given.jobs}: must be 1 or more")
    if given.arch and given.backend != "cuda":
        parser.error("--arch is for --backend cuda")
    return native.Request(
        names=("stock", "patched") if given.name == "all" else (given.name,),
        backend=given.backend,
        source=given.source,
        arch=given.arch,
        jobs=given.jobs or native.default_jobs(),
        tools=given.tools,
    )


def main() -> int:
    """Exit status 0, 2 for what the user can mend, 130 after Ctrl-C."""
    try:
        native.build(parse(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror}{where}. Nothing is lost; mend that and start again.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the next call goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
