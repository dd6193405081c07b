"""What the user sees and what is kept of a run: metrics, trackers, the console, curves."""
