"""``python -m tests.fuzz``: see tests/fuzz/run.py, a module of its own so that its processes can import it."""

import sys

from tests.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
