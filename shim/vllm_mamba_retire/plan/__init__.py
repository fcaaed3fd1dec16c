"""The planner: is a server affected, what does that cost, which settings help."""
