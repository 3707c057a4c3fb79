"""Release assignments, by nbgrader's own API, in the folder of the course: set_up.py starts it.

Arguments: the students as JSON, then names of assignments; a + before a name releases it as well.
"""

import json
import sys

from nbgrader.apps import NbGraderAPI
from nbgrader.apps.baseapp import NbGrader

app = NbGrader()
app.load_config_file()
api = NbGraderAPI(config=app.config)
with api.gradebook as gradebook:
    for student in json.loads(sys.argv[1]):
        gradebook.update_or_create_student(student.pop("name"), **student)
released = {one["name"] for one in api.get_assignments() if one["status"] == "released"}
for name in sys.argv[2:]:
    name, release = name.lstrip("+"), name.startswith("+")
    if name in released:
        continue
    for step in ("generate_assignment", "release_assignment")[: 1 + release]:
        done = getattr(api, step)(name)
        if not done["success"]:
            sys.exit(f"{step} {name}: " + (done.get("error") or done["log"])[-1500:])
