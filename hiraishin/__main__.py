"""``python -m hiraishin``."""

from hiraishin.cli import main

main()
