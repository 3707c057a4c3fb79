"""The hub's configuration: `course.py classroom` writes it again each time. Your settings are in settings.toml."""

import csv
import getpass
import os
import sys
import tomllib
from pathlib import Path

c = get_config()  # noqa: F821  given by JupyterHub

HERE = Path(__file__).resolve().parent
SETTINGS = tomllib.loads((HERE / "settings.toml").read_text())
ACCOUNT = SETTINGS["account"]  # it owns the course; instructors use its server together
with (HERE / "roster.csv").open(newline="", encoding="utf-8") as roster:
    INSTRUCTORS = [row["name"] for row in csv.DictReader(roster) if row["role"] == "instructor"]
PROGRAMS = Path(sys.prefix) / "bin"

# Three ports next to each other: for browsers, for the hub, and for the hub's orders to the proxy.
ip, port = SETTINGS["ip"], SETTINGS["port"]
c.JupyterHub.bind_url = f"{'https' if SETTINGS['certificate'] else 'http'}://{ip}:{port}"
c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = SETTINGS["certificate"], SETTINGS["key"]
c.JupyterHub.hub_port = port + 1
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{port + 2}"
c.ConfigurableHTTPProxy.command = [str(HERE / "proxy" / "node_modules" / ".bin" / "configurable-http-proxy")]
state = HERE / "state"  # readable by the hub's user only
c.ConfigurableHTTPProxy.pid_file = str(state / "proxy.pid")
c.JupyterHub.db_url = f"sqlite:///{state / 'hub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(state / "cookie_secret")
c.JupyterHub.cleanup_servers = True  # the servers end with the hub

# A student's server and kernels: threads for a shared computer, and a limit on the memory of each process.
limit = int(SETTINGS["memory_gb"] * 2**30)
c.Spawner.cmd = ["prlimit", f"--data={limit}", str(PROGRAMS / "jupyterhub-singleuser")]
c.Spawner.mem_limit = limit  # JupyterLab shows it; prlimit holds it
path = f"{PROGRAMS}:/usr/local/bin:/usr/bin:/bin"  # nbgrader calls programs of its environment
c.Spawner.environment = {"OMP_NUM_THREADS": str(SETTINGS["threads"]), "GOMP_SPINCOUNT": "20000", "PATH": path}
c.Spawner.environment["JUPYTER_PREFER_ENV_PATH"] = "0"  # the settings of the course's account go first
c.Spawner.default_url = "/lab"
c.Spawner.http_timeout = c.Spawner.start_timeout = 120  # thirty students start their servers in the same minute

# Whoever is in the roster may log in; instructors may also use the server of the course's account, and nobody else may.
c.JupyterHub.load_groups = {"instructors": {"users": INSTRUCTORS}}
c.JupyterHub.load_roles = [
    {
        "name": "instructor",
        "groups": ["instructors"],
        "scopes": [f"{scope}!user={ACCOUNT}" for scope in ("access:servers", "servers", "read:users")],
    },
    {  # `course.py classroom --start` waits until the course's server answers
        "name": "starter",
        "services": ["starter"],
        "scopes": [f"{scope}!user={ACCOUNT}" for scope in ("servers", "read:users")],
    },
    {"name": "culler", "services": ["culler"], "scopes": ["list:users", "read:users:activity", "servers"]},
]
c.Authenticator.allowed_users = {ACCOUNT}
if SETTINGS["demo"]:
    c.JupyterHub.authenticator_class = "dummy"
    c.DummyAuthenticator.password = (state / "password").read_text().strip()
    c.Authenticator.allowed_users |= {*INSTRUCTORS, "student"}
    c.JupyterHub.spawner_class = "simple"  # all are one account of this computer
    c.SimpleLocalProcessSpawner.home_dir_template = str(HERE / "home" / "{username}")
    c.Spawner.args = ["--allow-root"] if getpass.getuser() == "root" else []
else:
    c.JupyterHub.authenticator_class = "pam"
    c.PAMAuthenticator.allowed_groups = {f"{ACCOUNT}-people"}

minutes = SETTINGS["idle_minutes"]
c.JupyterHub.services = [
    {"name": "culler", "command": [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={60 * minutes}"]},
    {"name": "starter", "api_token": (state / "starter").read_text()},
]


def before_start(spawner):
    if spawner.user.name == ACCOUNT:
        spawner.default_url = "/formgrader"


c.Spawner.pre_spawn_hook = before_start
os.umask(0o022)
