"""`python -m consumers.worker`: one worker, by the environment's settings."""

import sys

from consumers.worker.app import main

if __name__ == "__main__":
    sys.exit(main())
