"""Every private torch name that zbfx uses. The head of each file lists its own, with the versions they were checked on.

In: what public names of torch reach. Out: functions and names of ours, typed. Called by every room.
"""
