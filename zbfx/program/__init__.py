"""Stages and a schedule -> one flat graph per rank: compute, receive, send, free, in order.
In: `Stage`s, a `Schedule`, sums over replicas. Out: `Program`s, and the modules and functions that programs call.
Called by the compiler, and by whoever runs or predicts programs; opens no connection."""
