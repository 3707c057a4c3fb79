"""`python -m grpo_edu` is the command `grpo-edu`."""

import sys

from grpo_edu.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
