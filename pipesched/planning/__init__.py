"""Planning: searches for the best plan for a request, and defines the plan and its report."""
