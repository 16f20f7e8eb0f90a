"""XProfiler: seconds of a layer's operators, measured or computed; for planner, simulator, app."""
