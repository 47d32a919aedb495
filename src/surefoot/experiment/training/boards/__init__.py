"""Where a run's numbers are drawn while it trains."""
