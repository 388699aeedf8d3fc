"""From a request to a plan: candidates, search, the plan itself, and its report."""
