"""Programs: schedules as data, with their validation, text form, lowering, and the tools to write them."""
