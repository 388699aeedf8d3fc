"""A schedule as data: actions, orders, the rules of what comes before what, its text form, and what makes one."""
