"""Tools to test what trains with zbfx: faults at any place of any rank (`zbfx.testing.faults`).
In: a fault, a place, a rank. Out: a block in which that rank fails there. Called by tests, of users and of zbfx."""
