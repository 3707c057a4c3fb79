"""Attacks on the grader, and accidents that would stop a class, with what each submission must earn.

``python tests/attacks.py FOLDER`` writes them, to be graded by hand.
"""

import json
import os
import sys
from pathlib import Path

from forty_submissions import NAME, REPOSITORY, RIGHT, Expected, answered, right

SECRET = "CANARY-"  # every secret of the instructor begins so
MARK = "987653"  # seconds of a sleep that outlives its notebook, if nobody ends it

SEARCH = f"""
import os
found = []
for top, folders, files in os.walk("/"):
    if top.startswith(("/usr/", "/sys/", "/dev", "/proc/fs", "/proc/sys", "/proc/bus")) or "/python3." in top:
        folders.clear()
        continue
    if top.startswith("/proc/"):
        folders.clear()
        files = ["cmdline", "environ", "maps"]
    for name in files:
        try:
            with open(os.path.join(top, name), "rb") as file:
                text = file.read(2**16)
        except OSError:
            continue
        for word in ({SECRET!r}.encode(), b"BEGIN SOL" + b"UTION"):
            if word in text:
                found.append(str(text[text.index(word):][:60]))
raise ValueError(" ".join(found) or "nothing is there")
"""
REFERENCE = """
import importlib
def stolen(name):
    known = importlib.import_module("grpo" + "_edu.checks").exercises()
    return known[name].reference
tie_probability = stolen("tie_probability")
"""
TOPIC = """
import importlib
topic = importlib.import_module("grpo" + "_edu.checks.group_adv" + "antages")
tie_probability = lambda *args: topic.tie_probability(*args)
"""
MASTER = f"""
import glob, json
places = ["source/*/*.ipynb", "../source/*/*.ipynb", "*.ipynb", "{REPOSITORY.parent}/**/*.ipynb", "/home/**/*.ipynb"]
for place in places:
    for path in glob.glob(place, recursive=True):
        for cell in json.load(open(path))["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]))
assert tie_probability([0.5, 0.5], 2) == 0.5
"""
DEAF = """
import signal
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
while True:
    pass
"""
DAEMON = f"""
import os, subprocess
for command in (["sleep", "{MARK}"], ["sh", "-c", "kill -STOP $$; sleep {MARK}"]):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp(command[0], command)
        os._exit(0)
"""
SYSTEM_V = """
import ctypes
libc, ring = ctypes.CDLL(None, use_errno=True), (ctypes.c_char * 120)()
kept = [libc.shmget(0x6772706F, 2**20, 0o1600 | 0o666), libc.semget(0, 32000, 0o600), libc.msgget(0, 0o600)]
kept.append(libc.syscall(425, 4096, ring))  # a ring of io_uring
open("/dev/shm/grpo_attack", "w").write("left")
open("/tmp/grpo_attack", "w").write("left")
raise ValueError(f"kept {kept}")
"""
FILL = """
try:
    for number in range(100):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(bytes(40 * 2**20))
except OSError as error:
    print(error)
    raise
"""
MOUNTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
gained = [name for name, call in {
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "remount": lambda: libc.mount(None, b"/usr", None, 32 | 4096, None),
    "chroot": lambda: libc.chroot(b"/tmp"),
    "setuid": lambda: libc.setuid(0) or (os.getuid() == 0 and -1),
    "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
}.items() if call() == 0]
raise ValueError(f"gained {gained}")
"""
UNSHARES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
user, mounts, clone, clone3, new = 1 << 28, 1 << 17, (56, 220), 435, (ctypes.c_ulong * 8)(1 << 28)
calls = {
    "unshare": lambda: libc.unshare(user),
    "unshare with mounts": lambda: libc.unshare(user | mounts),
    "clone": lambda: libc.syscall(clone["aarch64" in os.uname().machine], user | 17, None, None, None, None),
    "clone3": lambda: libc.syscall(clone3, new, ctypes.c_size_t(64)),
    "tmpfs": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
}
gained = []
for name, call in calls.items():
    process = os.fork()
    if process == 0:
        os._exit(call() >= 0)
    gained += [name] if os.waitpid(process, 0)[1] else []
raise ValueError(f"gained {gained}")
"""
# More than --memory of 0.5 GB, in files of which each is within the limit of a file.
MEMORY_FILES = """
import os
kept, part = [], bytes(40 * 2**20)
for number in range(20):
    kept.append(os.memfd_create("kept"))
    os.write(kept[-1], part)
"""
KEYS = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
add, request, control = (217, 218, 219) if os.uname().machine == "aarch64" else (248, 249, 250)
session = -3
gained = [name for name, numbers in {
    "adds a key": (add, b"user", b"grpo_attack", b"left", 4, session),
    "asks for a key": (request, b"user", b"grpo_attack", None, session),
    "finds the session's keys": (control, 0, session, 1, 0, 0),
    "reads them": (control, 11, session, ctypes.create_string_buffer(99), 99, 0),
    "leaves the session": (control, 1, None, 0, 0, 0),
}.items() if libc.syscall(*numbers) >= 0]
for family in (40, 38, 17, 29, 21):  # of virtual machines, ciphers, packets, CAN, RDS
    try:
        socket.socket(family, socket.SOCK_SEQPACKET if family == 38 else socket.SOCK_STREAM)
        gained.append(f"socket {family}")
    except OSError as error:
        gained += [] if error.errno == 97 else [f"{error} of socket {family}"]
pair = socket.socketpair()
raise ValueError(f"gained {gained}")
"""
# The names of the keys of whoever grades.
KEY_NAMES = """
import os
found = []
for name in ("keys", "key-users"):
    try:
        found.append(open(f"/proc/{name}").read())
    except OSError:
        pass
raise ValueError(f"found {found}")
"""
# As many values of a kind of their own as 4 MB hold, each of which would be a class in the grader.
KINDS = """
def tie_probability(p, num_generations):
    import os, sys
    frame = sys._getframe()
    while "task" not in frame.f_locals:
        frame = frame.f_back
    task, calls = frame.f_locals["task"], frame.f_locals["calls"]
    kinds = ",".join('{"other":["%d",""]}' % number for number in range(2250))
    value = '{"list":[' + ",".join(['{"list":[' + kinds + ']}'] * 11) + ']}'
    left = 2**22 - 2**16
    for place, (kind, name, _) in enumerate(task["steps"]):
        for part, inputs in enumerate(calls[name] if kind == "ask" else ()):
            given = ['[' + value + ', "", "", false]'] + ['[0, "", "", false]'] * (len(inputs) - 1)
            line = ('{"answer": [%d, %d], "outcomes": [' % (place, part) + ",".join(given) + "]}\\n").encode()
            left -= len(line)
            while line and left > 0:
                line = line[os.write(3, line):]
    os._exit(0)
"""
DONE = 'import os, time\nos.write(3, b\'{"done": true}\\n{"end": 0}\\n\')\ntime.sleep(1000)'
# Errors whose texts do not end, or end Python.
ODD_ERRORS = [
    f"class Odd(Exception):\n    def __str__(self):\n        {does}\nraise Odd"
    for does in ("while True: pass", "raise SystemExit(3)")
]
PATCHES = """
import atexit, fcntl, os, sys, threading
import classroom.student as own, classroom.values as values
for module in (own, sys.modules["__main__"]):
    module.encode = values.encode = lambda value, depth=0: {"tensor": ["bool", [1], "AQ=="]}
    module._function = lambda names, name: ((lambda *args, **kwargs: 1.0), "")
atexit.register(lambda: os.write(3, b"{}\\n"))
fcntl.fcntl(3, fcntl.F_SETFL, os.O_WRONLY | os.O_NONBLOCK | os.O_ASYNC)
fcntl.fcntl(3, 1031, 4096)  # F_SETPIPE_SZ
fcntl.fcntl(3, fcntl.F_SETOWN, 1)
def flood():
    while True:
        try:
            os.write(3, b'{"at": [0, -1]}\\n' * 200)
        except BlockingIOError:
            pass
threading.Thread(target=flood, daemon=True).start()
"""
TERMINALS = """
import fcntl, os
kept = [os.open("/dev/ptmx", os.O_RDWR) for _ in range(100)]
fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)
raise ValueError("x;=4+4")
"""
WRITE = """
import os, sys, torch, grpo_edu
opened = []
modules = (torch.__file__, grpo_edu.__file__, os.__file__)
for path in (*modules, sys.executable, "/usr/bin/env", "/etc/passwd", "/new", "/dev/new"):
    try:
        open(path, "ab").close()
        opened.append(path)
    except OSError:
        pass
raise ValueError(f"opened {opened}")
"""
FORGED = """
import json, os
for place in range(40):
    for part in range(6):
        for tries in range(1, 40):
            value = [{"tensor": ["bool", [1], "AQ=="]}, "", "", False]
            line = {"answer": [place, part], "outcomes": [value] * tries, "points": 19}
            os.write(3, json.dumps(line).encode() + b"\\n")
"""


# What is left of reading the files: nothing but the input, the output and the channel, in no process that one may see.
LOOKS_BACK = """
import ctypes, gc, os
libc = ctypes.CDLL(None, use_errno=True)
found = [name for name in os.listdir("/proc/self/fd") if int(name) > 3 and os.path.exists(f"/proc/self/fd/{name}")]
found += [] if os.read(0, 10) == b"" else ["the input"]
try:
    found.append(os.listdir("/proc/1/fd"))
except PermissionError:
    pass
first = libc.syscall(434, 1, 0)  # pidfd_open
found += ["a file of the first process"] if libc.syscall(438, first, 4, 0) >= 0 else []  # pidfd_getfd
found += [one[:40] for one in gc.get_objects() if isinstance(one, str) and "Rubric" in one]
raise ValueError(f"found {found}")
"""
READ_AGAIN = """
import json, os
cells = [{"cell_type": "code", "source": "raise SystemExit", "id": "mine", "metadata": {}}]
read = {"master": "04_group_advantages", "file": "x", "cells": cells, "troubles": [], "looks": [], "open_answers": {}}
line = json.dumps({"read": {"troubles": ["forged"], "notebooks": [{**read, "steps": []}]}})
os.write(3, line.encode() + b"\\n")
"""
# In place of a right notebook's first own cell, or of the whole file: what took minutes, or all memory, to read.
CELLS = {
    "blanks": f"{' ' * 262_000}\nx\n)",
    "commas": f"x{' ,' * 120_000}\n)",
    "links": f"a{'.b' * 900}\n" * 140,
    "brackets": "(" * 200_000,
    "signs": "-" * 200_000 + "1",
}


def _with_ids(*ids):
    """A right notebook with cells that have these ids."""
    notebook = json.loads(json.dumps(right(*["pass"] * len(ids))))
    own = [cell for cell in notebook["cells"] if cell["source"] == "pass"]
    for cell, cell_id in zip(own, ids, strict=True):
        cell["id"] = cell_id
    return json.dumps(notebook)


def write_odd_files(folder):
    """Write files that are hard to read, and right answers in them; student → what is expected."""
    whole, long = json.dumps(right()), "A" * 50
    files = {
        "same_ids": (_with_ids(long, f"{long}-2", f"{long}-3", f"{long}-4", long), Expected(19)),
        "deep_lists": ('{"cells": ' + "[" * 5_000_000, Expected(0, "no JSON")),
        "long_number": ('{"cells": [' + "9" * 5_000_000 + "]}", Expected(0, "no JSON")),
        "many_lines": (json.dumps({"cells": [{"source": [""] * 5_000_000}]}), Expected(0, "none of the questions")),
        "control_characters": (json.dumps(right(*["'" + "\x07" * 262_000 + "'"] * 7)), Expected(19, "more than 1 MB")),
        "smileys": (json.dumps(right(*["# " + "\U0001f600" * 250_000] * 7)), Expected(19, "256 kB")),
        "null_bytes": (whole.replace("import torch", "import torch\\u0000"), Expected(19)),
    }
    files |= {name: (json.dumps(right(cell)), Expected(19, "cell no. 3: fails")) for name, cell in CELLS.items()}
    for student, (text, _) in files.items():
        _write(folder / student / f"{NAME}.ipynb", text)
    for number in range(60):
        _write(folder / "sixty_files" / f"{number}.ipynb", whole)
    return {student: what for student, (_, what) in files.items()} | {"sixty_files": Expected(19, "50 files hold it")}


def write_unreadable(folder):
    """Write files whose reading takes more time or memory than a student has; student → what is expected."""
    dense = [{"cell_type": "code", "source": f"a = {number}\n" + "x = f(1)\n" * 25_000} for number in range(8)]
    for number in range(6):
        _write(folder / "takes_time" / f"{number}.ipynb", json.dumps({"cells": dense}).replace("f(1)", f"f({number})"))
    _write(folder / "takes_memory" / f"{NAME}.ipynb", '{"cells": [' + "{}," * 10_000_000 + "{}]}")
    (folder / "takes_nothing").mkdir()
    with (folder / "takes_nothing" / f"{NAME}.ipynb").open("wb") as file:
        file.truncate(64 * 2**20)  # of which nothing is on the disk
    found = {"takes_time": "had to be killed", "takes_memory": "too large to be read", "takes_nothing": "no JSON"}
    return {student: Expected(0, word) for student, word in found.items()}


def raw(text):
    """A cell that writes a line to the way on which answers are sent."""
    return answered({}, [f"import os\nos.write(3, {text!r}.encode() + b'\\n')"])


# What functions may return instead of numbers.
ODD_VALUES = {
    "tie_probability": "def tie_probability(p, num_generations):\n    return type('', (), {})()",
    "group_advantages": "def group_advantages(rewards, num_generations):\n    return 10**4000",
    "degenerate_groups": "def degenerate_groups(rewards, num_generations):\n    return float('inf')",
    "rloo_advantages": (
        "def rloo_advantages(rewards, num_generations, truncated):\n"
        "    x = []\n    for _ in range(500): x = [x]\n    return x"
    ),
}


def attacks(port):
    """Student → notebook and what it must earn."""
    stops = "import os, signal\nfor number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGINT):\n"
    stops += "    try:\n        os.kill(os.getppid(), number)\n    except PermissionError:\n        pass"
    connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"
    long = '{"cell": 2, "error": "' + "x" * 5_000_000 + '"}'
    garbled = Expected(0, "result channel")
    in_a_row = "from grpo_edu import " * 12_000
    return {
        "takes_references": (answered({}, [REFERENCE]), Expected(0, "KeyError")),  # there are no topics
        "takes_a_topic": (answered({}, [TOPIC]), Expected(0, "ModuleNotFoundError")),
        "takes_masters": (answered({}, [MASTER]), Expected(0, "fails")),
        "searches_for_secrets": (right(SEARCH), Expected(19, "nothing is there")),
        "raises_the_environment": (right("import os\nraise ValueError(dict(os.environ))"), Expected(19, "ValueError")),
        "ends_everything": (right("import os\nos.kill(-1, 9)"), Expected(19)),
        "stops_its_parent": (right(stops), Expected(19)),
        "stops_itself": (
            right("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
            Expected(19, "had to be killed"),
        ),
        "leaves_daemons": (right(DAEMON), Expected(19)),
        "leaves_memory": (right(SYSTEM_V), Expected(19, "kept [-1, -1, -1, -1]")),
        "fills_the_disk": (right(FILL), Expected(19, "No space left")),
        "mounts": (right(MOUNTS), Expected(19, "gained []")),
        "looks_back": (right(LOOKS_BACK), Expected(19, "found []")),
        "reads_again": (right(READ_AGAIN), Expected(19)),
        "takes_keys": (right(KEYS), Expected(19, "gained []")),
        "names_of_keys": (right(KEY_NAMES), Expected(19, "found []")),
        "many_kinds": (right(tie_probability=KINDS.strip()), Expected(7, "exit code 0")),
        "lies_that_it_is_done": (right(DONE), Expected(0)),
        "odd_errors": (right(*ODD_ERRORS), Expected(19, "cell no. 4: left out")),
        "patches": (answered({}, [PATCHES]), Expected(0)),
        "terminals": (right(TERMINALS), Expected(19, "x;=4+4")),
        "unshares": (right(UNSHARES), Expected(19, "gained []")),
        "memory_files": (right(MEMORY_FILES), Expected(19, "PermissionError")),
        "writes_to_libraries": (right(WRITE), Expected(19, "opened []")),
        "connects": (right(connect), Expected(19, "refused")),
        "deaf_to_alarms": (right(DEAF), Expected(19, "had to be killed")),
        "closes_the_channel": (right("import os\nos.close(3)"), Expected(19, "exit code 1")),
        "forges_answers": (answered({}, [FORGED]), Expected(0)),
        "odd_values": (right(**ODD_VALUES), Expected(4)),  # one right answer, to the fifth question
        "says_too_large_a_number": (raw('{"at": [' + "9" * 9000 + ", 0]}"), garbled),
        "says_depth": (raw("[" * 100_000), garbled),
        "says_5_MB": (raw(long), Expected(0)),
        "surrogates": (
            right("word = '\ud800'", "raise ValueError('\\ud800 \\x1b[2J\\x1b]0;mine\\x07')"),
            Expected(19, "ValueError: ?"),
        ),
        "long_comments": (right(f"# {in_a_row}", "# from grpo_edu import x " * 50_000), Expected(19, "left out")),
        "own_check_call": (
            right(
                rloo_advantages=RIGHT["rloo_advantages"] + "\n\nchecks.check_rloo_advantages(rloo_advantages).grade()"
            ),
            Expected(19),
        ),
    }


def write_attacks(folder, port):
    """Write them all, and files that are themselves the attack; label of a student → what is expected."""
    expected = {}
    for student, (notebook, what) in attacks(port).items():
        _write(folder / student / f"{NAME}.ipynb", json.dumps(notebook))
        expected[student] = what
    whole, untouched = json.dumps(right()), json.dumps(answered({}))
    for student, name, text, what in (
        ("neighbor", f"{NAME}.ipynb", json.dumps(right(f"# {SECRET}of a neighbor")), Expected(19)),
        ("untouched_next_to_worked", f"{NAME}.ipynb", untouched, Expected(19, "2 files hold it")),
        ("untouched_next_to_worked", f"{NAME}-Copy1.ipynb", whole, Expected(19, "2 files hold it")),
        (".begins_with_a_dot", f"{NAME}.ipynb", whole, Expected(19)),
        ("\U0001f600" * 62, f"{NAME}.ipynb", whole, Expected(19)),
        ("evil\n\x1b[31mname", f"{NAME}.ipynb", whole, Expected(19)),
        ("windows", f"{NAME}.ipynb", json.dumps(right()).replace("\\n", "\\r\\n"), Expected(19)),
        ("many_cells", f"{NAME}.ipynb", json.dumps({"cells": [{}] * 100_000}), Expected(0, "cells")),
        ("many_pictures", f"{NAME}.ipynb", json.dumps(_with_pictures(right())), Expected(19)),
        ("Ana M_77_assignsubmission_file_", f"{NAME}.ipynb", whole, Expected(19)),
        ("Ana M_78_assignsubmission_file_", f"{NAME}.ipynb", untouched, Expected(0)),
        # Students who would be another.
        ("Ana M_77_assignsubmission_file__79_assignsubmission_file_", f"{NAME}.ipynb", untouched, Expected(0)),
        ("Bo x", f"{NAME}.ipynb", whole, Expected(19)),
        ("Bo\x01x", f"{NAME}.ipynb", untouched, Expected(0)),
        ("\uff1d1+1", f"{NAME}.ipynb", whole, Expected(19)),
        ("ana;=1+1", f"{NAME}.ipynb", whole, Expected(19)),
    ):
        _write(folder / student / name, text)
        expected[LABELS.get(student, student)] = what
    for name in (b"Jos\xe9", b"Jos\xc3\xa9"):  # the same name in two encodings
        _write(folder / os.fsdecode(name) / os.fsdecode(b"L\xf6sung.ipynb"), whole)
    expected |= {"José": Expected(19, "Lösung"), "José (2)": Expected(19, "Lösung")}
    expected |= write_unreadable(folder) | write_odd_files(folder)
    (folder / "nothing_in_it").mkdir()
    expected["nothing_in_it"] = Expected(0, "is empty")
    _nest(folder / "nested_folders", 1500)
    expected["nested_folders"] = Expected(0, "folders within folders")
    return expected


LABELS = {
    "Ana M_77_assignsubmission_file_": "Ana M (77)",
    "Ana M_78_assignsubmission_file_": "Ana M (78)",
    "evil\n\x1b[31mname": "evil [31mname",
    "Ana M_77_assignsubmission_file__79_assignsubmission_file_": "Ana M_77_assignsubmission_file_ (79)",
    "Bo\x01x": "Bo x (2)",
}


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def _with_pictures(notebook):
    """With 50 MB of outputs."""
    for cell in notebook.cells[:5]:
        picture = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "A" * 10 * 2**20}}
        cell["outputs"] = [picture]
    return notebook


def _nest(folder, depth):
    """Folders within folders, deeper than a path may be long."""
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("folder", dir_fd=here)
        inner = os.open("folder", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


if __name__ == "__main__":
    for name, what in write_attacks(Path(sys.argv[1]), 9).items():
        print(f"{what.points:>3}  {name!r}")
