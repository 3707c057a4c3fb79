"""nbgrader's settings for this course: copied by ``python -m classroom.exercises --course DIR``.

nbgrader reads the file in the folder where it is started, the course's; docs/grading.md tells the way.
"""

c = get_config()  # noqa: F821  given by nbgrader

c.CourseDirectory.course_id = "grpo-edu"

# The students' stubs are those of `exercises/`.
c.ClearSolutions.code_stub = {"python": "raise NotImplementedError"}
c.ClearSolutions.text_stub = "*Write your answer here: a few sentences, with the numbers that support it.*"

# A cell that does not end is interrupted, and the other questions still count. Torch takes seconds to import.
c.Execute.timeout = 60
c.Execute.interrupt_on_timeout = True

# `nbgrader zip_collect`: the student in the names of Canvas (doejane_4711_815_NAME.ipynb) and of Moodle
# (Ana M_77_assignsubmission_file_/NAME.ipynb). Whatever the file's name, its cells say which notebook it is.
c.FileNameCollectorPlugin.named_regexp = (
    r".*/(?P<student_id>[^/_]+)(_LATE)?_\d+_(assignsubmission_[^/]*/|\d+_)(?P<file_id>[^/]+)\.ipynb$"
)

# What prints without end would fill the database.
c.LimitOutput.max_lines = 500
c.LimitOutput.max_traceback = 50
