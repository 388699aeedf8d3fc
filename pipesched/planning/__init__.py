"""Planning: searches for the best plan for a request. It also has the plan itself and the report on a plan."""
