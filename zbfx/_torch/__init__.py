"""Every private torch name that zbfx uses. The head of each file lists its own, with the versions they were checked on.

Code elsewhere imports functions and names of these files, which have names of ours and types. All rooms may.
"""
