"""The experiments: the only floor that touches disk, screen, plots and configuration.

A command (``commands``) makes runs (``experiment``, ``training``, ``runs``); the folders read runs and write pages:
``report`` of one study, ``search`` for strengths, ``paper`` and ``frontier`` for publication, ``bench`` for speed.
"""
