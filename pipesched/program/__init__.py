"""Programs: represents, validates, prints, loads and lowers the orders of actions that schedules generate."""
