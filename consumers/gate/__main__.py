"""`python -m consumers.gate`: one gate, by the environment's settings."""

import sys

from consumers.gate.app import main

if __name__ == "__main__":
    sys.exit(main())
