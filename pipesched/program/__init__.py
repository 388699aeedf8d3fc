"""Programs: the orders of actions that schedules generate, with validation, text form, lowering, and loading."""
