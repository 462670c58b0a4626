"""Stages -> a cost table: seconds and bytes of every stage and edge, in closed form or measured on a device.
In: `Stage`s, a device, a link. Out: `CostTable`, `Hardware`, `Formulas`.
Called by the compiler before it plans; the planner sees nothing but the table."""
