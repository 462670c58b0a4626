"""Bytes between ranks: who a process is, its connections, its transports, and how a fault on one reaches all.
In: a process group or a mesh, messages. Out: `Place`, `Channels`, the transports that programs call.
Called by measuring and by the runtime; knows neither models nor schedules."""
