"""The work of the command line: the only layer of the package that reads and writes files and prints.

``commands`` holds the commands, ``config`` and ``presets`` their settings. ``experiment`` trains and evaluates the runs of a
study (``data``, ``models``, ``training``, ``runs``), ``search`` finds the strength of a regularizer, ``report`` writes the page
of a study, and ``bench`` measures speed.
"""
