"""Planning: from a request to a plan, by search over candidates; the plan itself, and its report."""
