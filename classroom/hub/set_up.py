"""Set up a classroom: JupyterHub, nbgrader's exchange, the course and its users. ``python3 course.py classroom DIR``.

Run it again after a change of the roster or an upgrade of the course: what is there stays. docs/classroom.md explains
the steps and the files.
"""

import argparse
import csv
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "classroom" / "hub"
PROXY = "configurable-http-proxy@5.3.0"  # 5 needs Node.js 20
ROLES = ("instructor", "student")
SAMPLE = "name,role,first_name,last_name,email\nteacher,instructor,,,\nana,student,Ana,Muster,ana@example.org\n"
DEMO_ROSTER = "name,role,first_name,last_name,email\nteacher,instructor,,,\n"
SETTINGS = """\
# The classroom's settings. Restart the hub after a change.
ip = "127.0.0.1"    # "" lets other computers connect; then give a certificate, too
port = 8000         # the two ports behind it are used as well
certificate = ""    # files for https, such as "/etc/letsencrypt/live/NAME/fullchain.pem"
key = ""
memory_gb = 5.0     # at most, for each process of a student; notebook 14 needs 3.8, most need one
threads = 2         # with which a kernel computes: the cores that a student may use
idle_minutes = 60   # after which a server and its kernels end
"""
SECRET = ("solutions", "tests", ".git")  # of the repository: they hold the exercises' answers
# Neither page is for students; the course's account turns the formgrader on for itself.
NO_FORMGRADER = {f"nbgrader.server_extensions.{name}": False for name in ("formgrader", "course_list")}
FORMGRADER_PAGES = [f"@jupyter/nbgrader:{name}" for name in ("formgrader", "course-list", "create-assignment")]
NO_NEWS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}


STRANGER = "nobody"  # an account that every Linux has; what it can read, the accounts of the class can
HIDDEN = ("/tmp", "/home", "/root")  # from the kernel in which nbgrader runs students' notebooks
START_SECONDS = 300  # for the hub and the course's server; a busy computer takes long


class Stop(Exception):
    """Something that the instructor can fix; its text says how."""


def say(text):
    print(f"classroom: {text}", flush=True)


def run(*command, **options):
    """Run a command; stop with what it said if it fails."""
    done = subprocess.run([str(part) for part in command], text=True, capture_output=True, **options)
    if done.returncode:
        shown = " ".join(str(part) for part in command[:4])
        raise Stop(f"`{shown} …` failed with exit code {done.returncode}:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=mode)
    path.write_text(text, encoding="utf-8")


def check(folder, demo):
    """Stop where something is missing that cannot be installed from here."""
    if sys.platform != "linux":
        raise Stop(f"a classroom needs Linux, and this is {sys.platform}. Try it in a virtual machine with Debian.")
    if not demo and os.geteuid() != 0:
        raise Stop("making users needs root: `sudo python3 course.py classroom DIR`. To try it alone: add --demo.")
    if not re.fullmatch(r"[\w/.+-]+", str(folder)):
        raise Stop(f"the path {folder} has characters that JupyterHub's programs do not all support; choose another.")
    if folder.is_relative_to(ROOT) or ROOT.is_relative_to(folder):
        raise Stop(f"{folder} and the course's own folder {ROOT} must not lie inside each other; choose another DIR.")
    for program in ("node", "npm"):
        if not shutil.which(program):
            raise Stop(f"`{program}` is missing, which the hub's proxy needs. On Debian: sudo apt install nodejs npm")
    version = run("node", "--version").strip()
    if int(version.lstrip("v").split(".")[0]) < 20:
        raise Stop(f"Node.js {version} is too old: {PROXY} needs 20 or newer, which Debian 13 and Ubuntu 25.04 have.")


def needed_by_kernel():
    """Return the folders that a kernel of the course reads: the course, the interpreter, and all packages."""
    program = Path(os.path.realpath(sys.executable)).parent
    packages = [path for path in map(Path, sys.path) if path.is_dir() and path != HERE]
    return sorted({ROOT, Path(sys.prefix), Path(sys.base_prefix), program, *packages})


def as_user(name):
    """Return how `subprocess` starts a program as this user; as whoever runs this if there is no name."""
    return {"user": name, "group": user(name).pw_gid, "extra_groups": []} if name else {}


def closed_folder(path, name):
    """Return the first folder on the way to `path`, or itself, that this user may not enter; None if there is none."""
    way = [*reversed(path.parents), path]
    script = 'for one; do [ -x "$one" ] || { echo "$one"; exit; }; done; [ -r "$one" ] || echo "$one"'
    found = run("/bin/sh", "-c", script, "sh", *way, cwd="/", **as_user(name)).strip()
    return Path(found) if found else None


def check_readable(paths, name):
    """Stop if a user cannot read what a kernel needs, with the name of the folder that is closed."""
    for path in paths:
        closed = closed_folder(path, name)
        if closed:
            raise Stop(
                f"the account {name} cannot read {path}, because {closed} is closed to it, so no notebook would run. "
                f"Open that folder (chmod o+rx {closed}), or put course and DIR into /opt and /srv, say, delete "
                ".venv and make it again with the system's Python: /usr/bin/python3 course.py setup"
            )


def try_kernel(folder, name, home):
    """Stop where nbgrader's kernel does not start for this account: what it runs students' notebooks in."""
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    imports = "import ipykernel_launcher, torch, grpo_edu.checks"
    command = [*sandboxed_kernel(folder, sys.executable)[0], sys.executable, "-c", imports]
    if not shutil.which("bwrap"):
        raise Stop("bubblewrap is missing, which keeps students' code from the masters: sudo apt install bubblewrap")
    try:
        run(*command, env=env, cwd="/", **as_user(name))
    except Stop as why:
        raise Stop(
            f"bubblewrap must keep students' code from the masters while nbgrader runs it. The kernel that it starts "
            f"{f'for the account {name} ' if name else ''}does not run here:\n{why}"
        ) from why


def install(folder, python):
    """Install the hub's environment and its proxy; from a wheelhouse if PIP_NO_INDEX is set."""
    hub, proxy = folder / "hub", folder / "proxy"
    wanted = (HERE / "requirements.txt").read_text() + (ROOT / "requirements.txt").read_text() + PROXY
    stamp = hub / "classroom-stamp"
    if stamp.exists() and stamp.read_text() == wanted:
        return say("JupyterHub and its proxy are up to date")
    say(f"installing JupyterHub into {hub} (about 450 MB, one to two minutes)")
    run(python, "-m", "venv", hub)
    run(hub / "bin" / "pip", "install", "-q", "-c", ROOT / "requirements.txt", "-r", HERE / "requirements.txt")
    carried = Path(os.environ.get("PIP_FIND_LINKS", "")) / "proxy"
    if os.environ.get("PIP_NO_INDEX") and carried.is_dir():
        shutil.copytree(carried, proxy, dirs_exist_ok=True, symlinks=True)
    else:
        run("npm", "install", "--no-fund", "--no-audit", "--prefix", proxy, PROXY)
    stamp.write_text(wanted)


def configure(folder, account, kernel):
    """Write what the hub, JupyterLab and nbgrader read; settings.toml and roster.csv are only made, not changed."""
    hub = folder / "hub"
    if not (folder / "settings.toml").exists():
        write(folder / "settings.toml", SETTINGS + account)
    shutil.copyfile(HERE / "jupyterhub_config.py", folder / "jupyterhub_config.py")
    (folder / "state").mkdir(mode=0o700, exist_ok=True)
    write(folder / "state" / "starter", secrets.token_hex(16), 0o600)
    exchange = folder / "exchange"
    exchange.mkdir(exist_ok=True)
    exchange.chmod(0o1777)  # nbgrader wants it open; nobody can remove what another one put there
    nbgrader = f'c = get_config()\nc.CourseDirectory.course_id = "grpo-edu"\nc.Exchange.root = "{exchange}"\n'
    write(hub / "etc/jupyter/nbgrader_config.py", nbgrader)
    server = {
        "ServerApp": {"jpserver_extensions": NO_FORMGRADER},
        "MappingKernelManager": {"cull_idle_timeout": 1800, "cull_connected": True},
    }
    write(hub / "etc/jupyter/jupyter_server_config.json", json.dumps(server))
    pages = {"disabledExtensions": dict.fromkeys(FORMGRADER_PAGES, True)}
    write(hub / "etc/jupyter/labconfig/page_config.json", json.dumps(pages))
    write(hub / "share/jupyter/lab/settings/overrides.json", json.dumps(NO_NEWS))
    write(hub / "share/jupyter/kernels/python3/kernel.json", json.dumps(kernel_spec([str(kernel)])))


def kernel_spec(python):
    """Return the course's kernel: the environment of `course.py setup`, not the hub's."""
    command = [*python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    return {"argv": command, "display_name": "GRPO course", "language": "python", "interrupt_mode": "message"}


def sandboxed_kernel(folder, python):
    """Return the kernel in which nbgrader runs students' notebooks: it sees neither the course nor a home.

    The hub's token in the environment, the masters and the gradebook are kept from it; the network is not, because
    nbgrader reaches the kernel through it.
    """
    command = ["bwrap", "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--clearenv"]
    command += ["--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    hidden = [Path(path) for path in (*HIDDEN, folder) if Path(path).is_dir()]
    for path in hidden:
        command += ["--tmpfs", str(path)]
    for path in needed_by_kernel():  # where it lies in a folder that is hidden
        command += ["--ro-bind", str(path), str(path)] if any(one in path.parents for one in hidden) else []
    for name in SECRET:
        command += ["--tmpfs", str(ROOT / name)] if (ROOT / name).is_dir() else []
    command += ["--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/tmp"]
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}.items():
        command += ["--setenv", name, value]
    return command, [*command, "--ro-bind", "{connection_file}", "{connection_file}", str(python)]


def read_roster(path):
    """Return the rows of the roster, each with a name and a role."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames or (), list(reader)
    except UnicodeDecodeError as error:
        raise Stop(f'{path} is not UTF-8 ({error}). Save it as "CSV UTF-8", which spreadsheets offer.') from error
    if not {"name", "role"} <= set(columns):
        raise Stop(f"{path}: the first line must name the columns, separated by commas. It looks like this:\n{SAMPLE}")
    for number, row in enumerate(rows, start=2):
        name, role = row.get("name") or "", row.get("role") or ""
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,30}", name):
            raise Stop(
                f"{path}, line {number}: the name {name!r} is not a user name (a-z, 0-9, - and _, a letter first)"
            )
        if role not in ROLES:
            raise Stop(f"{path}, line {number}: the role of {name} is {role!r}; write instructor or student")
    names = [row["name"] for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Stop(f"{path}: {', '.join(twice)} is there more than once")
    if not any(row["role"] == "instructor" for row in rows):
        raise Stop(f"{path} has no instructor")
    return rows


def read_release(text):
    """Return the numbers of the assignments to release, ["all"] or ["none"]."""
    known = sorted({path.name[:2] for path in (ROOT / "solutions").glob("*.ipynb")})
    names = [name.strip() for name in text.split(",")]
    if names not in (["all"], ["none"]) and (unknown := [name for name in names if name not in known]):
        raise Stop(
            f"--release: {', '.join(map(repr, unknown))} is unknown; write all, none or some of {','.join(known)}"
        )
    return names


def user(name):
    """Return the account of this name, or None."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def hand_out(home):
    """Hand out the notebooks, the stored results that they read, and the documents to which they link."""
    for part in ("notebooks", "benchmarks/results", "docs"):
        shutil.copytree(ROOT / part, home / part, ignore=shutil.ignore_patterns(".*", "runs"))


def make_users(folder, account, rows):
    """Create an account for each row, with the notebooks in its home and a password in passwords.csv."""
    group = f"{account}-people"
    run("groupadd", "--force", group)
    if user(account) is None:
        run("useradd", "--no-create-home", "--home-dir", folder / "course", "--shell", "/bin/bash", account)
    elif user(account).pw_dir != str(folder / "course"):  # of an earlier class, in another folder
        run("usermod", "--home", folder / "course", account)
    made = []
    for name in (row["name"] for row in rows):
        there = user(name)
        if there is not None:
            if there.pw_uid < 1000 or name == account:
                raise Stop(f"roster.csv: {name} is an account of the system; choose another name")
            continue
        run("useradd", "--create-home", "--key", "HOME_MODE=0700", "--shell", "/bin/bash", name)
        home = Path(user(name).pw_dir)
        hand_out(home)
        run("chown", "--recursive", f"{name}:", home)
        password = "".join(secrets.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(12))
        run("chpasswd", input=f"{name}:{password}\n")
        made.append((name, password))
    run("gpasswd", "--members", ",".join(row["name"] for row in rows), group)  # who left the roster is out
    if made:
        new = not (folder / "passwords.csv").exists()
        (folder / "passwords.csv").touch(mode=0o600)
        with (folder / "passwords.csv").open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("name", "password"), *made] if new else made)
    say(f"{len(made)} account(s) made, {len(rows) - len(made)} there already; first passwords: passwords.csv")


def make_course(folder, account, rows, release):
    """Lay out the masters, make the students' versions, release the requested ones; as the course's account."""
    course, kernel = folder / "course", Path(sys.executable)
    if not (course / "source").exists():
        course.mkdir(mode=0o700, exist_ok=True)
        run(kernel, "-m", "classroom.exercises", "--course", course, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for name, content in {
        ".jupyter/jupyter_server_config.json": {
            "ServerApp": {"jpserver_extensions": {"nbgrader.server_extensions.formgrader": True}}
        },
        ".jupyter/labconfig/page_config.json": {"disabledExtensions": {name: False for name in FORMGRADER_PAGES[::2]}},
        ".local/share/jupyter/kernels/python3/kernel.json": kernel_spec(sandboxed_kernel(folder, kernel)[1]),
    }.items():
        write(course / name, json.dumps(content))
    if account:
        run("chown", "--recursive", f"{account}:", course)
        course.chmod(0o700)
    env = {"HOME": str(course), "PATH": f"{folder / 'hub' / 'bin'}:/usr/bin:/bin", "LANG": "C.UTF-8"}
    try_kernel(folder, account, course)
    students = [
        {key: row.get(key) or None for key in ("name", "first_name", "last_name", "email")}
        for row in rows
        if row["role"] == "student"
    ]
    wanted = [
        ("+" if release == ["all"] or path.name[:2] in release else "") + path.name
        for path in sorted((course / "source").iterdir())
    ]
    say(f"making the students' versions of {len(wanted)} assignments")
    code = [folder / "hub" / "bin" / "python", HERE / "release.py", json.dumps(students), *wanted]
    run(*code, env=env, cwd=course, **as_user(account))
    say(f"released: {', '.join(name[1:] for name in wanted if name[0] == '+') or 'none yet'}")


def make_demo(folder, account):
    """Create the homes and the password of the demo, in which everybody is the one account that runs it."""
    for name in ("student", "teacher"):
        if not (folder / "home" / name).exists():
            hand_out(folder / "home" / name)
    home = folder / "home" / account
    if not home.is_symlink():
        home.symlink_to(folder / "course")
    if not (folder / "state" / "password").exists():
        write(folder / "state" / "password", secrets.token_urlsafe(9), 0o600)


def start(folder, account):
    """Run the hub until Ctrl-C; say where it is as soon as the course's server answers."""
    with (folder / "settings.toml").open("rb") as file:
        settings = tomllib.load(file)
    hub = subprocess.Popen([folder / "hub" / "bin" / "jupyterhub", "-f", "jupyterhub_config.py"], cwd=folder)
    signal.signal(signal.SIGTERM, lambda *_: hub.terminate())
    try:
        wait_for_course(f"http://127.0.0.1:{settings['port'] + 1}/hub/api/users/{account}", folder, hub)
        protocol = "https" if settings["certificate"] else "http"
        say(f"ready: {protocol}://{settings['ip'] or 'NAME'}:{settings['port']} (Ctrl-C ends it)")
        return hub.wait()
    except KeyboardInterrupt:  # the hub has got it as well
        return hub.wait()
    except Stop:
        hub.terminate()
        hub.wait()
        raise


def wait_for_course(address, folder, hub):
    """Ask the hub to start the course's server; return once it answers."""
    token = (folder / "state" / "starter").read_text()
    deadline = time.monotonic() + START_SECONDS
    ask = urllib.request.Request(f"{address}/server", method="POST", headers={"Authorization": f"token {token}"})
    look = urllib.request.Request(address, headers={"Authorization": f"token {token}"})
    said = "it does not answer"
    while time.monotonic() < deadline and hub.poll() is None:
        try:
            with urllib.request.urlopen(look, timeout=5) as answer:
                server = json.load(answer)["servers"].get("", {})
            if server.get("ready"):
                return
            if not server.get("pending"):
                urllib.request.urlopen(ask, timeout=60).close()
        except urllib.error.HTTPError as error:
            said = f"it answers {error.code}: {error.read().decode(errors='replace')[-300:]}"
        except OSError as error:
            said = str(error)
        time.sleep(0.5)
    if hub.poll() is not None:
        raise Stop(f"the hub ended with exit code {hub.returncode}; its last lines, above, say why")
    raise Stop(f"the hub did not start the course's server within {START_SECONDS} s: {said}")


def set_up(folder, demo, account, roster, release):
    check(folder, demo)
    folder.mkdir(parents=True, exist_ok=True)
    if roster:
        shutil.copyfile(roster, folder / "roster.csv")
    if demo and not (folder / "roster.csv").exists():
        write(folder / "roster.csv", DEMO_ROSTER)
    if not (folder / "roster.csv").exists():
        raise Stop(
            f"write the roster to {folder / 'roster.csv'}, or name it by --roster. It looks like this:\n{SAMPLE}"
        )
    (folder / "roster.csv").chmod(0o600)  # names and addresses are nobody else's business
    rows = read_roster(folder / "roster.csv")
    if not demo:
        check_readable([*needed_by_kernel(), folder], STRANGER)
    try_kernel(folder, "" if demo else STRANGER, folder)
    install(folder, sys.executable)
    configure(folder, f"account = {json.dumps(account)}\ndemo = {json.dumps(demo)}\n", Path(sys.executable))
    if demo:
        make_demo(folder, account)
    else:
        for name in SECRET:
            if (ROOT / name).is_dir():
                (ROOT / name).chmod(0o700)
        make_users(folder, account, rows)
    make_course(folder, "" if demo else account, rows, release)
    say(f"set up. To start it: add --start, or cd {folder} && {folder / 'hub/bin/jupyterhub'} -f jupyterhub_config.py")
    if demo:
        say(f"log in as teacher or as student; the password is in {folder / 'state/password'}")


def main():
    parser = argparse.ArgumentParser(prog="python3 course.py classroom", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the classroom is to live, such as /srv/grpo")
    parser.add_argument("--roster", metavar="FILE", type=Path, help="CSV: name,role,first_name,last_name,email")
    told = "assignments to release: all, none, numbers (none; with --demo all)"
    parser.add_argument("--release", metavar="02,04", help=told)
    parser.add_argument("--account", default="grpo-edu", help="the account that owns the course (grpo-edu)")
    parser.add_argument("--demo", action="store_true", help="try it alone: one account, no root, this computer only")
    parser.add_argument("--start", action="store_true", help="then run the hub, and say when the course is ready")
    options = parser.parse_args()
    try:
        release = read_release(options.release or ("all" if options.demo else "none"))
        set_up(options.folder.resolve(), options.demo, options.account, options.roster, release)
        if options.start:
            return start(options.folder.resolve(), options.account)
    except (Stop, OSError) as word:
        print(f"classroom: {word}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
