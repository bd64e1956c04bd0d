"""The planner: it plays a few settings on given links, and recommends the cheapest that suffices."""
