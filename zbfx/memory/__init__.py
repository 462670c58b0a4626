"""Programs -> what every rank holds after each action, by storages, to the byte.
In: `Program`s with their stages. Out: `RankMemory`, `MemoryReport`.
Called by the search for a plan within a limit and by reports; nothing runs."""
