"""Run directories as pages for the browser: one file with everything in it, and the same page kept up to date."""
