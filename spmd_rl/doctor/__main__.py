"""`python -m spmd_rl.doctor`, as launchers start it."""

import sys

from spmd_rl.doctor import main

if __name__ == "__main__":
    sys.exit(main())
