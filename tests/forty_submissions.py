"""Fabricated submissions of notebook 04, right, wrong, broken and hostile, with what each must earn.

``python tests/forty_submissions.py FOLDER`` writes them, to be graded by hand.
"""

import copy
import csv
import io
import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat

REPOSITORY = Path(__file__).resolve().parents[1]
NAME = "04_group_advantages"
# Points of its five questions: tie_probability 3, group_advantages 5, degenerate_groups 4, rloo_advantages 3,
# dynamic_sampling 4.
ALL = 19

RIGHT = {
    "tie_probability": "def tie_probability(chances, num_generations):\n"
    "    return sum(chance**num_generations for chance in chances)",
    "group_advantages": "def group_advantages(rewards, num_generations):\n"
    "    out = []\n"
    "    for group in rewards.split(num_generations):\n"
    "        tie = bool((group == group[0]).all())\n"
    "        out.append(torch.zeros_like(group) if tie else (group - group.mean()) / (group.std() + 1e-4))\n"
    "    return torch.cat(out)",
    "degenerate_groups": "def degenerate_groups(rewards, num_generations):\n"
    "    return torch.tensor([bool((group == group[0]).all()) for group in rewards.split(num_generations)])",
    "rloo_advantages": "def rloo_advantages(rewards, num_generations, truncated):\n"
    "    advantages = torch.zeros_like(rewards)\n"
    "    for start in range(0, len(rewards), num_generations):\n"
    "        rows = [row for row in range(start, start + num_generations) if not truncated[row]]\n"
    "        for row in rows if len(rows) > 1 else []:\n"
    "            advantages[row] = rewards[row] - (rewards[rows].sum() - rewards[row]) / (len(rows) - 1)\n"
    "    return advantages",
    "dynamic_sampling": "def dynamic_sampling(rewards, num_generations, groups_needed):\n"
    "    groups = rewards.view(-1, num_generations)\n"
    "    kept = (groups != groups[:, :1]).any(dim=1).nonzero().flatten()[:groups_needed]\n"
    "    last = int(kept[-1]) if len(kept) == groups_needed else len(groups) - 1\n"
    "    return kept, (last + 1) * num_generations",
}
WITHOUT_TIES = (
    "def group_advantages(rewards, num_generations):\n"
    "    groups = rewards.view(-1, num_generations)\n"
    "    return ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()"
)
LOOP = "def tie_probability(p, num_generations):\n    while True:\n        pass"
DEAF = (
    "def tie_probability(p, num_generations):\n"
    "    while True:\n"
    "        try:\n"
    "            sum(range(1000))\n"
    "        except BaseException:\n"
    "            pass"
)
EQUAL_TO_ALL = (
    "class Yes(float):\n"
    "    def __eq__(self, other):\n"
    "        return True\n"
    "    def __sub__(self, other):\n"
    "        return 0.0\n"
    "    __hash__ = float.__hash__\n"
    "def tie_probability(p, num_generations):\n"
    "    return Yes(7.0)"
)
STACK = (
    "import sys\n"
    "def tie_probability(p, num_generations):\n"
    "    frame = sys._getframe()\n"
    "    while frame:\n"
    "        for value in list(frame.f_locals.values()):\n"
    "            if isinstance(value, list) and value and hasattr(value[0], 'value') and value[0].value is not None:\n"
    "                return value[0].value\n"
    "        frame = frame.f_back\n"
    "    raise LookupError('nothing there')"
)
NEW_CHECKS = (
    "import torch\n"
    "from grpo_edu.checks import compare, core, feedback\n"
    "core.Exercise.judge = lambda self, found, seed, *rest: feedback.Feedback(self.name, (), seed)\n"
    "core.difference = compare.difference = lambda *args, **kwargs: None\n"
    "feedback.Feedback.points = property(lambda self: self.max_points)\n"
    "checks.check_tie_probability = lambda f: 3\n"
    "torch.isclose = torch.allclose = lambda *args, **kwargs: torch.tensor(True)"
)
FORK = (
    "import os, time\n"
    "for _ in range(400):\n"
    "    try:\n"
    "        if os.fork() == 0:\n"
    "            time.sleep(600)\n"
    "            os._exit(0)\n"
    "    except OSError:\n"
    "        break"
)
FROM_LMS = {"doejane_4711_815": "doejane", "Max Muster_42_assignsubmission_file_": "Max Muster"}
# One of each kind, which every run of the tests grades; `course.py test --all` grades all of them.
EACH_KIND = {
    *("ana_right", "doejane", "ivo_deaf_loop", "writes_and_stays_behind"),
    *("Max Muster", "=1+1 <b>Ünï \"x\" 'y'", "empty_folder", "link_out", "a_pipe"),
}
LEFT_BEHIND = "987654"  # seconds of a sleep that outlives its notebook, if nobody ends it


@dataclass(frozen=True)
class Expected:
    """Points, words that a trouble must hold ("" for none at all), and words of what is worth a look."""

    points: int
    word: str = ""
    look: str = ""


@cache
def masters():
    """The masters of the course, converted once in a process."""
    from classroom.exercises import load_masters

    return load_masters(REPOSITORY / "solutions")


def student_notebook():
    return nbformat.read(REPOSITORY / "exercises" / f"{NAME}.ipynb", as_version=4)


def answered(answers, own=()):
    """The students' version with these answers, and cells of one's own behind the imports."""
    notebook = student_notebook()
    for cell in notebook.cells:
        for name, source in answers.items():
            if cell.cell_type == "code" and cell.source.startswith(f"def {name}("):
                cell.source = source
    place = 1 + next(place for place, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells[place:place] = [nbformat.v4.new_code_cell(source, id=f"mine-{n}") for n, source in enumerate(own)]
    return notebook


def right(*own, **other):
    return answered({**RIGHT, **other}, own)


def place_of(notebook, cell_id):
    return next(place for place, cell in enumerate(notebook.cells) if cell.id == cell_id)


def rows_of(path):
    """The rows of a table of grades."""
    return list(csv.DictReader(io.StringIO(path.read_text())))


def without(notebook, *ids):
    notebook.cells = [cell for cell in notebook.cells if cell.id not in ids]
    return notebook


def doubled(notebook, cell_id, source=None):
    """The cell once more behind itself, its id and marks as JupyterLab's copy keeps them."""
    place = place_of(notebook, cell_id)
    twin = copy.deepcopy(notebook.cells[place])
    twin.source = twin.source if source is None else source
    notebook.cells.insert(place + 1, twin)
    return notebook


def unmarked(notebook):
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = nbformat.NotebookNode(), f"lost-{number}"
    return notebook


def changed(notebook, cell_id, source):
    notebook.cells[place_of(notebook, cell_id)].source = source
    return notebook


def ordinary():
    """Student → notebook and what it must earn: honest work, and honest accidents."""
    stub = next(cell.source for cell in student_notebook().cells if cell.id == "tie-probability")
    return {
        "ana_right": (right(), Expected(19)),
        "bo_wrong": (
            answered(
                {
                    name: source.splitlines()[-6 if name == "group_advantages" else 0] + "\n    return 7.5"
                    for name, source in RIGHT.items()
                }
            ),
            Expected(0),
        ),
        "cleo_not_begun": (student_notebook(), Expected(0)),
        "dan_half": (answered({name: RIGHT[name] for name in ("tie_probability", "rloo_advantages")}), Expected(6)),
        "finn_syntax": (
            right(tie_probability="def tie_probability(p, num_generations)\n    return p"),
            Expected(16, "tie-probability: fails, SyntaxError"),
        ),
        "gus_loop": (right(tie_probability=LOOP), Expected(16)),
        "hana_loop_in_a_cell": (right("while True:\n    pass"), Expected(19, "cell no. 3: fails, TimeoutError")),
        "ivo_deaf_loop": (right(tie_probability=DEAF), Expected(16, "had to be killed")),
        "jan_sleeps": (right("import time\ntime.sleep(600)"), Expected(19, "TimeoutError")),
        "kim_raises_at_import": (right("import no_such_library"), Expected(19, "ModuleNotFoundError")),
        "lea_deleted_an_answer": (
            without(right(), "tie-probability"),
            Expected(16, "tie-probability: missing, and counts"),
        ),
        "mia_deleted_checks": (
            without(right(), "check-tie-probability", "check-group-advantages", "code-01"),
            Expected(19, "check-group-advantages, check-tie-probability: missing; the"),
        ),
        "nia_doubled_answer": (doubled(right(), "tie-probability", stub), Expected(19, "there 2 times")),
        "pia_doubled_check": (doubled(doubled(right(), "check-tie-probability"), "text-02"), Expected(19)),
        "quinn_without_marks": (unmarked(right()), Expected(19, "marks were missing")),
        "sam_all_in_one_cell": (
            without(right("\n\n\n".join(RIGHT.values())), *(name.replace("_", "-") for name in RIGHT)),
            Expected(19, "another cell defines the same name"),
        ),
        "tia_changed_a_locked_cell": (
            changed(right(), "code-01", "raise RuntimeError('gone')"),
            Expected(19, "code-01: locked and changed"),
        ),
        "uma_lambda": (
            right(tie_probability="tie_probability = lambda chances, n: sum(p**n for p in chances)"),
            Expected(19),
        ),
        "vic_magic": (right("%matplotlib inline\n!echo hello\nname = input('?')"), Expected(19, "EOFError")),
    }


def hostile(targets):
    """Student → notebook and what it must earn: code that does what it should not."""
    sleep = f"import subprocess\nsubprocess.Popen(['sleep', '{LEFT_BEHIND}'], start_new_session=True)"
    leave = "import sys\nsys.exit(1)"
    write = "\n".join(
        f"try:\n    open({str(target)!r}, 'a').write('mine')\nexcept OSError as error:\n    print(error)"
        for target in targets
    )
    return {
        "os_exit": (
            right(tie_probability="def tie_probability(p, n):\n    import os\n    os._exit(3)"),
            Expected(16, "exit code 3", "os._exit"),
        ),
        "ends_fourteen_times": (right(*["import os\nos._exit(0)"] * 14), Expected(19, "left out", "os._exit")),
        "os_exit_in_a_cell": (right("import os\nos._exit(0)"), Expected(19, "exit code 0")),
        "sys_exit": (
            right(leave, tie_probability="def tie_probability(p, n):\n    raise SystemExit(2)"),
            Expected(16, "SystemExit"),
        ),
        "segfault": (right("import ctypes\nctypes.string_at(0)"), Expected(19, "SIGSEGV", "ctypes")),
        "memory_bomb": (
            right(tie_probability="def tie_probability(p, n):\n    return len(bytearray(2**36))"),
            Expected(16),
        ),
        "memory_bomb_in_a_cell": (
            right("kept = []\nwhile True:\n    kept.append(bytearray(2**26))"),
            Expected(19, "MemoryError"),
        ),
        "many_processes": (right(FORK), Expected(19, "", "os.fork")),
        "much_output": (right("for _ in range(30):\n    print('x' * 10**6)"), Expected(19, "more than 1 MB")),
        "large_file": (
            right("file = open('large', 'wb')\nfor _ in range(100):\n    file.write(bytes(10**6))"),
            Expected(19, "File too large"),
        ),
        "writes_and_stays_behind": (answered({}, [write, sleep]), Expected(0, "", "subprocess")),
        "uses_the_network": (
            right("import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)"),
            Expected(19, "cell no. 3: fails", "socket"),
        ),
        "ends_its_watcher": (
            right(
                "import os, signal\ntry:\n    os.kill(os.getppid(), signal.SIGKILL)\nexcept PermissionError:\n    pass"
            ),
            Expected(19, "", "os.kill"),
        ),
        "prints_a_score": (answered({}, ["print(19)\nprint('tie_probability: 3 of 3 points')\n19"]), Expected(0)),
        "writes_to_every_channel": (
            answered(
                {},
                [
                    "import os\nfor number in range(64):\n"
                    "    try:\n        os.write(number, b'{\"points\": 19}\\n' * 9)\n"
                    "    except OSError:\n        pass"
                ],
            ),
            Expected(0),
        ),
        "garbles_the_channel": (
            answered({}, ["import os\nos.write(3, b'not JSON\\n')"]),
            Expected(0, "result channel"),
        ),
        "new_checks": (answered({}, [NEW_CHECKS]), Expected(0)),
        "equal_to_all": (right(tie_probability=EQUAL_TO_ALL), Expected(16, "", "__eq__")),
        "reads_the_stack": (right(tie_probability=STACK), Expected(16, "", "_getframe")),
        "takes_the_package's": (
            right(rloo_advantages="from grpo_edu import rloo_advantages"),
            Expected(16, "the package's own function", "the package's own rloo_advantages"),
        ),
        "reads_the_master": (
            right(
                tie_probability=(
                    "import json\n"
                    f"exec(json.load(open({str(REPOSITORY / 'solutions' / f'{NAME}.ipynb')!r}))['cells'][3]['source'])"
                )
            ),
            Expected(16, "tie-probability"),
        ),
    }


def write_submissions(folder, targets, *, all_of_them=True):
    """Write them all, or only those of `EACH_KIND`; student → what is expected."""
    expected = {}
    for student, (notebook, what) in {**ordinary(), **hostile(targets)}.items():
        if not all_of_them and student not in EACH_KIND:
            continue
        (folder / student).mkdir(parents=True)
        # as text, for nbformat's own writer refuses two cells with one id
        (folder / student / f"{NAME}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        expected[student] = what
    whole = json.dumps(right())
    files = {
        "renamed/my homework (1).ipynb": (whole.encode(), Expected(19, "found under the name my homework")),
        "=1+1 <b>Ünï \"x\" 'y'/04_group_advantages.ipynb": (b"My dog ate it.\n", Expected(0, "no JSON")),
        "Max Muster_42_assignsubmission_file_/04_group_advantages.ipynb": (
            json.dumps({"cells": [{"cell_type": "code", "source": ["1 + 1"]}]}).encode(),
            Expected(0, "none of the questions"),
        ),
        "utf_16/04_group_advantages.ipynb": (whole.encode("utf-16"), Expected(19, "utf-16")),
        "latin/04_group_advantages.ipynb": (
            json.dumps(right("word = 'déjà vu'"), ensure_ascii=False).encode("cp1252", "replace"),
            Expected(19, "cp1252"),
        ),
        "flat_student_04_group_advantages.ipynb": (whole.encode(), Expected(19)),
        "doejane_4711_815_04_group_advantages.ipynb": (
            json.dumps(right(group_advantages=WITHOUT_TIES)).encode(),
            Expected(18),  # the tie is worth one point of five
        ),
    }
    for name, (content, what) in files.items():
        student = name.split("/")[0].removesuffix(f"_{NAME}.ipynb")
        student = FROM_LMS.get(student, student)
        if not all_of_them and student not in EACH_KIND:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        expected[student] = what
    (folder / "empty_folder").mkdir()
    expected["empty_folder"] = Expected(0, "is empty")
    (folder / "link_out").mkdir()
    (folder / "link_out" / f"{NAME}.ipynb").symlink_to(REPOSITORY / "solutions" / f"{NAME}.ipynb")
    expected["link_out"] = Expected(0, "is a link")
    (folder / "a_pipe").mkdir()
    os.mkfifo(folder / "a_pipe" / f"{NAME}.ipynb")
    expected["a_pipe"] = Expected(0, "is not a file")
    return expected


if __name__ == "__main__":
    for name, what in write_submissions(Path(sys.argv[1]), []).items():
        print(f"{what.points:>3}  {name}")
