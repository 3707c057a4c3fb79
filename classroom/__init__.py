"""What instructors use: the exercises made from the masters, grading, the challenge, and a hub (extra `classroom`).

To read how a class is graded, begin with `cli` and `grade`, which calls the others in this order:

- `exercises` reads the masters, and `files` finds the students and their notebooks;
- `run` takes one student: `repair` (with `syntax`) brings each notebook into its master's form; `sandbox` (with
  `kernel`) starts `student`, the process in which the student's code runs; `values` carries what it returned; and `run`
  judges it;
- `results` has the points and tables, and `pages` writes the feedback and the summary.

The challenge is `challenge`, the judge, and `challenger`, the process of a submission in the same sandbox. The scripts
in the folder `hub` set up JupyterHub with nbgrader.
"""
