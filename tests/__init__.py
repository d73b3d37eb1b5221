"""Tests; the folders mirror the tree.

Time in them: what must happen has `waiting.PATIENCE_S`, however quick it is; short times are for what must not happen. A pause of
the whole process is no time (`steady_time`). It is time for other processes: what a test runs beside itself gets leases and
limits that no pause outlasts, unless they are what is tested. Ports are of `ports`. What is fast is shown in bench/.
"""
