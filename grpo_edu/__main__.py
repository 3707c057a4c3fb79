"""`python -m grpo_edu` is the command `grpo-edu`."""

import os
import sys

# The command does not import from the working directory, which may hold students' files; neither does this.
if os.path.abspath(sys.path[0]) == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]

from grpo_edu.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
