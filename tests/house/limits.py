"""The numbers that the house is held to, all in one place; each of them may only shrink.

A limit that has a goal stands at the present number until the goal is reached: lower it with every change that allows
it, never raise it. Exceptions with a name and a reason stand in the test that makes them.
"""

from __future__ import annotations

# Of one file, function or class.
MOST_LINES_IN_FILE = 400
MOST_LINES_IN_FUNCTION = 60
MOST_PARAMETERS = 7
MOST_ATTRIBUTES = 15

# Of the whole library.
MOST_LINES = 23_880  # goal 22,500
MOST_LINES_IN_CORE = 9_500  # goal 9,500
MOST_CLASSES = 210  # goal 210

# Habits that give way.
MOST_LATE_FUNCTIONS = 0  # goal 0: functions that somebody else sets on an object later
MOST_PACKED_ASSIGNMENTS = 8  # goal 8: `a, b = x, y`
MOST_HIDDEN_ARGUMENTS = 7  # goal 5: `**kwargs` read by name, dicts built to be splatted
MOST_PRIVATE_NAMES = 3  # goal 0: private names of torch outside compat.py
MOST_REACHES = 0  # goal 0: private names of ours outside their file
MOST_VAGUE_NAMES = 59  # goal 59: `found`, `one` and `told` as names of variables
MOST_GIVEN_UP_WORDS = 17  # goal 0: words of ours that another took the place of
MOST_SHARED_NAMES = 1  # goal 0: names that mean different things in different rooms
MOST_SILENT_ROOMS = 0  # goal 0: rooms without a docstring
MOST_UNLISTED_FILES = 0  # goal 0: files that a room's docstring lists wrongly, or not
MOST_UNMAPPED_FILES = 0  # goal 0: files that docs/design.md does not name
