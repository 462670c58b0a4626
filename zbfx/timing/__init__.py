"""An order of actions and costs -> when each action runs, what is held meanwhile, and whether a rule is broken."""
